"""Asynchronous training on a Ray cluster of two raylets: each node has a rank that trains and a server."""

import os
import subprocess

import pytest

from tests.helpers.rl_run import metrics_rows
from tests.helpers.watched_runs import wait_until
from tests.trainer.fully_async.test_kills import command
from tests.trainer.fully_async.test_runs import check_journal, rows
from tests.trainer.ppo.test_two_nodes import end, nodes, ranks_of  # noqa: F401

pytestmark = [pytest.mark.process, pytest.mark.chaos, pytest.mark.slow, pytest.mark.timeout(1500)]
STEPS = 6


def test_ranks_and_servers_of_two_nodes(nodes, tiny_llama, tmp_path):  # noqa: F811
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
