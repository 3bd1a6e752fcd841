"""SPD trainings whose servers fail, with real processes.

Not covered: a GPU, several nodes.
"""

import re
import signal
import threading
from contextlib import contextmanager

import psutil
import pytest

from tests.helpers.http_server import get
from tests.helpers.spd_run import QUICK, TIMEOUT_S, SPDRuns, ended, send, serving
from tests.helpers.watched_runs import wait_until
from verl.rollout.vllm_rollout.openai_server import LocalVllmServer
from verl.training.checkpoint.publish import verify_manifest

STEPS = 1000  # more than a fast machine finishes before the last fault

CONSTANT = "actor_rollout_ref.actor.optim.lr=1e-12"  # a policy that learns requests fewer and fewer completions

pytestmark = [pytest.mark.slow, pytest.mark.chaos, pytest.mark.timeout(1200)]


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    return SPDRuns(tmp_path_factory.mktemp("faults"), steps=STEPS, blocks=8 * STEPS)  # new completions in each step


@pytest.fixture(scope="module")
def servers(runs):
    with serving(runs, 2) as made:
        yield made


def vllm_processes(server: LocalVllmServer) -> list[psutil.Process]:
    """vLLM's processes, without the supervisor."""
    return psutil.Process(server.pid).children(recursive=True)


@contextmanager
def ten_times_slower(processes: list[psutil.Process]):
    """The processes run for a tenth of the time."""
    done = threading.Event()

    def pulse() -> None:
        while not done.is_set():
            send(processes, signal.SIGSTOP)
            done.wait(0.18)
            send(processes, signal.SIGCONT)
            done.wait(0.02)

    thread = threading.Thread(target=pulse)
    thread.start()
    try:
        yield
    finally:
        done.set()
        thread.join()
        send(processes, signal.SIGCONT)


def assert_counted(rows: list[dict]) -> None:
    for row in rows:
        data = row["data"]
        kept, dropped = data["training/scored_samples"], data["training/dropped_samples"]
        assert data["training/requested_samples"] == kept + dropped == 8 * 4


def answered(url: str) -> float:
    """Number of completions that a server has finished, from its metrics."""
    page = get(f"{url}/metrics")
    counts = re.findall(r'^vllm:request_success_total\{.*finished_reason="(?:stop|length)".*\} (\S+)$', page, re.M)
    assert counts
    return sum(map(float, counts))


def test_servers_that_hang_slow_down_and_die_lose_no_sample(runs, servers):
    run, url, log = runs.start("servers", *QUICK, CONSTANT), runs.urls[0], runs.directory / "servers.log"
    first, failed = vllm_processes(servers[0]), f"SPD server {url}: attempt 1 of 3 failed: "
    runs.wait_for_step("servers", 1, run)
    send(first, signal.SIGSTOP)
    wait_until(lambda: f"{failed}TimeoutError" in runs.log("servers"), run, log, 240)
    runs.wait_for_step("servers", len(runs.rows("servers")) + 1, run)
    send(first, signal.SIGCONT)
    before = answered(url)
    wait_until(lambda: answered(url) > before, run, log, 240)  # after its back-off it serves again
    with ten_times_slower(first):
        before, steps = answered(url), len(runs.rows("servers"))
        runs.wait_for_step("servers", steps + 2, run)
        wait_until(lambda: answered(url) > before, run, log, 240)
    before = answered(url)
    wait_until(lambda: answered(url) > before, run, log, 240)
    send(first, signal.SIGKILL)
    wait_until(lambda: re.search(re.escape(failed) + "(Client|Server)", runs.log("servers")), run, log, 240)
    runs.wait_for_step("servers", len(runs.rows("servers")) + 2, run)  # the other one took over
    run.send_signal(signal.SIGTERM)
    assert ended(run, 200) == 143, runs.log("servers")[-3000:]
    rows = runs.rows("servers")
    assert len(rows) == runs.saved_step("servers") < STEPS
    assert_counted(rows)
    for row in rows:
        assert row["data"]["training/scored_samples"] == 8 * 4 and row["data"]["spd/completions/failed"] == 0
        assert row["data"]["spd/completions/asked"] > 0  # every step needed a server
        assert row["data"]["timing_s/gen"] < 2 * TIMEOUT_S


def test_with_no_server_left_the_run_ends_with_its_checkpoint_kept(runs, servers):
    # The first server is dead already.
    run = runs.start("alone", *QUICK, CONSTANT, store="alone.sqlite3")
    runs.wait_for_step("alone", 2, run)
    send(vllm_processes(servers[1]), signal.SIGKILL)
    assert ended(run, 240) == 1
    message = runs.log("alone").rpartition("Training failed:")[2]
    assert "have no completion from the servers" in message and "completions made so far are kept" in message
    kept = runs.saved_step("alone")
    assert 2 <= kept <= len(runs.rows("alone"))
    verify_manifest(runs.directory / "alone" / f"global_step_{kept}")
