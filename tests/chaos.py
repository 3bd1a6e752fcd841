"""Kills SPD trainings at random moments, again and again; each must resume to the end of one that was left alone.

    python -m tests.chaos [--signal KILL|STOP] [--kills 20] [--seed 0] [--out DIR]

The victim is the driver, a rank, the run's own vLLM server or its raylet; every fifth kill falls inside a save. Half of
the completions are recorded beforehand, the others are made again. A moment that hit nothing is tried again. Prints a
line a kill; exit code 1 if one run ends otherwise, or a kill never hit. About a minute a kill on 2 cores.

With --signal STOP a rank of a GRPO run with vLLM is stopped instead, three minutes each: see tests/chaos_stops.py.
"""

import argparse
import os
import random
import shutil
import signal
import sqlite3
import subprocess
import sys
import time
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import psutil

from tests.chaos_stops import stops
from tests.helpers.spd_run import SPDRuns, processes_of, ranks_of

VICTIMS = ("driver", "rank", "server", "raylet")
STEPS = 6
TRIES = 3  # of a kill whose run was over first
ATTEMPTS = 4  # starts after the kill: a run whose server died ends with an error, and is started again
MOMENT = ("timing", "perf/", "spd/completions/", "spd/store/")  # what the machine or the store did


@dataclass(frozen=True)
class Kill:
    """One planned fault."""

    victim: str
    in_save: bool
    after_step: int
    delay_s: float


def planned(count: int, seed: int) -> list[Kill]:
    """`count` kills; every victim comes up equally often, every fifth is inside a save."""
    rng = random.Random(seed)
    victims = [VICTIMS[i % len(VICTIMS)] for i in range(count)]
    rng.shuffle(victims)
    return [
        Kill(victim, in_save=i % 5 == 4, after_step=rng.randrange(0, STEPS - 1), delay_s=rng.random())
        for i, victim in enumerate(victims)
    ]


def strike(kill: Kill, runs: SPDRuns, name: str, run: subprocess.Popen) -> str:
    """SIGKILL the victim at its moment; what was hit, empty where the run was over first."""
    runs.wait_for_step(name, kill.after_step, run)
    while not victims_of(kill.victim, run):  # before the first step it may not have started yet
        if run.poll() is not None:
            return ""
        time.sleep(0.05)
    if kill.in_save:
        deadline = time.monotonic() + 120
        while not unfinished(runs, name):
            if run.poll() is not None or time.monotonic() > deadline:
                return ""
    else:
        time.sleep(kill.delay_s)
    struck = [process for process in victims_of(kill.victim, run) if killed(process)]
    if not struck:
        return ""
    # The run itself is for its Popen to wait for: whoever else does takes its exit code away.
    psutil.wait_procs([process for process in struck if process.pid != run.pid], timeout=10)
    cut = ", save cut" if kill.in_save and unfinished(runs, name) else ""
    return f"{kill.victim}, step {runs.saved_step(name)} saved{cut}"


def killed(process: psutil.Process) -> bool:
    """SIGKILL it; False where it was gone."""
    try:
        process.kill()
    except psutil.NoSuchProcess:
        return False
    return True


def unfinished(runs: SPDRuns, name: str) -> list[Path]:
    """Checkpoints that are being written."""
    return list((runs.directory / name).glob("global_step_*.tmp"))


def victims_of(victim: str, run: subprocess.Popen) -> list[psutil.Process]:
    """The processes to kill; none when the run is over."""
    if run.poll() is not None:
        return []
    if victim == "driver":
        return [psutil.Process(run.pid)]
    if victim == "rank":
        return ranks_of(run)[:1]
    if victim == "raylet":
        return processes_of(run, "raylet/raylet")[:1]
    return processes_of(run, "vllm.entrypoints.openai.api_server") + processes_of(run, "VLLM::")


def half_recorded(whole: Path, target: Path) -> None:
    """A copy of the store with every other completion forgotten."""
    with sqlite3.connect(whole) as source, sqlite3.connect(target) as copy:
        source.backup(copy)
        keys = copy.execute("SELECT key FROM completions ORDER BY key").fetchall()
        copy.executemany("DELETE FROM completions WHERE key = ?", keys[::2])
        copy.commit()


def same_end(runs: SPDRuns, name: str) -> str:
    """What differs from the run that was left alone; empty if nothing does."""
    mine, whole = runs.rows(name), runs.rows("whole")
    if [row["step"] for row in mine] != [row["step"] for row in whole]:
        return f"steps {[row['step'] for row in mine]}"
    for one, other in zip(mine, whole, strict=True):
        for key, value in other["data"].items():
            if not key.startswith(MOMENT) and one["data"].get(key) != value:
                return f"step {other['step']}: {key} is {one['data'].get(key)}, not {value}"
    ours, theirs = runs.weights(name), runs.weights("whole")
    odd = [key for key in theirs if not np.array_equal(ours[key], theirs[key])]
    return f"weights {odd}" if odd else ""


def one_kill(runs: SPDRuns, number: int, kill: Kill) -> str:
    """Run, kill, start again until the run ends well; what differs then."""
    for attempt in range(TRIES):
        name = f"kill{number}" if attempt == 0 else f"kill{number}-{attempt}"
        half_recorded(runs.directory / "store.sqlite3", runs.directory / f"{name}.sqlite3")
        run = runs.start(name, "spd.rollout.attempts=2", store=f"{name}.sqlite3")
        hit = strike(kill, runs, name, run)
        codes = [run.wait(240)]
        if hit:
            break
        kill = replace(kill, after_step=max(0, kill.after_step - 1), delay_s=kill.delay_s / 2)
    while codes[-1] != 0 and len(codes) <= ATTEMPTS:
        codes.append(runs.start(name, store=f"{name}.sqlite3").wait(300))
    error = "nothing was hit" if not hit else "the last start failed" if codes[-1] else same_end(runs, name)
    moment = "inside a save" if kill.in_save else f"{kill.delay_s:.1f} s after step {kill.after_step}"
    print(f"{number:3d}  {kill.victim:7s} {moment:22s} hit: {hit:38s} exits {codes}  {error or 'same end'}", flush=True)
    return error


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--signal", choices=("KILL", "STOP"), default="KILL")
    parser.add_argument("--kills", type=int, default=20)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, default=Path("outputs/chaos"))
    args = parser.parse_args(argv)
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))
    shutil.rmtree(args.out, ignore_errors=True)
    args.out.mkdir(parents=True)
    if args.signal == "STOP":
        return 1 if stops(args.out.resolve(), args.kills, args.seed) else 0
    os.environ.pop("SPD_VLLM_URLS", None)
    runs = SPDRuns(args.out.resolve(), steps=STEPS, blocks=8 * STEPS)
    print(f"{args.kills} kills, seed {args.seed}; first a run that is left alone", flush=True)
    runs.run("whole")
    failed = [i for i, kill in enumerate(planned(args.kills, args.seed)) if one_kill(runs, i, kill)]
    print(f"{args.kills - len(failed)} of {args.kills} resumed to the same end")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
