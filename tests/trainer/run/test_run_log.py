"""Files of a run: those of earlier runs are kept, samples picked, answers dumped and reused, checkpoints copied."""

import json
import os
import pathlib
import shutil
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from omegaconf import OmegaConf
from torchdata.stateful_dataloader import StatefulDataLoader

from tests.helpers.logs import logged
from tests.helpers.models import make_tokenizer
from tests.helpers.rl_run import compose_run, fake_run, fake_trainer, metrics_rows, read_rows
from verl.protocol import DataProto
from verl.trainer.ppo.rollout_skip import RolloutSkip
from verl.trainer.run.checkpoints import Checkpoints
from verl.trainer.run.prompt_stream import PromptStream
from verl.trainer.run.run_log import JsonlLog, RunLog, installed_versions
from verl.trainer.run.samples import pick_samples, report_rows, write_jsonl
from verl.training.checkpoint.publish import verify_manifest
from verl.utils.tracking import ValidationGenerationsLogger


def steps_in(path) -> list[int]:
    return [row["step"] for row in read_rows(path)]


def make_log(directory, total_steps):
    trainer = {"default_local_dir": str(directory), "report": False, "rollout_data_dir": None, "seed": 1}
    return RunLog(OmegaConf.create({"trainer": trainer}), total_steps)


def test_a_fresh_run_in_an_old_folder_keeps_the_earlier_metrics(tmp_path):
    log = make_log(tmp_path, total_steps=10)
    log.open(resumed_step=0)
    log.write(0, {"a": 1.0})
    log.write(1, {"a": np.float32(2.0), "text": "not a number"})
    assert read_rows(tmp_path / "metrics.jsonl")[1] == {"step": 1, "data": {"a": 2.0}}
    log.open(resumed_step=0)
    assert not (tmp_path / "metrics.jsonl").exists() and steps_in(tmp_path / "metrics.1.jsonl") == [0, 1]
    assert OmegaConf.load(tmp_path / "run_config.yaml") == log.config
    assert json.loads((tmp_path / "versions.json").read_text())["torch"] == installed_versions()["torch"]


def test_the_files_of_the_backend_file_are_of_one_run(tmp_path, monkeypatch):
    """Its validation samples too: rows of a step that runs again are removed, those of another run kept apart."""
    monkeypatch.delenv("VERL_FILE_LOGGER_PATH", raising=False)
    monkeypatch.setenv("VERL_FILE_LOGGER_ROOT", str(tmp_path))
    log, shown = make_log(tmp_path / "run", total_steps=10), ValidationGenerationsLogger("p", "e")
    log.plain_config["trainer"] |= {"logger": ["file"], "project_name": "p", "experiment_name": "e"}
    metrics, samples = tmp_path / "p" / "e.jsonl", tmp_path / "p" / "e.generations.jsonl"
    log.open(resumed_step=0)
    for step in (1, 2, 3):
        shown.log("file", [["q", "a", 1.0]], step)
    metrics.write_text(samples.read_text())
    log.open(resumed_step=2)
    assert steps_in(samples) == [1, 2]
    log.open(resumed_step=0)
    assert not metrics.exists() and not samples.exists()
    assert steps_in(tmp_path / "p" / "e.1.jsonl") == [1, 2, 3]
    assert steps_in(tmp_path / "p" / "e.generations.1.jsonl") == [1, 2]


def test_samples_are_best_worst_and_others_each_once():
    scores = (0.1, 0.9, 0.5, 0.3, 0.7, 0.2, 0.8, 0.9)  # the last one is the second's text again
    rows = [{"prompt": "p", "response": f"r{s}", "score": s} for s in scores]
    picked = pick_samples(rows, seed=1)
    by_kind = {kind: [p["score"] for p in picked if p["kind"] == kind] for kind in ("best", "worst", "random")}
    assert by_kind["best"] == [0.9, 0.8]
    assert by_kind["worst"] == [0.1, 0.2]
    assert len({p["score"] for p in picked}) == 6 and set(by_kind["random"]) <= {0.5, 0.3, 0.7}
    assert pick_samples(rows, seed=1) == picked
    assert [p["kind"] for p in pick_samples(rows[:3], seed=1)] == ["best", "best", "worst"]


def test_a_run_keeps_samples_of_about_twenty_steps(tmp_path, monkeypatch):
    log = make_log(tmp_path, total_steps=100)
    row = {"prompt": "p", "response": "r", "score": 1.0}
    monkeypatch.setattr("verl.trainer.run.run_log.sample_rows", lambda *args: [{"score": 1.0}])
    monkeypatch.setattr("verl.trainer.run.run_log.report_rows", lambda *args: [row])
    batch = DataProto.from_dict({"token_level_scores": torch.ones(1, 2)}, meta_info={"reward_extra_keys": []})
    for step in range(1, 101):
        log.write_samples(batch, None, step, is_last=step == 100)
    assert steps_in(log.samples_log.path) == [1, *range(5, 101, 5)]


def test_ranks_other_than_the_first_write_nothing(tmp_path):
    log = make_log(tmp_path, total_steps=1)
    log.writes = False
    with log:
        log.open(0)
        log.write(1, {"a": 1.0})
        log.write_samples(None, None, 1, is_last=True)
    assert not list(tmp_path.iterdir())


def test_a_report_that_fails_is_made_later_by_the_command_in_the_log(tmp_path, monkeypatch):
    monkeypatch.setattr("verl.report.page.write_report", lambda folder: 1 / 0)
    log = make_log(tmp_path, total_steps=1)
    log.config.trainer.report = True
    log.write(1, {"a": 1.0})
    with logged() as lines:
        log.write_report()
    assert f"training continues. Make it later: python -m verl.report {tmp_path}" in lines[0]


@pytest.mark.parametrize(("name", "own"), [(None, ""), ("reasoning_gym", ", data.environment.seed=0")])
def test_a_start_logs_the_seeds_that_are_not_the_runs(tmp_path, name, own):
    log = make_log(tmp_path, total_steps=1)
    environment = {"name": name, "seed": 0, "val_seed": 1}
    log.plain_config |= {"data": {"seed": 5, "environment": environment}, "critic": {"data_loader_seed": None}}
    with logged("INFO") as lines:
        log.open(0)
    assert any(line.startswith(f"seeds: trainer.seed=1, data.seed=5{own} (roles") for line in lines)


def test_half_a_surrogate_pair_is_written_without_loss(tmp_path):
    row = {"pred": "a \ud83c b", "\ude00": ["\U0001f600 é"]}
    write_jsonl(tmp_path / "1.jsonl", [row, row])
    assert read_rows(tmp_path / "1.jsonl") == [row, row]
    JsonlLog(tmp_path / "2.jsonl").append([row])
    assert json.loads((tmp_path / "2.jsonl").read_text(encoding="utf-8")) == row


def test_conversations_have_segments_of_generated_and_given_text():
    tokenizer = make_tokenizer()
    ids = tokenizer.convert_tokens_to_ids(["a", "b", "7", "c", "<eos>", "<pad>"])
    samples = DataProto.from_dict(
        {"responses": torch.tensor([ids, ids]), "response_mask": torch.tensor([[1, 1, 0, 1, 1, 0]] * 2),
         "attention_mask": torch.tensor([[1, 1, 1, 1, 1, 1, 0]] * 2)},
        {"__num_turns__": np.array([4, 2])},
    )  # fmt: skip
    rows = [{"input": "p", "output": "a b 7 c", "score": 1.0, "gts": "7"}] * 2
    several, single = report_rows(rows, samples, [], tokenizer)
    assert [(t["kind"], t["text"]) for t in several["segments"]] == [
        ("generated", "a b"), ("given", "7"), ("generated", "c <eos>"),
    ]  # fmt: skip
    assert not single["segments"]


@pytest.mark.process
def test_validation_is_named_by_source_and_dumped(tmp_path):
    settings = {"trainer__validation_data_dir": tmp_path / "val", "actor_rollout_ref__rollout__val_kwargs__n": 2}
    trainer = fake_run(tmp_path, trainer__val_only="true", **settings)
    assert not trainer.actor_rollout_wg.updates
    (row,) = metrics_rows(tmp_path)
    assert row["val-core/letters/reward/mean@2"] == pytest.approx(2.5 / 6)
    dumped = read_rows(tmp_path / "val" / "0.jsonl")
    assert len(dumped) == 8
    assert dumped[0]["gts"] == "a" and dumped[0]["words"] == 6 and dumped[0]["score"] == pytest.approx(2 / 6)


def test_fewer_prompts_than_a_batch_are_refused(tmp_path):
    for key in ("train_batch_size", "gen_batch_size"):
        with pytest.raises(ValueError, match=f"gives 24 prompts, fewer than one batch of data.{key}=32"):
            fake_trainer(compose_run(tmp_path, "unused", **{f"data__{key}": 32}))


@pytest.mark.process
def test_skipped_rollouts_answer_from_the_first_generation(tmp_path):
    """Except for validations and greedy baselines."""
    skip = {"actor_rollout_ref__rollout__skip_rollout": "true", "trainer__total_training_steps": 3,
            "actor_rollout_ref__rollout__skip_dump_dir": tmp_path / "kept", "trainer__test_freq": 3,
            "algorithm__adv_estimator": "remax"}  # fmt: skip
    for generations in (1 + 3 + 1, 3 + 1):  # the first step's, the baselines' and the validation's
        trainer = fake_run(tmp_path, **skip)
        assert trainer.actor_rollout_wg.calls.count("generate") == generations
        shutil.rmtree(tmp_path / "out")
    first, *later = (update.batch["responses"] for update in trainer.actor_rollout_wg.updates)
    assert all(torch.equal(first, responses) for responses in later)


def test_a_kept_generation_of_another_size_is_refused(tmp_path):
    config = {"actor_rollout_ref": {"rollout": {"n": 2, "skip_dump_dir": str(tmp_path)}},
              "data": {"train_batch_size": 2},
              "trainer": {"experiment_name": "e", "project_name": "p"}}  # fmt: skip
    workers = SimpleNamespace(generate_sequences=None)
    skip = RolloutSkip(config, workers)
    skip.dump(DataProto.from_dict({"responses": torch.ones(3, 3)}))
    assert [folder.name for folder in tmp_path.iterdir()] == ["e_p_GBS2__N2"]
    skip.wrap_generate_sequences()
    with pytest.raises(ValueError, match="holds 3 samples; this run needs 4"):
        workers.generate_sequences(DataProto.from_dict({"input_ids": torch.zeros(2, 3)}))


class OnTwoNodes:
    """A worker group whose second node has a folder of its own, or shares the first one's."""

    def __init__(self, shared):
        self.shared = shared

    def nodes_that_see(self, path):
        ranks = [("first", os.path.exists(path)), ("second", self.shared and os.path.exists(path))]
        return [ranks, ranks]  # each rank answers for all


def checkpoints(folder, shared, **trainer):
    settings = {"default_local_dir": str(folder), "save_freq": 2, "nnodes": 2, **trainer}
    return Checkpoints(OmegaConf.create(settings), {"actor": OnTwoNodes(shared)}, None, {}, None)


def test_a_folder_that_a_node_does_not_see_is_refused_before_the_first_save(tmp_path):
    folder = tmp_path / "run"
    with pytest.raises(ValueError, match="default_local_dir=.*run.* is not the same folder on every node: second can"):
        checkpoints(folder, shared=False)
    checkpoints(folder, shared=True)
    checkpoints(folder, shared=False, save_freq=0)
    checkpoints(folder, shared=False, nnodes=1)
    assert list(folder.iterdir()) == []


def test_a_published_checkpoint_is_copied_to_the_remote_folder(tmp_path):
    class Part:
        def save_checkpoint(self, local_path, *args):
            pathlib.Path(local_path).mkdir()
            (pathlib.Path(local_path) / "weights").write_text("w")

    remote = tmp_path / "remote"
    settings = {"default_local_dir": str(tmp_path / "run"), "save_freq": 1, "nnodes": 1}
    rows = [{"x": i} for i in range(4)]
    state = {"counters": {}, "best": {}, "kl_controller": {}, "variant": {}}

    def saved(default_hdfs_dir):
        trainer = OmegaConf.create(settings | {"default_hdfs_dir": str(default_hdfs_dir)})
        stream = PromptStream(StatefulDataLoader(rows, batch_size=2))
        Checkpoints(trainer, {"actor": Part()}, stream, {}, None).save(1, **state)

    saved(remote)
    assert (remote / "latest_checkpointed_iteration.txt").read_text() == "1"
    verify_manifest(remote / "global_step_1")
    blocked = tmp_path / "file"
    blocked.touch()
    with pytest.raises(RuntimeError, match="trainer.default_hdfs_dir=.*global_step_1 could not be copied there"):
        saved(blocked)
