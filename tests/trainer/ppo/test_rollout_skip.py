"""A stored generation answers later ones, except for validation and greedy baselines."""

from types import SimpleNamespace

import pytest
import torch
from omegaconf import OmegaConf

from verl.protocol import DataProto
from verl.trainer.ppo.rollout_skip import RolloutSkip


def config(directory, n=2):
    return OmegaConf.create(
        {
            "actor_rollout_ref": {"rollout": {"skip_dump_dir": str(directory), "n": n, "do_sample": True}},
            "data": {"train_batch_size": 2},
            "trainer": {"experiment_name": "e", "project_name": "p"},
        }
    )


def group():
    """A worker group whose answers count its calls."""
    calls = []

    def generate(batch):
        calls.append(len(batch))
        return DataProto.from_dict(tensors={"responses": torch.full((4, 3), len(calls))})

    return SimpleNamespace(generate_sequences=generate, calls=calls)


def prompts(**meta):
    return DataProto.from_dict(tensors={"input_ids": torch.zeros(2, 3)}, meta_info=meta)


def test_the_first_generation_answers_all(tmp_path):
    for expected_calls in (1, 0):  # a first run, then a later one
        workers = group()
        RolloutSkip(config(tmp_path), workers).wrap_generate_sequences()
        answers = [workers.generate_sequences(prompts()).batch["responses"] for _ in range(2)]
        assert all(torch.equal(a, torch.ones(4, 3)) for a in answers)
        assert len(workers.calls) == expected_calls
    assert [p.name for p in tmp_path.iterdir()] == ["e_p_GBS2__N2"]


@pytest.mark.parametrize("meta", [{"validate": True}, {"n": 1, "do_sample": False}])
def test_validation_and_greedy_baselines_are_generated(meta, tmp_path):
    workers = group()
    RolloutSkip(config(tmp_path), workers).wrap_generate_sequences()
    for _ in range(2):
        workers.generate_sequences(prompts(**meta))
    assert workers.calls == [2, 2] and not list(tmp_path.iterdir())


def test_a_generation_of_another_size_is_refused(tmp_path):
    workers = group()
    skip = RolloutSkip(config(tmp_path), workers)
    skip.dump(DataProto.from_dict(tensors={"responses": torch.ones(3, 3)}))
    skip.wrap_generate_sequences()
    with pytest.raises(ValueError, match="holds 3 samples; this run needs 4"):
        workers.generate_sequences(prompts())
