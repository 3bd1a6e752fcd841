"""Files of a run: those of earlier runs are kept, samples are picked."""

import json

import numpy as np
import torch
from omegaconf import OmegaConf

from tests.helpers.models import make_tokenizer
from verl.protocol import DataProto
from verl.trainer.run.run_log import JsonlLog, RunLog, installed_versions
from verl.trainer.run.samples import pick_samples, report_rows, write_jsonl


def steps_in(path) -> list[int]:
    return [json.loads(line)["step"] for line in path.read_text().splitlines()]


def make_log(directory, total_steps):
    trainer = {"default_local_dir": str(directory), "report": False, "rollout_data_dir": None, "seed": 1}
    return RunLog(OmegaConf.create({"trainer": trainer}), total_steps)


def test_a_fresh_run_in_an_old_folder_keeps_the_earlier_metrics(tmp_path):
    log = make_log(tmp_path, total_steps=10)
    log.open(resumed_step=0)
    log.write(0, {"a": 1.0})
    log.write(1, {"a": np.float32(2.0), "text": "not a number"})
    assert json.loads((tmp_path / "metrics.jsonl").read_text().splitlines()[1]) == {"step": 1, "data": {"a": 2.0}}
    log.open(resumed_step=0)
    assert not (tmp_path / "metrics.jsonl").exists() and steps_in(tmp_path / "metrics.1.jsonl") == [0, 1]
    assert OmegaConf.load(tmp_path / "run_config.yaml") == log.config
    assert json.loads((tmp_path / "versions.json").read_text())["torch"] == installed_versions()["torch"]


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
    assert not list(tmp_path.iterdir())


def test_jsonl_takes_numpy_values(tmp_path):
    write_jsonl(tmp_path / "new" / "1.jsonl", [{"a": np.int64(3), "b": np.arange(2), "c": {1}}])
    assert json.loads((tmp_path / "new" / "1.jsonl").read_text()) == {"a": 3, "b": [0, 1], "c": "{1}"}


def test_half_a_surrogate_pair_is_written_without_loss(tmp_path):
    row = {"pred": "a \ud83c b", "\ude00": ["\U0001f600 é"]}
    write_jsonl(tmp_path / "1.jsonl", [row, row])
    assert [json.loads(line) for line in (tmp_path / "1.jsonl").read_text(encoding="utf-8").splitlines()] == [row, row]
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
