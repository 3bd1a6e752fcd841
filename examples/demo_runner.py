"""Shared by the demos: commands with a log, progress bars, phases with a time budget."""

import json
import os
import random
import shutil
import signal
import subprocess
import sys
import time
import zlib
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.table import Table

from verl.utils.fs import output_folder

ROOT = Path(__file__).resolve().parents[1]
SETUP_AGE_S = 60.0  # a newer set-up record belongs to the same `make`
LOG_EVERY_S = 20.0  # between progress lines on a console without progress bars
TAIL_BYTES = 65_536  # of metrics.jsonl: several rows
STOP_TIMEOUT_S = 300.0  # a stopped training finishes its start-up or step, and saves
BLOCK, BLOCKS_A_SECOND = 65_536, 1_900.0  # bytes of a block, and blocks that 2 idle cores compress in a second
console = Console()
Job = tuple[list[str], Path]
"""A command and the file that takes its output."""


class PhaseFailed(RuntimeError):
    """A command of the demo failed; the message names its log."""


def out_folder(text: str) -> Path:
    """The absolute folder of an option --out (`type=` of argparse); refused if it cannot be written to."""
    return output_folder(text).resolve()


def python(module: str, *arguments: Any) -> list[str]:
    """A command of a module or of a script with its arguments."""
    name = [module] if module.endswith(".py") else ["-m", module]
    return [sys.executable, *name, *map(str, arguments)]


def json_rows(file: Path) -> list[dict[str, Any]]:
    """The lines of a jsonl file, in order."""
    return [json.loads(line) for line in file.read_text().splitlines()]


def run_logged(command: list[str], log: Path, watch: Callable[[], None] | None = None, env: dict | None = None) -> None:
    """Run a command with its output in `log`; `watch` is called twice a second.

    Raises PhaseFailed with the log's last lines if it fails; the child is stopped if this process is interrupted.
    """
    run_side_by_side([(command, log)], watch, env)


def run_side_by_side(
    jobs: Sequence[Job], watch: Callable[[], None] | None = None, env: dict | None = None
) -> list[float]:
    """Run commands in parallel, each as run_logged does; returns their CPU seconds. If one fails, all are stopped."""
    children: list[tuple[subprocess.Popen, list[str]]] = []
    seconds = [0.0] * len(jobs)
    try:
        for command, log in jobs:
            children.append((_start(command, log, env), command))
        while any(child.returncode is None for child, _ in children):
            for i, (child, _) in enumerate(children):
                if child.returncode is None:
                    seconds[i] = _poll(child)
                    if child.returncode:
                        raise _failed(*jobs[i], child.returncode)
            if watch is not None:
                watch()
            time.sleep(0.5)
    except BaseException:
        _stop(children)
        raise
    return seconds


def _start(command: list[str], log: Path, env: dict | None) -> subprocess.Popen:
    log.parent.mkdir(parents=True, exist_ok=True)
    with open(log, "w") as out:
        return subprocess.Popen(command, cwd=ROOT, stdout=out, stderr=subprocess.STDOUT, env=env)


def _poll(child: subprocess.Popen) -> float:
    """Set the exit code of a child that has ended; its CPU seconds with those of its own children (0 while it runs)."""
    ended, status, usage = os.wait4(child.pid, os.WNOHANG)
    if not ended:
        return 0.0
    child.returncode = os.waitstatus_to_exitcode(status)
    return usage.ru_utime + usage.ru_stime


def _stop(children: list[tuple[subprocess.Popen, list[str]]]) -> None:
    alive = [(child, command) for child, command in children if child.returncode is None]
    for child, _ in alive:
        child.terminate()
    for child, command in alive:
        console.print(f"  waiting for {' '.join(command[1:3])} to end (at most {STOP_TIMEOUT_S:.0f} s)")
        try:
            child.wait(timeout=STOP_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            child.kill()


def _failed(command: list[str], log: Path, code: int) -> PhaseFailed:
    tail = "\n".join(log.read_text(errors="replace").splitlines()[-30:])
    return PhaseFailed(f"{' '.join(command[:4])} ... ended with {code}; its last lines ({log}):\n{tail}")


class ProgressLog:
    """Prints progress now and then where no bar is drawn, as in a log file."""

    def __init__(self) -> None:
        self.last, self.text = time.monotonic(), ""

    def __call__(self, text: str) -> None:
        if not console.is_terminal and text != self.text and time.monotonic() - self.last > LOG_EVERY_S:
            console.print(f"  {text}")
            self.last, self.text = time.monotonic(), text


class TrainingWatch:
    """Updates a progress bar for each run, by name (folder, steps), from the metrics.jsonl that its trainer appends to.

    `describe` makes the text of a row from its metrics; rows without a text are not shown. Where no bar is drawn, runs
    that have ended are left out.
    """

    def __init__(
        self, progress: Progress, runs: Mapping[str, tuple[Path, int]], describe: Callable[[Mapping[str, float]], str]
    ) -> None:
        self.progress, self.runs, self.describe = progress, runs, describe
        self.tasks = {name: progress.add_task(f"{name}: starting", total=steps) for name, (_, steps) in runs.items()}
        self.log = ProgressLog()

    def __call__(self) -> None:
        texts = []
        for name, (run, steps) in self.runs.items():
            for row in reversed(last_rows(run / "metrics.jsonl")):
                if text := self.describe(row["data"]):
                    text = f"{name}: step {row['step']}  {text}"
                    self.progress.update(self.tasks[name], completed=row["step"], description=text)
                    if row["step"] < steps:
                        texts.append(text)
                    break
        if texts:
            self.log("; ".join(texts))


def last_rows(metrics: Path) -> list[dict[str, Any]]:
    """The last complete rows of a metrics.jsonl, which is long and polled often; [] while it does not exist."""
    if not metrics.exists():
        return []
    with open(metrics, "rb") as file:
        file.seek(max(0, metrics.stat().st_size - TAIL_BYTES))
        lines = file.read().decode(errors="replace").splitlines(keepends=True)
    return [json.loads(line) for line in lines if line.startswith('{"step"') and line.endswith("\n")]


def train(name: str, command: list[str], run: Path, steps: int, describe: Callable[[Mapping[str, float]], str]) -> None:
    """Train from scratch (an older run is removed) under a progress bar; its log is RUN/train.log."""
    shutil.rmtree(run, ignore_errors=True)
    with make_progress() as progress:
        watch = TrainingWatch(progress, {name: (run, steps)}, describe)
        run_logged(command, run / "train.log", watch, {**os.environ, "OMP_NUM_THREADS": str(os.cpu_count())})


def by_step(run: Path, metric: str) -> dict[int, float]:
    """A metric of a finished run, by the number of the step; a validation before the first step has number 0."""
    return {row["step"]: row["data"][metric] for row in json_rows(run / "metrics.jsonl") if metric in row["data"]}


def make_progress(counted: bool = False) -> Progress:
    """Bar with elapsed and remaining time; `counted` shows the steps as numbers too."""
    numbers = (MofNCompleteColumn(),) if counted else ()
    return Progress(
        TextColumn("  {task.description}"), BarColumn(), *numbers, TimeElapsedColumn(), TimeRemainingColumn(),
        console=console,
    )  # fmt: skip


def begin(title: str) -> None:
    """Show the title, and make SIGTERM end the running command too."""
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))
    console.rule(title)


def slowdown(seconds: float = 1.0) -> float:
    """The time that work takes on this machine now over that on 2 idle cores, from so many seconds of it on all cores.

    At least 0.5: not all of a demo runs on more cores, or on faster ones, in less time.
    """
    data, cores, end = random.Random(0).randbytes(BLOCK), len(os.sched_getaffinity(0)), time.monotonic() + seconds

    def compressed(_: int) -> int:
        count = 0
        while time.monotonic() < end:
            zlib.compress(data)  # without the interpreter's lock
            count += 1
        return count

    with ThreadPoolExecutor(cores) as pool:
        return max(0.5, BLOCKS_A_SECOND * seconds / max(1, sum(pool.map(compressed, range(cores)))))


class Phases:
    """Runs named phases and records the time of each against its budget: seconds on 2 idle cores, where most take at
    least half of it. A machine that is slower, or does other work, stretches all but that of the set-up.
    """

    def __init__(self, budget: dict[str, float]):
        times = slowdown()
        self.budget = {name: s if name == "set-up" else s * max(1.0, times) for name, s in budget.items()}
        longest = times * sum(s for name, s in budget.items() if name != "set-up") / 60
        speed = f"a second of work took {times:.1f} times as long as on 2 idle cores"
        console.print(f"about {longest / 2:.0f} to {longest:.0f} minutes on this machine ({speed})", soft_wrap=True)
        self.took: dict[str, float] = {}
        record = Path(sys.prefix) / ".setup_seconds"  # written by scripts/setup_env.sh
        if record.exists() and time.time() - record.stat().st_mtime < SETUP_AGE_S:
            self.took["set-up"] = float(record.read_text())

    def run(self, name: str, work: Callable[[], None]) -> None:
        """Announce, run and time one phase."""
        console.print(f"[bold]{name}[/bold]  (up to about {self.budget[name]:.0f} s on this machine)")
        started = time.monotonic()
        work()
        self.took[name] = time.monotonic() - started
        console.print(f"  took {self.took[name]:.0f} s")

    def table(self) -> Table:
        """Budget and time of each phase, and their sums."""
        table = Table(title="Time")
        for column in ("phase", "expected s", "took s"):
            table.add_column(column, justify="left" if column == "phase" else "right")
        for name, took in self.took.items():
            shown = f"[red]{took:.0f}[/red]" if took > self.budget[name] else f"{took:.0f}"
            table.add_row(name, f"{self.budget[name]:.0f}", shown)
        table.add_section()
        table.add_row("all", f"{sum(self.budget[name] for name in self.took):.0f}", f"{sum(self.took.values()):.0f}")
        return table


def run_phases(title: str, budget: dict[str, float], phases: Mapping[str, Callable[[], None]]) -> Phases | None:
    """Run the phases of a demo; None, with the reason printed, if one fails."""
    begin(title)
    timed = Phases(budget)
    try:
        for name, work in phases.items():
            timed.run(name, work)
    except PhaseFailed as failure:
        console.print(str(failure), style="red", markup=False)  # a log may contain brackets
        return None
    return timed


def run_shown(command: list[str]) -> None:
    """Run a command that draws its own progress bars; raises PhaseFailed if it fails."""
    code = subprocess.run(command, cwd=ROOT).returncode
    if code != 0:
        raise PhaseFailed(f"{' '.join(command[:4])} ... ended with {code}")
