"""Rates of asynchronous runs from the files of small ones, and the table of splits that follows."""

import json
import re
from pathlib import Path
from types import SimpleNamespace

import pytest

from tests.helpers.rl_run import compose_run
from verl.planning import async_calibration
from verl.planning.async_calibration import IN_TURN, measure, print_best_split, rates_of
from verl.trainer.main_ppo import run_ppo


def write_run(folder, samples, servers=2, tokens=(60, 100), warm=True):
    """Steps of versions 0 (which warms up), 1 and 2: a server makes 20 tokens per second for each of its sequences."""
    timeline, journal, metrics, now = [], [], [], 0.0
    for version in range(3):
        slow = 100.0 if version == 0 and warm else 1.0
        lengths = [tokens[k % len(tokens)] for k in range(samples)]
        seconds = sum(lengths) / servers / (20 * samples / servers) * slow
        for server in range(servers):
            row = {"who": f"server_{server}", "what": "generate", "start": now, "end": now + seconds}
            timeline += [row | {"version": version}, {**row, "what": "idle", "version": version}]
        now += seconds
        for k, length in enumerate(lengths):
            row = {"time": now, "sample": f"{version}/{k}", "version": version}
            journal.append(row | {"state": "running", "time": now - seconds})
            journal.append(row | {"state": "finished", "tokens": length})
        data = {"timing_s/step": 99.0, "timing_s/gen": 9.0, "timing_s/update_weights": 0.5, "timing_s/adv": 1.0,
                "timing_s/update_actor": (2.0 + 0.25 * samples) * slow, "prompt_length/mean": 30.0}  # fmt: skip
        metrics.append({"step": version + 1, "data": data})
    for name, rows in (("async_timeline", timeline), ("async_journal", journal), ("metrics", metrics)):
        Path(folder, f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


def test_known_rates_are_recovered(tmp_path):
    measured = []
    for samples in (8, 32):
        folder = tmp_path / str(samples)
        folder.mkdir()
        write_run(folder, samples)
        measured.append(measure(folder, samples))
    rates, response = rates_of(measured, ranks=4, samples=64)
    assert rates.decode == ((4.0, pytest.approx(80.0)), (16.0, pytest.approx(320.0)))
    assert rates.seconds_of_update(4) == pytest.approx(1 + 2 + 0.25 * 64)
    assert rates.seconds_of_update(8) == pytest.approx(3 + 0.25 * 64 / 2)
    assert rates.sync_s == 0.5 and (response.mean, response.cv) == (80.0, 0.25)


def test_small_steps_of_two_sizes_give_a_table_of_splits(monkeypatch, capfd):
    config = SimpleNamespace(
        trainer=SimpleNamespace(nnodes=1, n_gpus_per_node=2), data=SimpleNamespace(max_response_length=256),
        rollout=SimpleNamespace(nnodes=1, n_gpus_per_node=2, n=4),
        async_training=SimpleNamespace(trigger_parameter_sync_step=1, staleness_threshold=1.0, partial_rollout=True),
        actor_rollout_ref=SimpleNamespace(
            rollout=SimpleNamespace(tensor_model_parallel_size=1, max_num_seqs=64)
        ),
    )  # fmt: skip
    monkeypatch.setattr(async_calibration, "plan_batches", lambda config: SimpleNamespace(prompts=16))
    trained = []

    def train(changes):
        assert IN_TURN.items() <= changes.items() and changes["data.max_response_length"] == 128
        trained.append(changes["data.train_batch_size"])
        write_run(changes["trainer.default_local_dir"], 4 * changes["data.train_batch_size"])

    print_best_split(config, train)
    shown = capfd.readouterr().out
    assert trained == [2, 8]
    assert re.search(r"ranks that train: \d, servers: \d; \d\.\d\d times", shown)


@pytest.mark.process
@pytest.mark.slow
def test_a_dry_run_with_calibration_prints_the_splits_of_its_own_ranks(ray_cluster, tmp_path, tiny_llama, capfd):
    config = compose_run(
        tmp_path, tiny_llama, "verl.trainer.config/fully_async_ppo_trainer", trainer__dry_run="true",
        trainer__calibrate="true", data__train_batch_size=0, rollout__n_gpus_per_node=1, rollout__n=2,
        rollout__total_rollout_steps=16, actor_rollout_ref__rollout__n=2, actor_rollout_ref__rollout__name="vllm",
        actor_rollout_ref__rollout__dtype="float32", actor_rollout_ref__rollout__max_num_seqs=16,
        reward_model__num_workers=0,
    )  # fmt: skip
    with pytest.raises(SystemExit) as ended:
        run_ppo(config)
    shown = capfd.readouterr().out
    assert ended.value.code == 0, shown
    assert re.search(r"ranks that train: 1, servers: 1; \d\.\d\d times", " ".join(shown.split()))
    assert not (tmp_path / "out" / "metrics.jsonl").exists()
