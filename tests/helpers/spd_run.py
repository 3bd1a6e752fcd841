"""Small SPD trainings: model, blocks, and a folder per run."""

import json
import os
import random
import signal
import subprocess
import sys
from contextlib import contextmanager
from pathlib import Path
from unittest.mock import patch

import psutil
import ray
from safetensors.torch import load_file

import train_spd_scorer
from tests.helpers.models import save_answering_llama
from tests.helpers.watched_runs import wait_until
from verl.rollout.vllm_rollout.openai_server import LocalVllmServer

ROOT = Path(__file__).resolve().parents[2]
TIMEOUT_S = 15
# Requests that fail early and are retried; 8 prompts each, so that a step has several.
QUICK = (f"spd.rollout.timeout_s={TIMEOUT_S}", "spd.rollout.prompts_per_request=8", "spd.rollout.attempts=3")


def write_blocks(directory: Path, blocks: int = 16) -> None:
    """Blocks of random words with one to four mismatches; about a fifth of the completions give the ground truth."""
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


class SPDRuns:
    """A model with servers, and blocks; runs of `steps` steps in folders of their own, which share `store`."""

    def __init__(self, directory: Path, steps: int = 4, blocks: int = 16) -> None:
        self.directory, self.steps, self.urls = directory, steps, []
        self.model = save_answering_llama(directory / "target")
        write_blocks(directory, blocks)

    def arguments(self, name: str, *more: str, store: str = "store.sqlite3") -> list[str]:
        """Arguments of train_spd_scorer.py for a run in `directory/name`."""
        return [
            "--model", self.model, "--blocks", str(self.directory / "blocks.jsonl"),
            "--metadata", str(self.directory / "meta.jsonl"), "--output-dir", str(self.directory / name),
            f"spd.rollout.store_path={self.directory / store}", "spd.rollout.max_tokens=16", "trainer.device=cpu",
            "data.train_batch_size=8", "actor_rollout_ref.rollout.n=4", f"trainer.total_training_steps={self.steps}",
            "trainer.save_freq=1", "trainer.logger=[]", "trainer.val_before_train=false",
            "trainer.report=false", "spd.truncated=keep",  # the model never ends after every fifth word
            "actor_rollout_ref.actor.fsdp_config.dtype=float32", *more,  # else the sums on two ranks are others
        ]  # fmt: skip

    def start(self, name: str, *more: str, store: str = "store.sqlite3", **env: str) -> subprocess.Popen:
        """Start a run as a process; RAY_ADDRESS names a cluster to join instead of a new one."""
        command = [sys.executable, "train_spd_scorer.py", *self.arguments(name, *more, store=store)]
        env = {**os.environ, "SPD_VLLM_URLS": ",".join(self.urls), "OMP_NUM_THREADS": "1", **env}
        with open(self.directory / f"{name}.log", "a") as log:  # the child keeps it open
            return subprocess.Popen(command, cwd=ROOT, env=env, stdout=log, stderr=subprocess.STDOUT)

    def run(self, name: str, *more: str, **options: str) -> None:
        """A run as a process, to its end."""
        code = self.start(name, *more, **options).wait(300)
        assert code == 0, self.log(name)[-3000:]

    def run_here(self, name: str, *more: str) -> None:
        """A run in this process, on the Ray session that it is connected to."""
        handler, address = signal.getsignal(signal.SIGHUP), ray.get_runtime_context().gcs_address
        with patch.dict(os.environ, SPD_VLLM_URLS=",".join(self.urls), RAY_ADDRESS=address):
            try:
                assert train_spd_scorer.main(self.arguments(name, *more)) == 0
            finally:
                signal.signal(signal.SIGHUP, handler)

    def log(self, name: str) -> str:
        """The output so far of the runs called `name`."""
        return (self.directory / f"{name}.log").read_text()

    def rows(self, name: str) -> list[dict]:
        """metrics.jsonl of a run: one row per step."""
        path = self.directory / name / "metrics.jsonl"
        if not path.exists():
            return []
        return [json.loads(line) for line in path.read_text().splitlines(keepends=True) if line.endswith("\n")]

    def wait_for_step(self, name: str, step: int, run: subprocess.Popen, seconds: float = 240) -> None:
        """Return when the metrics of `step` are written; fail if the run ends before."""
        wait_until(lambda: len(self.rows(name)) >= step, run, self.directory / f"{name}.log", seconds)

    def saved_step(self, name: str) -> int:
        """The step that latest_checkpointed_iteration.txt names; 0 before the first."""
        tracker = self.directory / name / "latest_checkpointed_iteration.txt"
        return int(tracker.read_text()) if tracker.exists() else 0

    def weights(self, name: str) -> dict:
        folder = self.directory / name / f"global_step_{self.steps}" / "actor" / "huggingface"
        return load_file(folder / "score_head.safetensors")


@contextmanager
def serving(runs: SPDRuns, count: int = 1):
    """Real servers of the model for the runs started in the block."""
    servers = [LocalVllmServer(runs.model, runs.directory / f"server{i}.log", 128) for i in range(count)]
    try:
        runs.urls = [server.wait_ready(300) for server in servers]
        yield servers
    finally:
        for server in servers:
            server.stop()


def processes_of(run: subprocess.Popen, word: str) -> list[psutil.Process]:
    """Descendants of a run's process whose command line contains `word`."""
    matching = []
    for process in psutil.Process(run.pid).children(recursive=True):
        try:
            if word in " ".join(process.cmdline()):
                matching.append(process)
        except (psutil.NoSuchProcess, psutil.AccessDenied):
            continue
    return matching


def ranks_of(run: subprocess.Popen) -> list[psutil.Process]:
    """The training ranks, oldest first."""
    return sorted(processes_of(run, "ActorRolloutRefWorker"), key=lambda p: p.create_time())


def send(processes: list[psutil.Process], number: int) -> None:
    """Send a signal to the processes that still exist."""
    for process in processes:
        try:
            os.kill(process.pid, number)
        except ProcessLookupError:
            continue


def ended(run: subprocess.Popen, within: float) -> int:
    """The exit code; the run must be over after `within` seconds."""
    try:
        return run.wait(within)
    finally:
        if run.poll() is None:
            run.kill()


@contextmanager
def running(runs: SPDRuns, name: str, *more: str, **env: str):
    """A run with its own store, killed after the block."""
    run = runs.start(name, *more, store=f"{name}.sqlite3", **env)
    try:
        yield run
    finally:
        for process in [*psutil.Process(run.pid).children(recursive=True)] if run.poll() is None else []:
            send([process], signal.SIGKILL)
        run.kill()
        run.wait(30)
