"""What a run writes of its answers, and the data it refuses, with workers that need no Ray."""

import json
import shutil
from types import SimpleNamespace

import pytest
import torch

from tests.helpers.rl_run import compose_run, fake_run, fake_trainer, metrics_rows
from verl.protocol import DataProto
from verl.trainer.ppo.rollout_skip import RolloutSkip


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


def test_fewer_prompts_than_a_batch_are_refused(tmp_path):
    with pytest.raises(ValueError, match="gives 24 prompts, fewer than one batch of 32"):
        fake_trainer(compose_run(tmp_path, "unused", data__train_batch_size=32))


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
