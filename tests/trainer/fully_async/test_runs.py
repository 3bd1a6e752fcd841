"""Asynchronous runs on Ray: one rank that trains, one that generates; with programs, environments, one step off."""

import json
from collections import Counter, defaultdict
from pathlib import Path

import pytest
from ray.exceptions import RayError

from tests.helpers.rl_run import compose_run, metrics_rows
from verl.config.asynchronous import with_derived_settings
from verl.report.metric_names import unknown_metrics
from verl.trainer.fully_async.phase import SAMPLE_ID
from verl.trainer.fully_async.trainer import FullyAsyncTaskRunner, FullyAsyncTrainer
from verl.trainer.main_ppo import TaskRunner
from verl.utils.import_utils import is_sglang_available

pytestmark = [pytest.mark.process, pytest.mark.slow]
ROLLOUT = {"name": "vllm", "mode": "async", "dtype": "float32", "calculate_log_probs": "true", "max_num_seqs": 32,
           "agent__num_workers": 1}  # fmt: skip
ENDS = ("trained", "dropped_stale", "dropped_failed")


def composed(folder, model, tree, **more):
    given = {"trainer__save_freq": -1, "reward_model__num_workers": 0, "trainer__test_freq": -1}
    given |= {f"actor_rollout_ref__rollout__{key}": value for key, value in ROLLOUT.items()} | more
    return compose_run(folder, model, tree=f"verl.trainer.config/{tree}", **given)


def train(folder, model, steps, **more):
    """An asynchronous run of `steps` updates of 4 prompts, 2 samples each."""
    given = {
        "data__train_batch_size": 0, "rollout__nnodes": 1, "rollout__n_gpus_per_node": 1, "rollout__n": 2,
        "rollout__test_freq": -1, "rollout__total_rollout_steps": 4 * steps, "actor_rollout_ref__rollout__n": 2,
        "actor_rollout_ref__actor__ppo_mini_batch_size": 4, "rollout__total_epochs": 20,
    }  # fmt: skip
    config = composed(folder, model, "fully_async_ppo_trainer", **{**given, **more})
    runner = FullyAsyncTaskRunner()
    runner.run(with_derived_settings(config))
    return folder / "out"


def rows(path):
    return [json.loads(line) for line in Path(path).read_text().splitlines()]


#: An update may train samples of the weights before the last sync.
OFF_BY_ONE = {"async_training__staleness_threshold": 1, "async_training__trigger_parameter_sync_step": 1}


def recorded_samples(out):
    """The samples of all updates."""
    groups = [group for row in rows(out / "async_record.jsonl") for group in row["groups"]]
    return [sample for group in groups for sample in group["samples"]]


def weights(out, step):
    """Checksums of the weights and the optimizer's state in a checkpoint."""
    manifest = json.loads((out / f"global_step_{step}" / "manifest.json").read_text())
    return {entry["file"]: entry["sha256"] for entry in manifest["files"] if entry["file"].endswith(".distcp")}


def check_journal(out, steps, n=2, batch=4):
    """Every sample follows the state machine, the counts add up, none is trained twice."""
    states = defaultdict(list)
    for row in rows(out / "async_journal.jsonl"):
        if "sample" in row:
            states[row["sample"]].append(row["state"])
    ends = Counter(seen[-1] for seen in states.values())
    assert all(seen[0] == "drawn" and sum(s in ENDS for s in seen) <= 1 for seen in states.values())
    assert ends["trained"] == steps * batch * n
    assert sum(ends.values()) == len(states)
    return ends, states


def test_without_staleness_a_run_equals_the_synchronous_one_bit_for_bit(ray_cluster, tmp_path, tiny_llama):
    steps = 10
    config = composed(
        tmp_path / "sync", tiny_llama, "ppo_trainer", data__train_batch_size=4, trainer__total_epochs=20,
        trainer__total_training_steps=steps, actor_rollout_ref__rollout__n=2,
        actor_rollout_ref__actor__ppo_mini_batch_size=4, trainer__rollout_data_dir=tmp_path / "sync" / "samples",
        actor_rollout_ref__actor__use_rollout_log_probs="true",
    )  # fmt: skip
    TaskRunner().run(config)
    on_policy = {"async_training__staleness_threshold": 0, "async_training__trigger_parameter_sync_step": 1}
    out = train(tmp_path / "async", tiny_llama, steps, **on_policy,
                trainer__rollout_data_dir=tmp_path / "async" / "samples")  # fmt: skip
    check_journal(out, steps)
    for step in range(1, steps + 1):
        one, other = (rows(tmp_path / kind / "samples" / f"{step}.jsonl") for kind in ("sync", "async"))
        assert one == other and len(one) == 8
    assert weights(out, steps) == weights(tmp_path / "sync" / "out", steps)
    for one, other in zip(metrics_rows(tmp_path / "sync"), metrics_rows(tmp_path / "async"), strict=True):
        assert {name: other[name] for name in one if name.startswith(("actor/", "critic/", "response_length"))} == {
            name: value for name, value in one.items() if name.startswith(("actor/", "critic/", "response_length"))
        }
        assert other["fully_async/count/versions_behind_max"] == 0 and other["rollout/weight_syncs"] == 1
        assert unknown_metrics([name for name in other if name != "step"]) == []


def old_log_probs_of_updates(monkeypatch):
    """{sample: the log-probs of its tokens that ratios are taken against}, filled by updates from now on."""
    seen, check = {}, FullyAsyncTrainer._check_ages

    def checked(self, batch):
        mask, columns = batch.batch["response_mask"].bool(), batch.non_tensor_batch
        for i, sample in enumerate(columns[SAMPLE_ID]):
            seen[sample] = batch.batch["old_log_probs"][i, mask[i]].tolist()
        check(self, batch)

    monkeypatch.setattr(FullyAsyncTrainer, "_check_ages", checked)
    return seen


def test_stale_and_partial_samples_keep_the_bound(ray_cluster, tmp_path, tiny_llama, monkeypatch):
    steps, bound, against = 8, 2, old_log_probs_of_updates(monkeypatch)
    settings = {
        "async_training__staleness_threshold": 2, "async_training__trigger_parameter_sync_step": 1,
        "data__max_response_length": 48, "actor_rollout_ref__rollout__ignore_eos": "true",
    }  # fmt: skip
    out = train(tmp_path / "run", tiny_llama, steps, **settings, rollout__test_freq=2)
    ends, states = check_journal(out, steps)
    assert ends == {"trained": steps * 8}
    interrupted = [sample for sample, seen in states.items() if "interrupted" in seen]
    assert interrupted, "no generation was interrupted"
    for row in rows(out / "async_record.jsonl"):
        for sample in (sample for group in row["groups"] for sample in group["samples"]):
            versions = [version for version, _ in sample["spans"]]
            tokens = sample["output"]["response_ids"]
            assert versions == sorted(set(versions)) and row["step"] - 1 - versions[0] <= bound
            assert sum(count for _, count in sample["spans"]) == len(tokens) == 48
            assert len(sample["output"]["response_logprobs"]) == 48
            assert against[sample["id"]] == pytest.approx(sample["output"]["response_logprobs"], abs=1e-6)
            assert len(versions) > 1 or sample["id"] not in interrupted
    metrics = metrics_rows(tmp_path / "run")
    assert max(row.get("fully_async/count/versions_behind_max", 0) for row in metrics) in (1, 2)
    assert sum(row.get("fully_async/partial/total_partial_num", 0) for row in metrics) > 0
    validated = [row["val-aux/weights_version"] for row in metrics if "val-core/letters/reward/mean@1" in row]
    assert validated == [2, 4, 6, 8]
    spans = rows(out / "async_timeline.jsonl")
    assert {(span["who"], span["what"]) for span in spans} >= {
        ("trainer", "train"), ("trainer", "sync"), ("server_0", "generate"), ("server_0", "sync"),
    }  # fmt: skip
    assert all(span["start"] <= span["end"] for span in spans)


@pytest.mark.sglang
@pytest.mark.skipif(not is_sglang_available(), reason="needs the environment of make sglang-env")
def test_samples_go_on_after_a_sync_with_the_log_probs_of_each_version(ray_cluster, tmp_path, tiny_llama):
    rollout = {"name": "sglang", "max_num_seqs": 16, "ignore_eos": "true", "verify_weights_every": 1}
    steps = 4
    out = train(
        tmp_path, tiny_llama, steps, data__max_response_length=96, async_training__partial_rollout="true", **OFF_BY_ONE,
        **{f"actor_rollout_ref__rollout__{key}": value for key, value in rollout.items()},
    )  # fmt: skip
    check_journal(out, steps)
    samples = recorded_samples(out)
    for sample in samples:
        assert sum(count for _, count in sample["spans"]) == sum(sample["output"]["response_mask"]) == 96
    assert any(len(sample["spans"]) > 1 for sample in samples)  # interrupted by a sync
    metrics = [row for row in metrics_rows(tmp_path) if "actor/pg_loss" in row]
    assert len(metrics) == steps and max(row["fully_async/count/versions_behind_max"] for row in metrics) <= 1


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


def test_too_few_cpus_for_the_servers_are_an_error_at_once(ray_cluster, tmp_path, tiny_llama):
    with pytest.raises(ValueError, match="rollout.n_gpus_per_node requests 8 CPU ranks beside those of the tr"):
        train(tmp_path, tiny_llama, 1, rollout__n_gpus_per_node=8)


def test_a_server_that_cannot_start_ends_the_run_and_leaves_no_place_reserved(ray_cluster, tmp_path, tiny_llama):
    """That no place is left is checked at the end of the file, by tests.conftest."""
    with pytest.raises(RayError, match="no_such_method"):
        train(tmp_path, tiny_llama, 1, actor_rollout_ref__rollout__quantization="no_such_method")
