"""Real SPD runs through Ray, FSDP and a vLLM server: learning signal, rank count, and a SIGKILL in the middle.

Not covered: a GPU, and a server that fails (tests/spd/test_client.py).
"""

import json
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
from safetensors.torch import load_file

from tests.helpers.models import save_tiny_llama
from verl.workers.rollout.spd.server import LocalVllmServer

ROOT = Path(__file__).resolve().parents[2]
STEPS = 4
# The values of a step that follow from its data and weights; the others say what the machine or the store did.
COMPARED = ("actor/pg_loss", "actor/grad_norm", "critic/score/mean", "spd/accepted_len/mean", "spd/scenario/A")

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]


def write_blocks(directory: Path, blocks: int = 16) -> None:
    """Blocks of random words with one to four mismatches; answers are never right or wrong by design."""
    rng = random.Random(0)
    with open(directory / "blocks.jsonl", "w") as out, open(directory / "meta.jsonl", "w") as meta:
        for i in range(blocks):
            target = [rng.randrange(5, 50) for _ in range(7)]
            draft = [t if rng.random() < 0.6 and k else rng.randrange(5, 50) for k, t in enumerate(target[:6])]
            row = {"question_id": i, "context_ids": [rng.randrange(5, 50) for _ in range(6 + i % 5)]}
            row.update(draft_ids=draft, target_ids=target, is_correct_baseline=i % 2)
            out.write(json.dumps(row) + "\n")
            known = {"question_id": i, "question": "a b", "ground_truth": "3", "is_correct_baseline": i % 2}
            meta.write(json.dumps(known) + "\n")


class Bench:
    """A server, a model, blocks, and a store that the first run fills."""

    def __init__(self, directory: Path):
        self.directory = directory
        self.model = save_tiny_llama(directory / "target")
        write_blocks(directory)
        self.server = LocalVllmServer(self.model, directory / "server.log", 128)
        self.url = self.server.wait_ready(300)

    def start(self, name: str, *more: str) -> subprocess.Popen:
        """Start a run in `directory/name`; all runs share the store of completions and features."""
        command = [sys.executable, "train_spd_scorer.py", "--model", self.model, "--device", "cpu"]
        command += ["--blocks", str(self.directory / "blocks.jsonl"), "--metadata", str(self.directory / "meta.jsonl")]
        command += ["--output-dir", str(self.directory / name), "--store", str(self.directory / "store.sqlite3")]
        command += ["--batch-size", "8", "--n", "4", "--steps", str(STEPS), "--save-freq", "1", "--max-tokens", "16"]
        command += ["trainer.logger=[]", "trainer.val_before_train=false", "trainer.report=false", *more]
        env = {**os.environ, "SPD_VLLM_URLS": self.url, "OMP_NUM_THREADS": "1"}
        log = open(self.directory / f"{name}.log", "a")  # the child keeps it
        with log:
            return subprocess.Popen(command, cwd=ROOT, env=env, stdout=log, stderr=subprocess.STDOUT)

    def run(self, name: str, *more: str) -> None:
        code = self.start(name, *more).wait(300)
        assert code == 0, (self.directory / f"{name}.log").read_text()[-3000:]

    def rows(self, name: str) -> list[dict]:
        """metrics.jsonl of a run: one row a step."""
        path = self.directory / name / "metrics.jsonl"
        return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []

    def weights(self, name: str) -> dict:
        folder = self.directory / name / f"global_step_{STEPS}" / "actor" / "huggingface"
        return load_file(folder / "score_head.safetensors")


@pytest.fixture(scope="module")
def bench(tmp_path_factory):
    made = Bench(tmp_path_factory.mktemp("spd"))
    try:
        made.run("whole")
        yield made
    finally:
        made.server.stop()


def test_every_sample_is_scored_and_the_head_is_trained(bench):
    rows = bench.rows("whole")
    assert [row["step"] for row in rows] == list(range(1, STEPS + 1))
    for row in rows:
        data = row["data"]
        assert data["training/requested_samples"] == data["training/scored_samples"] == 8 * 4
        shares = [data[f"spd/scenario/{s}"] for s in ("A", "B", "C", "D", "zero")]
        assert sum(shares) == pytest.approx(1.0)
        assert data["spd/completions/failed"] == 0 and data["actor/nonfinite_steps"] == 0
    assert sum(row["data"]["spd/completions/asked"] for row in rows) > 0  # the server really answered
    assert any(row["data"]["actor/grad_norm"] > 0 for row in rows)


def test_two_ranks_give_the_losses_of_one(bench):
    bench.run("two", "--ranks", "2")
    for one, two in zip(bench.rows("whole"), bench.rows("two"), strict=True):
        for name in COMPARED:
            assert two["data"][name] == pytest.approx(one["data"][name], rel=1e-5, abs=1e-5), (one["step"], name)
    for name, weight in bench.weights("whole").items():
        np.testing.assert_allclose(bench.weights("two")[name], weight, atol=1e-5)


def test_a_killed_run_goes_on_to_the_same_end_bit_for_bit(bench):
    shutil.rmtree(bench.directory / "killed", ignore_errors=True)
    run = bench.start("killed")
    deadline = time.monotonic() + 240
    tracker = bench.directory / "killed" / "latest_checkpointed_iteration.txt"
    while not (tracker.exists() and int(tracker.read_text()) >= 2) and time.monotonic() < deadline:
        assert run.poll() is None, (bench.directory / "killed.log").read_text()[-3000:]
        time.sleep(0.05)
    driver = subprocess.run(["pgrep", "-P", str(run.pid)], capture_output=True, text=True).stdout.split()
    for pid in [*map(int, driver), run.pid]:
        os.kill(pid, signal.SIGKILL)
    run.wait(30)
    assert len(bench.rows("killed")) < STEPS + 1
    bench.run("killed")
    assert "resuming from" in (bench.directory / "killed.log").read_text()
    for whole, killed in zip(bench.rows("whole"), bench.rows("killed"), strict=True):
        for name in whole["data"]:
            if not name.startswith(("timing", "perf/", "spd/completions/")):
                assert killed["data"][name] == whole["data"][name], (whole["step"], name)
    for name, weight in bench.weights("whole").items():
        assert np.array_equal(bench.weights("killed")[name], weight), name
