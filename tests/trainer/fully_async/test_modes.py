"""Other asynchronous runs on Ray with vLLM: with tools, one step off, on several ranks, with dropped prompts."""

import json
from pathlib import Path

import pytest
from ray.exceptions import RayError

from tests.agents.agent_loop.test_killed_tools_run import PARTS, save_calling_llama
from tests.helpers.rl_run import metrics_rows
from tests.trainer.fully_async.test_runs import OFF_BY_ONE, check_journal, composed, recorded_samples, rows, train
from verl.trainer.fully_async.trainer import FullyAsyncTaskRunner

pytestmark = [pytest.mark.process, pytest.mark.slow]


def test_conversations_with_tools_are_trained(ray_cluster, tmp_path):
    model, steps = save_calling_llama(tmp_path / "model", 6.0), 4
    tool = {"class_name": f"{PARTS}.LoggedTool", "config": {"log": str(tmp_path / "calls.log")}}
    (tmp_path / "tools.yaml").write_text(json.dumps({"tools": [tool]}))
    rollout = {"multi_turn__enable": "true", "multi_turn__tool_config_path": tmp_path / "tools.yaml",
               "agent__default_agent_loop": "tool_agent"}  # fmt: skip
    settings = {f"actor_rollout_ref__rollout__{key}": value for key, value in rollout.items()}
    settings |= {"data__max_response_length": 16, "data__max_prompt_length": 8}
    out = train(tmp_path / "run", model, steps, **settings, **OFF_BY_ONE)
    check_journal(out, steps)
    assert max(sample["output"]["num_turns"] for sample in recorded_samples(out)) > 2
    for sample in recorded_samples(out):
        assert sum(count for _, count in sample["spans"]) == sum(sample["output"]["response_mask"])


PROGRAM = """
import json, sys
from concurrent.futures import ThreadPoolExecutor
from openai import OpenAI

row, client = json.load(sys.stdin), OpenAI()

def ask(word):
    messages = [*row["prompt"], {"role": "user", "content": word}]
    return client.chat.completions.create(model="m", messages=messages, max_tokens=24).choices[0].message.content

with ThreadPoolExecutor() as pool:  # two branches at a time
    answers = list(pool.map(ask, ("a", "b")))
print(json.dumps({"reward": float(len(set(answers)))}))
"""


def test_programs_with_parallel_requests_are_trained(ray_cluster, tmp_path, tiny_llama):
    program, steps = tmp_path / "program.py", 4
    program.write_text(PROGRAM)
    settings = {
        "actor_rollout_ref__rollout__agent__command": f"'python {program}'", "data__max_response_length": 64,
        "data__max_prompt_length": 40, **OFF_BY_ONE,
    }  # fmt: skip
    out = train(tmp_path / "run", tiny_llama, steps, **settings)
    check_journal(out, steps)
    for sample in recorded_samples(out):
        assert sum(count for _, count in sample["spans"]) == sum(sample["output"]["response_mask"]) > 0
    metrics = [row for row in metrics_rows(tmp_path / "run") if "actor/pg_loss" in row]
    assert len(metrics) == steps and all(row["critic/score/mean"] >= 1 for row in metrics)


def test_conversations_that_an_environment_leads_are_trained(ray_cluster, tmp_path, tiny_llama, monkeypatch):
    monkeypatch.syspath_prepend(str(Path(__file__).parents[2] / "agents" / "environments" / "stub"))
    prompts, steps = [{"prompt": [{"role": "user", "content": f"{i} ?"}], "env_class": "count"} for i in range(16)], 4
    file = tmp_path / "prompts.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in prompts))
    adapter = "examples.environments.skyrl_gym_adapter.SkyRLGym"
    environment = {"name": adapter, "size": 16, "val_size": 4, "max_turns": 3}
    settings = {f"data__environment__{key}": value for key, value in environment.items()}
    settings |= {
        "data__train_files": file, "data__val_files": file, "custom_reward_function__path": "null",
        "data__max_prompt_length": 16, "data__max_response_length": 160, **OFF_BY_ONE,
    }  # fmt: skip
    out = train(tmp_path / "run", tiny_llama, steps, **settings, rollout__test_freq=2)
    check_journal(out, steps)
    metrics = metrics_rows(tmp_path / "run")
    trained = [row for row in metrics if "actor/pg_loss" in row]
    assert all(row["reward/steps/mean"] >= 1 for row in trained)
    assert max(row["num_turns/max"] for row in trained) > 2
    assert [row["val-aux/weights_version"] for row in metrics if "val-aux/weights_version" in row] == [2, 4]


def test_one_step_off_generates_the_next_batch_during_an_update(ray_cluster, tmp_path, tiny_llama):
    config = composed(
        tmp_path, tiny_llama, "one_step_off_ppo_trainer", data__train_batch_size=4, rollout__nnodes=1,
        rollout__n_gpus_per_node=1, actor_rollout_ref__rollout__n=2, actor_rollout_ref__actor__ppo_mini_batch_size=2,
        trainer__total_epochs=1, trainer__test_freq=3,
    )  # fmt: skip
    FullyAsyncTaskRunner().run(config)
    check_journal(tmp_path / "out", 6)
    metrics = [row for row in metrics_rows(tmp_path) if "actor/pg_loss" in row]
    behind = [row["fully_async/count/versions_behind_max"] for row in metrics]
    assert behind[0] == 0 and 1 in behind and set(behind) == {0, 1}
    assert [row["rollout/weight_syncs"] for row in metrics] == [1] * 5 + [2]  # the last one is validated
    assert "val-core/letters/reward/mean@1" in metrics[-1]


def test_two_ranks_train_and_two_servers_generate(ray_cluster, tmp_path, tiny_llama):
    out = train(
        tmp_path, tiny_llama, 3, trainer__n_gpus_per_node=2, rollout__n_gpus_per_node=2,
        actor_rollout_ref__actor__ppo_micro_batch_size_per_gpu=2, async_training__trigger_parameter_sync_step=2,
        async_training__staleness_threshold=0.5, actor_rollout_ref__rollout__max_num_seqs=4,
        async_training__require_batches=1,
    )  # fmt: skip
    check_journal(out, 3)
    spans = rows(out / "async_timeline.jsonl")
    assert {span["who"] for span in spans if span["what"] == "generate"} == {"server_0", "server_1"}


def test_too_few_cpus_for_the_servers_are_an_error_at_once(ray_cluster, tmp_path, tiny_llama):
    with pytest.raises(ValueError, match="rollout.n_gpus_per_node requests 8 CPU ranks beside those of the tr"):
        train(tmp_path, tiny_llama, 1, rollout__n_gpus_per_node=8)


def test_a_server_that_cannot_start_ends_the_run_and_leaves_no_place_reserved(ray_cluster, tmp_path, tiny_llama):
    """That no place is left is checked at the end of the file, by tests.conftest."""
    with pytest.raises(RayError, match="no_such_method"):
        train(tmp_path, tiny_llama, 1, actor_rollout_ref__rollout__quantization="no_such_method")
