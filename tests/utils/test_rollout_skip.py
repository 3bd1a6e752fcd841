"""A kept generation answers later ones, validation excepted."""

from types import SimpleNamespace

import pytest
import torch
from omegaconf import OmegaConf

from verl.protocol import DataProto
from verl.utils.rollout_skip import RolloutSkip


def config(directory, n=2):
    return OmegaConf.create(
        {
            "actor_rollout_ref": {"rollout": {"skip_dump_dir": str(directory), "n": n}},
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


def test_validation_is_generated(tmp_path):
    workers = group()
    RolloutSkip(config(tmp_path), workers).wrap_generate_sequences()
    for _ in range(2):
        workers.generate_sequences(prompts(validate=True))
    assert workers.calls == [2, 2] and not list(tmp_path.iterdir())


def test_a_generation_of_another_size_is_refused(tmp_path):
    skip = RolloutSkip(config(tmp_path), group())
    skip.dump(DataProto.from_dict(tensors={"responses": torch.ones(3, 3)}))
    with pytest.raises(ValueError, match="holds 3 samples; this run needs 4"):
        skip.try_load()
