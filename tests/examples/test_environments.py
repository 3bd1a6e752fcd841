"""The example of an agent against a scripted engine."""

import asyncio

import pytest

from examples.demo_runner import ROOT
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
