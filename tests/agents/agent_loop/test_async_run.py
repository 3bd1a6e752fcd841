"""GRPO with agent loops: on Ray against sync mode on one rank, with SGLang, and with programs that branch."""

import json

import pytest

from tests.agents.agent_loop.test_killed_tools_run import save_calling_llama
from tests.helpers.rl_run import compose_run, metrics_rows
from verl.report.metric_names import unknown_metrics
from verl.trainer.main_ppo import TaskRunner
from verl.utils.import_utils import is_sglang_available

pytestmark = [pytest.mark.process, pytest.mark.slow]


def train(folder, model, steps, ranks=1, **rollout):
    """The metrics of a run with these keys of actor_rollout_ref.rollout, which validates in its last step."""
    rollout = {"mode": "async", "dtype": "float32", "max_num_seqs": 64, "agent__num_workers": 2, **rollout}
    config = compose_run(
        folder, model, trainer__total_training_steps=steps, trainer__n_gpus_per_node=ranks, trainer__test_freq=steps,
        trainer__save_freq=-1, reward_model__num_workers=0, trainer__rollout_data_dir=folder / "samples",
        **{f"actor_rollout_ref__rollout__{key}": value for key, value in rollout.items()},
    )  # fmt: skip
    TaskRunner().run(config)
    return metrics_rows(folder)


def test_agent_loops_train_as_batches_do(ray_cluster, tmp_path, tiny_llama):
    vllm, modes = {"name": "vllm", "calculate_log_probs": "true"}, {"sync": 1, "async": 2}
    rows = [train(tmp_path / mode, tiny_llama, 2, ranks, mode=mode, **vllm) for mode, ranks in modes.items()]
    same = ("critic/score/mean", "response_length/mean", "training/weights_version", "rollout/weight_syncs",
            "val-core/letters/reward/mean@1", "reward/words/mean")  # fmt: skip
    for one, other in zip(*rows, strict=True):
        assert {key: one.get(key) for key in same} == pytest.approx({key: other.get(key) for key in same})
        assert one["actor/grad_norm"] == pytest.approx(other["actor/grad_norm"], rel=1e-4)
        assert other["num_turns/mean"] == 2 and other["training/rollout_probs_diff_max"] < 1e-4
        assert unknown_metrics([name for name in other if name != "step"]) == []
    files = [tmp_path / mode / "samples" / "1.jsonl" for mode in modes]
    texts = [sorted(json.loads(line)["output"] for line in file.read_text().splitlines()) for file in files]
    assert texts[0] == texts[1] and len(texts[0]) == 32


@pytest.mark.sglang
@pytest.mark.skipif(not is_sglang_available(), reason="needs the environment of make sglang-env")
def test_agent_loops_train_with_sglang(ray_cluster, tmp_path, tiny_llama):
    rows = train(tmp_path, tiny_llama, 3, name="sglang")
    assert [row["training/weights_version"] for row in rows if "num_turns/mean" in row] == [0, 1, 2]
    for row in rows[:3]:
        assert row["num_turns/mean"] == 2 and row["actor/grad_norm"] > 0
        assert row["training/rollout_probs_diff_max"] < 1e-3  # the log-probs of the weights that were sent
    assert "val-core/letters/reward/mean@1" in rows[-1]


AGENT = """
import json, sys
from openai import OpenAI

row = json.load(sys.stdin)
number = {"type": "integer"}
parameters = {"type": "object", "properties": {"a": number, "b": number}, "required": ["a", "b"]}
tools = [{"type": "function", "function": {"name": "add", "description": "Adds.", "parameters": parameters}}]
client, messages = OpenAI(), row["prompt"]
if row["extra_info"]["index"] == 3:
    sys.exit(1)
first = client.chat.completions.create(model="m", messages=messages, tools=tools, n=2, max_tokens=8).choices
for choice in first:
    answers = [{"role": "tool", "tool_call_id": call.id, "content": "7"} for call in choice.message.tool_calls or []]
    again = answers or [{"role": "user", "content": "?"}]
    client.chat.completions.create(model="m", messages=[*messages, choice.message.to_dict(), *again], tools=tools,
                                   max_tokens=8)
client.chat.completions.create(model="m", messages=[{"role": "user", "content": "7"}], max_tokens=4)
print(json.dumps({"reward": sum(bool(choice.message.tool_calls) for choice in first)}))
"""


def test_branches_are_trained(tmp_path):
    agent = tmp_path / "agent.py"
    agent.write_text(AGENT)
    model = save_calling_llama(tmp_path / "model", sharpness=5.0)
    rollout = {"name": "vllm", "mode": "async", "dtype": "float32", "max_num_seqs": 64, "n": 2,
               "calculate_log_probs": "true", "agent__command": f"'python {agent}'"}  # fmt: skip
    config = compose_run(
        tmp_path, model, trainer__local="true", trainer__total_training_steps=1, trainer__save_freq=-1,
        trainer__test_freq=-1, data__max_response_length=64, data__max_prompt_length=16, data__train_batch_size=8,
        data__shuffle="false", actor_rollout_ref__actor__ppo_mini_batch_size=8, reward_model__num_workers=0,
        trainer__rollout_data_dir=tmp_path / "samples",
        **{f"actor_rollout_ref__rollout__{key}": value for key, value in rollout.items()},
    )  # fmt: skip
    TaskRunner().run(config)
    (row,) = metrics_rows(tmp_path)
    assert row["agent_loop/end/stop"] == 14 / 16 and row["agent_loop/end/program_failed"] == 2 / 16
    assert row["training/dropped_samples/lost"] == 2 and row["num_turns/mean"] == 10
    assert row["training/rollout_probs_diff_max"] < 1e-4 and row["actor/grad_norm"] > 0
    assert unknown_metrics([name for name in row if name != "step"]) == []
    scores = [json.loads(line)["score"] for line in (tmp_path / "samples" / "1.jsonl").read_text().splitlines()]
    assert len(scores) == 14 and set(scores) <= {0.0, 1.0, 2.0}
