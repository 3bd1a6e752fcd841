"""Ranks of running SPD trainings that are killed or stopped, each with real processes.

Not covered: a GPU, several nodes.
"""

import re
import signal
import time

import psutil
import pytest

from tests.helpers.spd_run import QUICK, SPDRuns, ended, ranks_of, running, serving, tell

STEPS = 10

pytestmark = [pytest.mark.slow, pytest.mark.chaos, pytest.mark.timeout(600)]


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    made = SPDRuns(tmp_path_factory.mktemp("faults"), steps=STEPS, blocks=8 * STEPS)  # new completions in every step
    with serving(made):
        yield made


def test_a_killed_rank_ends_the_run_with_its_name(runs):
    with running(runs, "rank_killed", *QUICK) as run:
        runs.wait_for_step("rank_killed", 2, run)
        ranks_of(run)[0].kill()
        started = time.monotonic()
        assert ended(run, 60) == 1
        assert time.monotonic() - started < 30
    told = runs.log("rank_killed").rpartition("Training failed:")[2]
    assert "died while the group was in" in told and "rank" in told
    assert runs.saved_step("rank_killed") >= 1


def test_a_stopped_rank_is_found_by_the_watchdog(runs):
    limits = [f"trainer.watchdog.{phase}=10" for phase in ("generate", "log_prob", "update", "save")]
    with running(runs, "rank_stopped", "--ranks", "2", *QUICK, *limits) as run:
        runs.wait_for_step("rank_stopped", 2, run)
        stopped = ranks_of(run)[0]
        tell([stopped], signal.SIGSTOP)
        assert ended(run, 10 + 60) == 1  # the ranks have 20 s to close
    log = runs.log("rank_stopped")
    told = log.rpartition("Training failed:")[2]
    phases = "generate|log_prob|update|save"
    assert re.search(rf"rank 0 .*\(stopped\) did not finish.*trainer\.watchdog\.({phases})", told), told
    assert told.count("(stopped)") == 1
    assert "most recent call first" in log  # the stacks of a rank that still runs
    assert not psutil.pid_exists(stopped.pid)
