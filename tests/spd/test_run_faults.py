"""SPD trainings whose ranks are killed or stopped, with real processes.

Not covered: a GPU, several nodes.
"""

import re
import signal

import psutil
import pytest

from tests.helpers.spd_run import QUICK, SPDRuns, ended, ranks_of, running, send

STEPS = 10

pytestmark = [pytest.mark.slow, pytest.mark.chaos, pytest.mark.timeout(600)]


@pytest.fixture(scope="module")
def runs(served_model, tmp_path_factory):
    # enough blocks for new completions in every step
    return SPDRuns(tmp_path_factory.mktemp("faults"), served_model, steps=STEPS, blocks=8 * STEPS)


def test_a_killed_rank_ends_the_run_and_is_named(runs):
    with running(runs, "rank_killed", *QUICK) as run:
        runs.wait_for_step("rank_killed", 2, run)
        ranks_of(run)[0].kill()
        assert ended(run, 200) == 1
    message = runs.log("rank_killed").rpartition("Training failed:")[2]
    assert "died while the group was in" in message and "rank" in message
    assert runs.saved_step("rank_killed") >= 1


def test_the_watchdog_detects_a_stopped_rank(runs):
    limits = [f"trainer.watchdog.{phase}=40" for phase in ("generate", "log_prob", "update", "save")]
    with running(runs, "rank_stopped", "trainer.n_gpus_per_node=2", *QUICK, *limits) as run:
        runs.wait_for_step("rank_stopped", 2, run)
        stopped = ranks_of(run)[0]
        send([stopped], signal.SIGSTOP)
        assert ended(run, 40 + 200) == 1
    log = runs.log("rank_stopped")
    message = log.rpartition("Training failed:")[2]
    phases = "generate|log_prob|update|save"
    assert re.search(rf"rank 0 .*\(stopped\) did not finish.*trainer\.watchdog\.({phases})", message), message
    assert message.count("(stopped)") == 1
    assert "most recent call first" in log  # the stacks of a rank that still runs
    assert not psutil.pid_exists(stopped.pid)
