"""The example of an agent against a scripted engine; the curve of the example in verifiers."""

import asyncio
import json

import pytest

from examples.demo_runner import ROOT
from examples.environments import learn_sorted_numbers
from tests.agents.gateway.parts import run_program, worker_of

pytestmark = pytest.mark.process

CALL = '<tool_call>{"name": "calculator", "arguments": {"expression": "%s"}}</tool_call><|im_end|>'


@pytest.mark.parametrize(
    ("turns", "reward"),
    [
        ((CALL % "1 2 * 3 4", "answer 4 0 8<|im_end|>"), 1.0),
        ((CALL % "1 2", CALL % "1 2 * 3 4", "answer 4 0 8<|im_end|>"), 1.0),
        (("answer 4 1<|im_end|>",), 0.0),
    ],
)
def test_the_agent_calls_its_tool_and_reports_its_reward(tmp_path, turns, reward):
    left = list(turns)
    command = f"python {ROOT}/examples/environments/agent.py"
    worker = worker_of(tmp_path / "model", lambda prompt: left.pop(0), command=command, response_length=1000)
    output = asyncio.run(run_program(worker, reward_model={"ground_truth": "408"}))
    assert output.reward_score == reward and output.num_turns == 2 * len(turns) and not left
    text = worker.tokenizer.decode(output.response_ids)
    assert ("\n4 0 8\n" in text) == (reward == 1.0) and ("Error: " in text) == (len(turns) == 3)


def test_the_curve_is_drawn_from_the_metrics_of_a_run(tmp_path, monkeypatch):
    def train(command):
        assert f"trainer.default_local_dir={tmp_path}" in command and "data.environment.name=verifiers" in command
        steps = [{"val-core/sorted_numbers/acc/mean@1": 0.1}, {"critic/score/mean": 0.2}, {"critic/score/mean": 0.3}]
        lines = [json.dumps({"step": step, "data": data}) for step, data in enumerate(steps)]
        (tmp_path / "metrics.jsonl").write_text("\n".join(lines))
        return 0

    monkeypatch.setattr(learn_sorted_numbers.subprocess, "call", train)
    assert learn_sorted_numbers.main("model", [f"trainer.default_local_dir={tmp_path}"]) == 0
    assert (tmp_path / "curve.png").stat().st_size > 1000
