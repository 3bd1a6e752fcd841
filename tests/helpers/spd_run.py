"""Small SPD trainings as a user starts them: model, blocks, and a folder a run."""

import json
import os
import random
import signal
import subprocess
import sys
import time
from contextlib import contextmanager
from pathlib import Path

import psutil
from safetensors.torch import load_file

from recipe.spd.server import LocalVllmServer
from tests.helpers.models import save_answering_llama

ROOT = Path(__file__).resolve().parents[2]
TIMEOUT_S = 6
# Requests that fail early and are asked again; 8 prompts each, so that a step has several.
QUICK = (f"spd.rollout.timeout_s={TIMEOUT_S}", "spd.rollout.prompts_per_request=8", "spd.rollout.attempts=3")


def write_blocks(directory: Path, blocks: int = 16) -> None:
    """Blocks of random words with one to four mismatches; the truth is what a fifth of the completions say."""
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
    """A model, blocks and servers; runs of `steps` steps in folders of their own, which share `store`."""

    def __init__(self, directory: Path, urls: list[str] | None = None, steps: int = 4, blocks: int = 16):
        self.directory, self.urls, self.steps = directory, urls or [], steps
        self.model = save_answering_llama(directory / "target")
        write_blocks(directory, blocks)

    def start(self, name: str, *more: str, store: str = "store.sqlite3", **env: str) -> subprocess.Popen:
        """Start a run in `directory/name`; RAY_ADDRESS names a cluster to join in place of one of its own."""
        command = [sys.executable, "train_spd_scorer.py", "--model", self.model, "--device", "cpu"]
        command += ["--blocks", str(self.directory / "blocks.jsonl"), "--metadata", str(self.directory / "meta.jsonl")]
        command += ["--output-dir", str(self.directory / name), "--store", str(self.directory / store)]
        command += ["--batch-size", "8", "--n", "4", "--steps", str(self.steps), "--save-freq", "1"]
        command += ["--max-tokens", "16", "trainer.logger=[]", "trainer.val_before_train=false", "trainer.report=false"]
        command += more
        env = {**os.environ, "SPD_VLLM_URLS": ",".join(self.urls), "OMP_NUM_THREADS": "1", **env}
        log = open(self.directory / f"{name}.log", "a")  # the child keeps it
        with log:
            return subprocess.Popen(command, cwd=ROOT, env=env, stdout=log, stderr=subprocess.STDOUT)

    def run(self, name: str, *more: str, **options: str) -> None:
        code = self.start(name, *more, **options).wait(300)
        assert code == 0, self.log(name)[-3000:]

    def log(self, name: str) -> str:
        """What the runs called `name` wrote so far."""
        return (self.directory / f"{name}.log").read_text()

    def rows(self, name: str) -> list[dict]:
        """metrics.jsonl of a run: one row a step."""
        path = self.directory / name / "metrics.jsonl"
        if not path.exists():
            return []
        return [json.loads(line) for line in path.read_text().splitlines(keepends=True) if line.endswith("\n")]

    def wait_for_step(self, name: str, step: int, run: subprocess.Popen, seconds: float = 240) -> None:
        """Return when the metrics of `step` are written; the run must go on until then."""
        deadline = time.monotonic() + seconds
        while len(self.rows(name)) < step:
            assert run.poll() is None, self.log(name)[-3000:]
            assert time.monotonic() < deadline, f"step {step} did not end:\n{self.log(name)[-3000:]}"
            time.sleep(0.05)

    def saved_step(self, name: str) -> int:
        """The step that latest_checkpointed_iteration.txt names; 0 before the first."""
        tracker = self.directory / name / "latest_checkpointed_iteration.txt"
        return int(tracker.read_text()) if tracker.exists() else 0

    def weights(self, name: str) -> dict:
        folder = self.directory / name / f"global_step_{self.steps}" / "actor" / "huggingface"
        return load_file(folder / "score_head.safetensors")


@contextmanager
def serving(runs: SPDRuns, count: int = 1):
    """Real servers of the model, which the runs started in the block ask."""
    made = [LocalVllmServer(runs.model, runs.directory / f"server{i}.log", 128) for i in range(count)]
    try:
        runs.urls = [server.wait_ready(300) for server in made]
        yield made
    finally:
        for server in made:
            server.stop()


def processes_of(run: subprocess.Popen, word: str) -> list[psutil.Process]:
    """Processes of a run's tree whose command line has `word` in it."""
    found = []
    for process in psutil.Process(run.pid).children(recursive=True):
        try:
            if word in " ".join(process.cmdline()):
                found.append(process)
        except (psutil.NoSuchProcess, psutil.AccessDenied):
            continue
    return found


def ranks_of(run: subprocess.Popen) -> list[psutil.Process]:
    """The training ranks, oldest first."""
    return sorted(processes_of(run, "ActorRolloutRefWorker"), key=lambda p: p.create_time())


def drivers_of(run: subprocess.Popen) -> list[psutil.Process]:
    """The process of verl.trainer.main_ppo; none before it has started."""
    return [p for p in processes_of(run, "verl.trainer.main_ppo") if p.ppid() == run.pid]


def tell(processes: list[psutil.Process], number: int) -> None:
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
    """A run with a store of its own, dead after the block."""
    run = runs.start(name, *more, store=f"{name}.sqlite3", **env)
    try:
        yield run
    finally:
        for process in [*psutil.Process(run.pid).children(recursive=True)] if run.poll() is None else []:
            tell([process], signal.SIGKILL)
        run.kill()
        run.wait(30)
