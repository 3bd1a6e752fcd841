"""A disk that fills up under a running SPD training, with real processes.

Not covered: a store of completions on a full disk.
"""

import shutil
from pathlib import Path

import pytest

from tests.helpers.disks import small_disk
from tests.helpers.spd_run import QUICK, SPDRuns, ended, running, serving
from verl.utils.checkpoint.publish import verify_manifest

STEPS = 30

pytestmark = [pytest.mark.slow, pytest.mark.alone, pytest.mark.timeout(600)]


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    made = SPDRuns(tmp_path_factory.mktemp("faults"), steps=STEPS, blocks=8 * STEPS)
    with serving(made):
        yield made


def leave_free(disk: Path, count: int) -> None:
    """Fill a disk up to its last `count` bytes while others write to it."""
    with open(disk / "filler", "wb", buffering=0) as filler:
        while (free := shutil.disk_usage(disk).free) > count:
            filler.write(b"x" * min(free - count, 1 << 20))


def test_a_full_disk_in_a_save_keeps_the_checkpoint_before_it(runs):
    with small_disk(runs.directory / "disk_full", "64m") as disk:
        with running(runs, "disk_full", *QUICK) as run:
            runs.wait_for_step("disk_full", 2, run)
            leave_free(disk, 300_000)
            assert ended(run, 120) == 1
        told = runs.log("disk_full").rpartition("Training failed:")[2]
        kept = runs.saved_step("disk_full")
        assert "no room for the checkpoint" in told and str(disk) in told and "bytes" in told
        assert kept >= 1
        verify_manifest(disk / f"global_step_{kept}")
        assert not list(disk.glob("*.tmp"))
