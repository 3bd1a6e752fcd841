"""GRPO on a Ray cluster of two raylets: a rank that hangs on the other node, a node that is lost, a resume without it.

The raylets share this machine and its address, so a real network is not covered.
"""

import contextlib
import json
import os
import re
import secrets
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

import psutil
import pytest

from tests.helpers.rl_run import metrics_rows, overrides
from tests.helpers.watched_runs import wait_until
from tests.trainer.fully_async.test_kills import command
from tests.trainer.fully_async.test_runs import check_journal, rows
from verl.utils.ports import free_port

pytestmark = [pytest.mark.process, pytest.mark.chaos, pytest.mark.slow, pytest.mark.timeout(1500)]
RANKS = 2  # of each node


def raylet(*arguments, cpus, folder):
    """Start the processes of a node, with a folder of its own for their files; those processes."""
    command = [Path(sys.executable).with_name("ray"), "start", *arguments, f"--num-cpus={cpus}", "--num-gpus=0",
               f"--temp-dir={folder}", "--node-ip-address=127.0.0.1", "--disable-usage-stats",
               "--include-dashboard=false"]  # fmt: skip
    if "--head" not in arguments:
        command.remove("--include-dashboard=false")
    before = set(psutil.pids())
    done = subprocess.run(command, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stdout + done.stderr
    own = (p for p in psutil.process_iter(["cmdline"]) if p.pid not in before)
    return [p for p in own if folder in " ".join(p.info["cmdline"] or ())]


def end(processes):
    """Kill processes with everything that they started."""
    members = [c for p in processes if p.is_running() for c in [p, *p.children(recursive=True)]]
    for process in members:
        with contextlib.suppress(psutil.NoSuchProcess):
            process.kill()
    psutil.wait_procs(members, timeout=10)


@pytest.fixture
def nodes(monkeypatch):
    """(address, processes of the head, processes of the other node)"""
    monkeypatch.setenv("RAY_AUTH_MODE", "token")
    monkeypatch.setenv("RAY_AUTH_TOKEN", secrets.token_hex(16))
    with tempfile.TemporaryDirectory(prefix="n1") as one, tempfile.TemporaryDirectory() as two:
        port, started = free_port(), []
        try:
            # One CPU more on the head: for the actor that runs the loop.
            started.append(raylet("--head", f"--port={port}", cpus=RANKS + 1, folder=one))
            started.append(raylet(f"--address=127.0.0.1:{port}", cpus=RANKS, folder=two))
            yield f"127.0.0.1:{port}", *started
        finally:
            for processes in started:
                end(processes)


def start(directory, model, address, log, **more):
    keys = {"trainer__nnodes": 2, "trainer__n_gpus_per_node": RANKS, "trainer__save_freq": 1, **more}
    command = [sys.executable, "-m", "verl.trainer.main_ppo", *overrides(directory, model, **keys)]
    environment = {**os.environ, "RAY_ADDRESS": address, "OMP_NUM_THREADS": "1", "RAY_DEDUP_LOGS": "0"}
    return subprocess.Popen(command, stdout=open(log, "w"), stderr=subprocess.STDOUT, env=environment)


def steps(directory):
    file = Path(directory) / "out" / "metrics.jsonl"
    lines = file.read_text().splitlines(keepends=True) if file.exists() else []
    return [json.loads(line)["step"] for line in lines if line.endswith("\n")]


def ranks_of(processes, worker="ActorRolloutRefWorker"):
    """Processes of a class of workers below the raylet of a node."""
    ranks = []
    for process in (c for p in processes if p.is_running() for c in p.children(recursive=True)):
        with contextlib.suppress(psutil.NoSuchProcess):
            if worker in " ".join(process.cmdline() or [process.name()]):
                ranks.append(process)
    return ranks


def test_a_run_over_two_nodes_names_what_hangs_and_goes_on_without_a_lost_node(tiny_llama, tmp_path, nodes):
    address, head, other = nodes
    log = tmp_path / "log"
    limits = {f"trainer__watchdog__{phase}": 60 for phase in ("update", "generate", "log_prob", "save")}
    run = start(tmp_path, tiny_llama, address, log, trainer__total_training_steps=40, **limits)
    wait_until(lambda: len(steps(tmp_path)) >= 1, run, log)
    assert len(ranks_of(head)) == len(ranks_of(other)) == RANKS, "ranks are not packed by node"
    stopped, neighbour = ranks_of(other)
    os.kill(stopped.pid, signal.SIGSTOP)
    assert run.wait(timeout=400) == 1
    text = log.read_text()
    assert re.search(r"\(stopped on node [0-9.]+\) did not finish", text) and "trainer.watchdog." in text, text[-3000:]
    stacks = [line for line in text.splitlines() if f"pid={neighbour.pid}" in line and ", line " in line]
    assert any("verl/" in line for line in stacks), text[-3000:]
    with contextlib.suppress(psutil.NoSuchProcess):
        stopped.kill()

    log, done = tmp_path / "log2", steps(tmp_path)[-1]
    run = start(tmp_path, tiny_llama, address, log, trainer__total_training_steps=40)
    wait_until(lambda: max(steps(tmp_path), default=0) > done, run, log)
    end(other)  # the raylet, with its ranks
    assert run.wait(timeout=400) == 1, log.read_text()[-3000:]
    assert re.search(r"rank [23] \(", log.read_text()), log.read_text()[-3000:]
    kept = steps(tmp_path)[-1]

    log = tmp_path / "log3"
    left = {"trainer__nnodes": 1, "trainer__total_training_steps": kept + 2}
    run = start(tmp_path, tiny_llama, address, log, **left)
    assert run.wait(timeout=400) == 0, log.read_text()[-3000:]
    numbers = steps(tmp_path)
    assert numbers == list(range(1, kept + 3))


STEPS = 6


def test_each_node_has_a_rank_that_trains_and_a_server(nodes, tiny_llama, tmp_path):
    address, head, other = nodes
    log = tmp_path / "log"
    words = command(tmp_path, tiny_llama) + [
        "trainer.nnodes=2", "trainer.n_gpus_per_node=1", "rollout.nnodes=2", "rollout.n_gpus_per_node=1",
        f"rollout.total_rollout_steps={4 * STEPS}", "actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=4",
        "trainer.save_freq=-1",
    ]  # fmt: skip
    environment = {**os.environ, "RAY_ADDRESS": address, "OMP_NUM_THREADS": "1"}
    with open(log, "w") as output:
        run = subprocess.Popen(words, stdout=output, stderr=subprocess.STDOUT, env=environment)
    try:
        wait_until(lambda: (tmp_path / "out" / "metrics.jsonl").exists(), run, log)
        for worker in ("SeparateActorWorker", "RolloutReplicaWorker"):
            assert len(ranks_of(head, worker)) == len(ranks_of(other, worker)) == 1
        assert run.wait(timeout=600) == 0, log.read_text()[-3000:]
    finally:
        run.kill()
    check_journal(tmp_path / "out", STEPS)
    spans = rows(tmp_path / "out" / "async_timeline.jsonl")
    assert {span["who"] for span in spans if span["what"] == "generate"} == {"server_0", "server_1"}
    trained = [row for row in metrics_rows(tmp_path) if "actor/pg_loss" in row]
    assert len(trained) == STEPS and max(row["fully_async/count/versions_behind_max"] for row in trained) <= 1
