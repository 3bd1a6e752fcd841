"""SPD trainings with Ray, FSDP and a vLLM server: learning signal, number of ranks, SIGKILL, a full disk.

Not covered: a GPU, a server that fails (test_client.py), an own backbone (test_own_ranks.py, test_submit.py), a full
disk under the store of completions.
"""

import pytest
import torch

from tests.helpers.spd_run import SPDRuns, serving
from tests.helpers.watched_runs import wait_until

STEPS = 8
# Metrics that depend on data and weights only, not on the machine or the store.
COMPARED = ("actor/pg_loss", "actor/grad_norm", "critic/score/mean", "spd/accepted_len/mean", "spd/scenario/A")

pytestmark = [pytest.mark.slow, pytest.mark.process, pytest.mark.timeout(900)]


@pytest.fixture(scope="module")
def bench(ray_cluster, tmp_path_factory):
    runs = SPDRuns(tmp_path_factory.mktemp("spd"), steps=STEPS)
    with serving(runs):
        runs.run_here("undisturbed")
        yield runs


def test_every_sample_is_scored_and_the_head_is_trained(bench):
    rows = bench.rows("undisturbed")
    assert [row["step"] for row in rows] == list(range(1, STEPS + 1))
    for row in rows:
        data = row["data"]
        assert data["training/requested_samples"] == data["training/scored_samples"] == 8 * 4
        shares = [data[f"spd/scenario/{s}"] for s in ("A", "B", "C", "D", "zero")]
        assert sum(shares) == pytest.approx(1.0)
        assert data["spd/completions/failed"] == 0 and data["actor/nonfinite_steps"] == 0
    assert sum(row["data"]["spd/completions/asked"] for row in rows) > 0  # the server really answered
    assert any(row["data"]["actor/grad_norm"] > 0 for row in rows)
    assert len({row["data"]["critic/score/mean"] for row in rows}) > 1  # rewards depend on the server's completions


def test_two_ranks_give_the_losses_of_one(bench):
    bench.run_here("two", "trainer.n_gpus_per_node=2")
    for one, two in zip(bench.rows("undisturbed"), bench.rows("two"), strict=True):
        for name in COMPARED:
            assert two["data"][name] == pytest.approx(one["data"][name], rel=1e-5, abs=1e-5), (one["step"], name)
    torch.testing.assert_close(bench.weights("two"), bench.weights("undisturbed"), rtol=0, atol=1e-5)


@pytest.mark.chaos
def test_a_killed_run_resumes_bit_for_bit(bench, ray_cluster):
    """On a cluster that keeps running; with its own cluster: tests/trainer/ppo/test_ray_trainer_ranks.py."""
    # Completions before the kill come from the store after the restart.
    own = {"store": "killed.sqlite3", "RAY_ADDRESS": ray_cluster.get_runtime_context().gcs_address}
    run = bench.start("killed", **own)
    wait_until(lambda: bench.saved_step("killed") >= 2, run, bench.directory / "killed.log", 240)
    run.kill()
    run.wait(30)
    assert len(bench.rows("killed")) < STEPS, "it ended before the kill"
    bench.run("killed", **own)
    assert "resuming from" in bench.log("killed")
    for undisturbed, killed in zip(bench.rows("undisturbed"), bench.rows("killed"), strict=True):
        for name in undisturbed["data"]:
            if not name.startswith(("timing", "perf/", "spd/completions/", "spd/store/")):
                assert killed["data"][name] == undisturbed["data"][name], (undisturbed["step"], name)
    torch.testing.assert_close(bench.weights("killed"), bench.weights("undisturbed"), rtol=0, atol=0)
