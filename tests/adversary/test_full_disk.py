"""Messages of a full disk, on real disks that are full: their numbers agree, and they name file, step and fix."""

import json
import os
import re

import pytest
import torch

from tests.helpers.disks import leave_free, small_disk
from verl.trainer.run.checkpoints import TrainerState, write_trainer_state
from verl.trainer.run.run_log import JsonlLog
from verl.training.checkpoint import CheckpointWriteError, CheckpointWriter
from verl.training.checkpoint.publish import disk_full

PAGE = 4096


def assert_consistent(error: Exception, folder: str) -> None:
    """The message names folder, unit and fix, and more bytes are needed than free."""
    numbers = re.search(r"at least (\d+) bytes are needed, (\d+) are free", str(error))
    assert int(numbers[1]) > int(numbers[2])
    assert f"no room for the checkpoint in {folder}" in str(error)
    assert "Free some space, or lower trainer.max_actor_ckpt_to_keep (SFT: max_ckpt_to_keep)" in str(error)


@pytest.mark.process
def test_a_disk_that_is_full_after_some_files_needs_more_than_is_free(tmp_path):
    loader = {"order": torch.arange(10_000)}
    with small_disk(tmp_path / "disk", "1m") as disk:
        for pages in range(20):  # data.pt alone takes 20
            filler = leave_free(disk, PAGE * pages)
            with pytest.raises(CheckpointWriteError) as caught:
                with CheckpointWriter(disk, 1) as writer:
                    write_trainer_state(writer.path, TrainerState(1, {}, {}, {}, {}), loader)
            filler.unlink()
            assert_consistent(caught.value, disk / "global_step_1")
        assert list(disk.iterdir()) == []


@pytest.mark.process
def test_a_large_write_that_fails_as_a_whole_needs_more_than_is_free(tmp_path):
    """The file system refuses a file larger than its free space before a byte of it is written."""
    with small_disk(tmp_path / "disk", "1m") as disk:
        with pytest.raises(CheckpointWriteError) as caught:
            with CheckpointWriter(disk, 1) as writer:
                (writer.path / "small").write_bytes(b"x" * 400_000)
                with open(writer.path / "large", "wb") as file:
                    os.posix_fallocate(file.fileno(), 0, 2 << 20)
        assert_consistent(caught.value, disk / "global_step_1")


@pytest.mark.process
def test_a_message_with_the_size_of_the_checkpoint_is_kept(tmp_path):
    with small_disk(tmp_path / "disk", "1m") as disk:
        with pytest.raises(CheckpointWriteError, match="at least 2097152 bytes are needed") as caught:
            with CheckpointWriter(disk, 1) as writer:
                (writer.path / "small").write_bytes(b"x" * 1000)
                raise disk_full(writer.path, 2 << 20)
        assert_consistent(caught.value, disk / "global_step_1")


@pytest.mark.process
@pytest.mark.parametrize("name", ["metrics.jsonl", "samples.jsonl"])
def test_a_failed_write_names_file_and_step(tmp_path, name):
    message = rf"step 7 could not be written to .*{name}: No space left on device"
    with small_disk(tmp_path / "disk", "1m") as disk:
        log = JsonlLog(disk / name)
        log.append([{"step": 6, "data": {"reward": 1.0}}])
        leave_free(disk, 0)
        with pytest.raises(OSError, match=message):
            log.append([{"step": 7, "data": {"reward": 1.0, "note": "x" * 2 * PAGE}}])
        (disk / "filler").unlink()
        log.cut_after(6)
        assert [json.loads(line)["step"] for line in (disk / name).read_text().splitlines()] == [6]
    (tmp_path / name).symlink_to("/dev/full")
    with pytest.raises(OSError, match=message):
        JsonlLog(tmp_path / name).append([{"step": 7, "data": {}}])
