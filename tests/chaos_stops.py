"""Stops a rank of a GRPO run with vLLM on two ranks by SIGSTOP, each time within another phase of a step.

Every other run has agent loops, whose workers ask the ranks' engines over HTTP.

Every run must end by the watchdog, with exit code 1 and a message that names the rank and the method, leave no process
behind, and go on from its last checkpoint when it is started again: that run is the one whose rank stops next.
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
from verl.checkpoint.publish import TRACKER

LIMIT_S = 15  # of the watchdog, for every phase of a step
CLOSING_S = 60  # for stacks, the ranks' end and that of Ray
# Of a step and the save before it, in order; a step's line is written before it is saved.
PHASES = ("save_checkpoint", "update_weights", "gen", "old_log_prob", "update_actor")
NAMED = re.compile(r"rank (\d+) \([^()]*\) \(stopped\) did not finish (\w+) within trainer\.watchdog\.(\w+)=")


class StoppedRuns:
    """One run that is started again and again in a folder."""

    def __init__(self, folder: Path, seed: int) -> None:
        self.folder, self.rng = folder, random.Random(seed)
        self.model = save_tiny_llama(folder / "model")
        self.log = folder / "log"

    def start(self, steps: int, mode: str = "sync") -> subprocess.Popen:
        """The run up to this step, as a process whose output begins a new log."""
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
        """The rows of metrics.jsonl that are written to their end."""
        file = self.folder / "run" / "out" / "metrics.jsonl"
        lines = file.read_text().splitlines(keepends=True) if file.exists() else []
        return [json.loads(line) for line in lines if line.endswith("\n")]

    def saved(self) -> int:
        tracker = self.folder / "run" / "out" / TRACKER
        return int(tracker.read_text()) if tracker.exists() else 0

    def seconds(self, phase: str) -> float:
        """What the phase usually takes."""
        given = [row["data"].get(f"timing_s/{phase}") for row in self.rows()[-20:]]
        return statistics.median([value for value in given if value is not None] or [0.2])

    def stop_once(self, phase: str, mode: str) -> tuple[str, float]:
        """Start the run, stop a rank within the phase of one of its steps; the method, and the seconds to the end."""
        before = self.saved()
        run = self.start(100_000, mode)
        try:
            wait_until(lambda: self.saved() > before, run, self.log)  # it goes on from its checkpoint
            step = len(self.rows()) + self.rng.randrange(1, 3)
            early = sum(self.seconds(other) for other in PHASES[: PHASES.index(phase)])
            delay = early + self.rng.random() * self.seconds(phase)
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
        """Start the run once more; it must end well, and its steps be all there once."""
        last = self.saved() + 2
        run = self.start(last)
        assert run.wait(300) == 0, self.log.read_text()[-3000:]
        assert [row["step"] for row in self.rows()] == list(range(1, last + 1))


def stops(folder: Path, count: int, seed: int) -> int:
    """Stop a rank `count` times; the number of runs that did not end as they must."""
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
