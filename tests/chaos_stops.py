"""Fault injection: stops a rank of a GRPO run with SIGSTOP, in a different phase of a step each time.

The run has two ranks with vLLM; every second start uses agent loops, whose workers send requests to the engines over
HTTP. The watchdog must end the run with exit code 1 and a message with the rank and the method. No process may be left.
The next start must resume from the last checkpoint, and is the one whose rank is stopped next.
"""

import json
import os
import random
import re
import signal
import statistics
import subprocess
import sys
import time
from pathlib import Path

import psutil

from tests.helpers.models import save_tiny_llama
from tests.helpers.rl_run import overrides
from tests.helpers.spd_run import ROOT, ranks_of
from tests.helpers.watched_runs import family, wait_until
from verl.training.checkpoint.publish import TRACKER

LIMIT_S = 15  # watchdog limit for each phase of a step
CLOSING_S = 60  # limit for writing stack traces and shutting down the ranks and Ray
# Phases after a line of metrics.jsonl, in order; the line is written before the checkpoint of its step is saved.
PHASES = ("save_checkpoint", "update_weights", "gen", "old_log_prob", "update_actor")
NAMED = re.compile(r"rank (\d+) \([^()]*\) \(stopped\) did not finish (\w+) within trainer\.watchdog\.(\w+)=")


class StoppedRuns:
    """A run in a folder that is restarted repeatedly."""

    def __init__(self, folder: Path, seed: int) -> None:
        self.folder, self.rng = folder, random.Random(seed)
        self.model = save_tiny_llama(folder / "model")
        self.log = folder / "log"

    def start(self, steps: int, mode: str = "sync") -> subprocess.Popen:
        """Start the run until step `steps`, with a new log file."""
        rollout = {"name": "vllm", "mode": mode, "dtype": "float32", "max_num_seqs": 64, "n": 8,
                   "agent__num_workers": 1}  # fmt: skip
        keys = {f"actor_rollout_ref__rollout__{key}": value for key, value in rollout.items()}
        limits = dict.fromkeys(("generate", "log_prob", "update", "save"), LIMIT_S) | {"init": 300}
        keys |= {f"trainer__watchdog__{phase}": seconds for phase, seconds in limits.items()}
        settings = overrides(
            self.folder / "run", self.model, trainer__n_gpus_per_node=2, trainer__save_freq=1,
            trainer__total_epochs=10_000, trainer__total_training_steps=steps, trainer__max_actor_ckpt_to_keep=2,
            actor_rollout_ref__actor__ppo_mini_batch_size=4, actor_rollout_ref__actor__use_kl_loss="true", **keys,
        )  # fmt: skip
        command = [sys.executable, "-m", "verl.trainer.main_ppo", *settings]
        env = {**os.environ, "OMP_NUM_THREADS": "1"}
        with open(self.log, "w") as log:
            return subprocess.Popen(command, cwd=ROOT, env=env, stdout=log, stderr=subprocess.STDOUT)

    def rows(self) -> list[dict]:
        """The complete rows of metrics.jsonl."""
        file = self.folder / "run" / "out" / "metrics.jsonl"
        lines = file.read_text().splitlines(keepends=True) if file.exists() else []
        return [json.loads(line) for line in lines if line.endswith("\n")]

    def saved(self) -> int:
        """The step of the last checkpoint, or 0."""
        tracker = self.folder / "run" / "out" / TRACKER
        return int(tracker.read_text()) if tracker.exists() else 0

    def seconds(self, phase: str) -> float:
        """The median duration of a phase in the last 20 steps."""
        durations = [row["data"].get(f"timing_s/{phase}") for row in self.rows()[-20:]]
        return statistics.median([seconds for seconds in durations if seconds is not None] or [0.2])

    def stop_once(self, phase: str, mode: str) -> tuple[str, float]:
        """Start the run and stop a rank in a phase; (the method that the message names, seconds until the run ends)."""
        before = self.saved()
        run = self.start(100_000, mode)
        try:
            wait_until(lambda: self.saved() > before, run, self.log)  # it has resumed
            step = len(self.rows()) + self.rng.randrange(1, 3)
            start = sum(self.seconds(earlier) for earlier in PHASES[: PHASES.index(phase)])
            delay = start + self.rng.random() * self.seconds(phase)
            wait_until(lambda: len(self.rows()) >= step, run, self.log)
            time.sleep(delay)
            ranks, members = ranks_of(run), family(run.pid)
            number = self.rng.randrange(2)
            os.kill(ranks[number].pid, signal.SIGSTOP)
            stopped = time.monotonic()
            code = run.wait(LIMIT_S + CLOSING_S)
            seconds, text = time.monotonic() - stopped, self.log.read_text()
            named = NAMED.findall(text.rpartition("Training failed:")[2])
            assert code == 1 and len(named) == 1, f"exit {code}, named {named}:\n{text[-3000:]}"
            assert psutil.wait_procs(members, timeout=10)[1] == [], "processes are left"
            return f"{named[0][1]} ({named[0][2]}), rank {named[0][0]} of {number}", seconds
        finally:
            for process in family(run.pid) if run.poll() is None else []:
                process.kill()
            run.wait(30)

    def finish(self) -> None:
        """Run two more steps, which must succeed; metrics.jsonl must have each step exactly once."""
        last = self.saved() + 2
        run = self.start(last)
        assert run.wait(300) == 0, self.log.read_text()[-3000:]
        assert [row["step"] for row in self.rows()] == list(range(1, last + 1))


def stops(folder: Path, count: int, seed: int) -> int:
    """Stop a rank `count` times; returns the number of runs that did not meet the requirements."""
    runs, longest, failed = StoppedRuns(folder, seed), 0.0, 0
    for i in range(count):
        phase, mode = PHASES[i % len(PHASES)], ("sync", "async")[i % 2]
        try:
            method, seconds = runs.stop_once(phase, mode)
        except (AssertionError, subprocess.TimeoutExpired) as error:
            failed += 1
            print(f"{i:3d}  {mode:5s} {phase:15s} {error}", flush=True)
            continue
        longest, step = max(longest, seconds), runs.rows()[-1]["step"]
        print(f"{i:3d}  {mode:5s} {phase:15s} after step {step:3d}  {method:45s} ended in {seconds:.1f} s", flush=True)
    runs.finish()
    print(f"{count - failed} of {count} runs named the rank, longest {longest:.1f} s; all resumed")
    return failed
