"""Times alternatives in turn within one run, and keeps medians with their range."""

import json
import operator
import os
import platform
import statistics
import subprocess
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

from examples.demo_runner import ROOT, python
from verl.training.host_memory import return_freed_memory

RESULTS = Path(__file__).parent / "results"
REPETITIONS = 7
SEEDS = (0, 1, 2)  # of a demo that is repeated
Bound = tuple[str, float]
"""A key of COMPARE, and the limit."""
COMPARE = {"at least": operator.ge, "at most": operator.le}
console = Console()
if not console.is_terminal:
    console.width = 160  # a log needs no narrower rows


@dataclass
class Row:
    """One result: the median of `repetitions` values unless its unit says otherwise, with the range of them."""

    name: str
    value: float
    unit: str
    low: float
    high: float
    repetitions: int


def row(name: str, values: list[float], unit: str) -> Row:
    """The median row of repeated values."""
    return Row(name, statistics.median(values), unit, min(values), max(values), len(values))


def mean_row(name: str, values: list[float], unit: str) -> Row:
    """The mean of values that are no repetitions, such as those of seeds."""
    return Row(name, statistics.mean(values), unit, min(values), max(values), len(values))


def alternate(
    variants: dict[str, Callable[[], object]], repetitions: int = REPETITIONS, rest: Callable[[], None] | None = None
) -> dict[str, list[float]]:
    """Seconds of each variant, run in turn (a, b, a, b, ...) after one untimed round: slow minutes hit all alike.

    `rest` is called, untimed, before each run.
    """
    seconds: dict[str, list[float]] = {name: [] for name in variants}
    for repetition in range(repetitions + 1):
        for name, work in variants.items():
            if rest is not None:
                rest()
            started = time.perf_counter()
            work()
            if repetition:
                seconds[name].append(time.perf_counter() - started)
    return seconds


def restart_peak() -> None:
    """Give freed memory back to the system and let the process's peak start again from what it holds now (Linux)."""
    return_freed_memory()  # else the next work would reuse freed pages unseen
    Path("/proc/self/clear_refs").write_text("5")


def resident_bytes(peak: bool = False) -> int:
    """Physical memory of this process as the kernel counts it: now, or the most since `restart_peak`."""
    wanted = "VmHWM:" if peak else "VmRSS:"
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(1024 * int(line.split()[1]) for line in lines if line.startswith(wanted))


def ratios(above: list[float], below: list[float]) -> list[float]:
    """Quotient of each pair of neighbouring runs."""
    return [a / b for a, b in zip(above, below, strict=True)]


def machine() -> str:
    """The machine that the results were measured on."""
    gib = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30
    device = torch.cuda.get_device_name() if torch.cuda.is_available() else "no GPU"
    python = platform.python_version()
    return (f"{platform.machine()}, {os.cpu_count()} cores, {gib:.0f} GiB, {device}, Python {python}, "
            f"torch {torch.__version__}, {torch.get_num_threads()} threads, commit {commit()}")


def commit() -> str:
    """The short hash of the tree, with + where it is changed."""
    described = subprocess.run(["git", "describe", "--always", "--dirty=+"], capture_output=True, text=True)
    return described.stdout.strip() or "unknown"


def say(text: str) -> None:
    """A line on the terminal about what is measured now."""
    console.print(f"[dim]{text}[/dim]", highlight=False)


def verdict(value: float, bound: Bound | None) -> str:
    """`at least 5: met`; empty without a bound."""
    if bound is None:
        return ""
    word, limit = bound
    return f"{word} {limit:g}: {'met' if COMPARE[word](value, limit) else 'MISSED'}"


def run_alone(command: list[str], log: Path) -> None:
    """Run a command to its end, with as many threads as the machine has cores.

    RuntimeError with the end of its log if it fails.
    """
    environment = {**os.environ, "OMP_NUM_THREADS": str(os.cpu_count()), "HF_HUB_OFFLINE": "1"}
    with open(log, "w") as out:
        code = subprocess.run(command, cwd=ROOT, env=environment, stdout=out, stderr=subprocess.STDOUT).returncode
    if code:
        raise RuntimeError(f"{' '.join(command[:3])} ended with {code} ({log}):\n{log.read_text()[-3000:]}")


def run_seeds(module: str, out: Path, record: str = "result.json") -> dict[str, Any]:
    """The record that a demo's command leaves in `out` after SEEDS; the command continues what `out` has."""
    subprocess.run(python(module, "--out", out, "--seeds", *SEEDS), cwd=ROOT, check=True)
    return json.loads((out / record).read_text())


def save(name: str, rows: list[Row], wanted: Mapping[str, Bound], alone: bool = False) -> None:
    """Print the rows, each next to the bound of its name, and write benchmarks/results/<name>.json.

    `alone`: rows measured without the benchmark's others replace those of the same names; the file's `measured_alone`
    has their machine and commit.
    """
    RESULTS.mkdir(exist_ok=True)
    file, record = RESULTS / f"{name}.json", {"machine": machine(), "rows": [asdict(r) for r in rows]}
    if alone:
        new, record = record, json.loads(file.read_text()) if file.exists() else {**record, "rows": []}
        names = [r.name for r in rows]
        record["rows"] = [old for old in record["rows"] if old["name"] not in names] + new["rows"]
        record["measured_alone"] = record.get("measured_alone", {}) | dict.fromkeys(names, new["machine"])
    file.write_text(json.dumps(record, indent=1) + "\n")
    table = Table(title=f"{name}: medians")
    for column in ("name", "value", "unit", "low", "high", "n", "wanted"):
        words = column in ("name", "unit", "wanted")
        table.add_column(column, justify="left" if words else "right", no_wrap=not words, overflow="fold")
    for r in rows:
        cells = (f"{r.value:.4g}", r.unit, f"{r.low:.4g}", f"{r.high:.4g}", str(r.repetitions))
        table.add_row(r.name, *cells, verdict(r.value, wanted.get(r.name)))
    console.print(table)
