"""What a run writes of its answers, and the data it refuses, with workers that need no Ray."""

import json
import shutil

import pytest
import torch

from tests.helpers.rl_run import compose_run, fake_run, fake_trainer, metrics_rows


@pytest.mark.process
def test_validation_is_named_by_source_and_dumped(tmp_path):
    config = compose_run(
        tmp_path,
        "unused",
        trainer__val_only="true",
        trainer__validation_data_dir=tmp_path / "val",
        actor_rollout_ref__rollout__val_kwargs__n=2,
    )
    trainer = fake_trainer(config)
    trainer.fit()
    assert not trainer.actor_rollout_wg.updates
    (row,) = metrics_rows(tmp_path)
    assert row["val-core/letters/reward/mean@2"] == pytest.approx(2.5 / 6)
    dumped = [json.loads(line) for line in (tmp_path / "val" / "0.jsonl").read_text().splitlines()]
    assert len(dumped) == 8
    assert dumped[0]["gts"] == "a" and dumped[0]["words"] == 6 and dumped[0]["score"] == pytest.approx(2 / 6)


@pytest.mark.process
def test_rollout_dump_has_a_row_a_sample(tmp_path):
    fake_run(tmp_path, trainer__total_training_steps=1, trainer__rollout_data_dir=tmp_path / "d")
    rows = [json.loads(line) for line in (tmp_path / "d" / "1.jsonl").read_text().splitlines()]
    assert len(rows) == 32
    assert {"input", "output", "gts", "score", "step", "words"} <= rows[0].keys()
    assert rows[0]["input"].startswith("q : ")


def test_fewer_prompts_than_a_batch_are_refused(tmp_path):
    with pytest.raises(ValueError, match="gives 24 prompts, fewer than one batch of 32"):
        fake_trainer(compose_run(tmp_path, "unused", data__train_batch_size=32))


@pytest.mark.process
def test_skipped_rollouts_answer_from_the_first_generation(tmp_path):
    skip = {"actor_rollout_ref__rollout__skip_rollout": "true", "trainer__total_training_steps": 3,
            "actor_rollout_ref__rollout__skip_dump_dir": tmp_path / "kept", "trainer__test_freq": 3}  # fmt: skip
    for generations in (1 + 1, 1):  # the first step's and the validation's; then the validation's only
        trainer = fake_run(tmp_path, **skip)
        assert trainer.actor_rollout_wg.calls.count("generate") == generations
        shutil.rmtree(tmp_path / "out")
    first, *later = (update.batch["responses"] for update in trainer.actor_rollout_wg.updates)
    assert all(torch.equal(first, responses) for responses in later)
