"""Asynchronous runs on Ray with vLLM: one rank that trains, one that generates."""

import json
from collections import Counter, defaultdict
from pathlib import Path

import pytest

from tests.helpers.rl_run import compose_run, metrics_rows
from verl.config.asynchronous import with_derived_settings
from verl.report.metric_names import unknown_metrics
from verl.trainer.fully_async.phase import SAMPLE_ID
from verl.trainer.fully_async.trainer import FullyAsyncTaskRunner, FullyAsyncTrainer
from verl.trainer.main_ppo import TaskRunner

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
