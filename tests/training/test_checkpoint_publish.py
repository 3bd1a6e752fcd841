"""Publishing of checkpoints: rotation, full disk, digests, generators; crashes are in test_checkpoint_crash.py."""

import errno
import os
import random

import numpy as np
import pytest
import torch

from verl.training.checkpoint import CheckpointCorruptError, CheckpointWriteError, CheckpointWriter, publish
from verl.training.checkpoint.rng import get_rng_state, load_rng_state
from verl.utils.checkpoint import find_latest_ckpt_path


def save(root, step, max_to_keep=None):
    with CheckpointWriter(root, step, max_to_keep) as writer:
        (writer.path / "actor").mkdir()
        (writer.path / "actor" / "model.bin").write_text(f"weights of step {step}")
        (writer.path / "data.pt").write_text("state")


def names(root):
    return sorted(p.name for p in root.iterdir() if p.is_dir())


def test_a_published_step_is_listed_verified_and_tracked(tmp_path):
    save(tmp_path, 5)
    save(tmp_path, 10)
    assert publish.find_valid_checkpoint(tmp_path) == tmp_path / "global_step_10"
    publish.verify_manifest(tmp_path / "global_step_10")
    assert (tmp_path / "latest_checkpointed_iteration.txt").read_text() == "10"
    assert find_latest_ckpt_path(str(tmp_path)) == str(tmp_path / "global_step_10")
    assert names(tmp_path) == ["global_step_10", "global_step_5"]


def test_rotation_looks_at_the_disk_so_that_it_survives_a_restart(tmp_path):
    for step in (2, 4, 10):
        save(tmp_path, step)
    (tmp_path / "global_step_notes").mkdir()
    save(tmp_path, 12, max_to_keep=2)
    assert names(tmp_path) == ["global_step_10", "global_step_12", "global_step_notes"]


def test_rotation_never_removes_the_step_just_written(tmp_path):
    """After going back to an old step by hand, newer folders are on the disk."""
    save(tmp_path, 8)
    save(tmp_path, 9)
    save(tmp_path, 3, max_to_keep=1)
    assert "global_step_3" in names(tmp_path)
    assert (tmp_path / "latest_checkpointed_iteration.txt").read_text() == "3"


def test_steps_above_the_one_just_written_are_of_another_run(tmp_path):
    for step in (10, 20, 30):
        save(tmp_path, step)
    save(tmp_path, 5)
    assert publish.find_valid_checkpoint(tmp_path) == tmp_path / "global_step_5"
    save(tmp_path, 15, max_to_keep=2)
    assert names(tmp_path) == [f"global_step_{n}" for n in (10, 15, 20, 30, 5)]
    save(tmp_path, 20, max_to_keep=2)  # the other run's is replaced
    assert publish.steps_of_run(tmp_path) == [15, 20] and publish.published_steps(tmp_path) == [10, 15, 20, 30]
    assert publish.begin_run(tmp_path, tmp_path / "global_step_30") == [10, 15, 20]
    assert find_latest_ckpt_path(str(tmp_path)) == str(tmp_path / "global_step_30")


@pytest.mark.parametrize("text", ["", "{}", "5", "[null]", "[1.5]", '["10"]', "[" * 100_000, "\x00"])
def test_a_list_of_other_runs_that_is_none_is_named(tmp_path, text):
    save(tmp_path, 5)
    (tmp_path / "other_runs.json").write_text(text)
    with pytest.raises(CheckpointCorruptError, match="other_runs.json cannot be read .*; remove it if"):
        publish.find_valid_checkpoint(tmp_path)


def test_a_full_disk_names_the_path_and_keeps_the_old_step(tmp_path):
    save(tmp_path, 1)
    with pytest.raises(CheckpointWriteError, match="no room for the checkpoint in .*global_step_2") as e:
        with CheckpointWriter(tmp_path, 2) as w:
            (w.path / "half").write_bytes(b"0" * 1000)
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    assert e.value.errno == errno.ENOSPC and names(tmp_path) == ["global_step_1"]
    assert publish.find_valid_checkpoint(tmp_path) == tmp_path / "global_step_1"


def test_a_file_that_changed_since_a_rank_digested_it_is_read_again(tmp_path):
    """That digested files are not read again: test_engine_ranks.py."""
    with CheckpointWriter(tmp_path, 2) as writer:
        (writer.path / "actor").mkdir()
        (writer.path / "actor" / "model.bin").write_text("longer")
        publish.write_digests(writer.path / "actor", {"model.bin": (1, "0"), "gone.bin": (3, "0")})
    publish.verify_manifest(tmp_path / "global_step_2")


def test_a_generator_state_set_again_gives_the_same_numbers():
    def draw():
        return [random.random(), random.gauss(0, 1), np.random.rand(), np.random.randn(), torch.rand(1).item()]

    random.gauss(0, 1), np.random.randn()  # leaves half of a pair waiting in both
    state = get_rng_state()
    first = [draw(), draw()]
    assert all(isinstance(v, torch.Tensor) for v in state.values())
    load_rng_state(state)
    assert [draw(), draw()] == first
