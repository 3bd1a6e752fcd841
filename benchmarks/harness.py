"""Times alternatives in turn within one run, and keeps medians with their range."""

from __future__ import annotations

import json
import os
import platform
import statistics
import subprocess
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from rich.console import Console
from rich.table import Table

RESULTS = Path(__file__).parent / "results"
REPETITIONS = 7


@dataclass
class Row:
    """One figure: the median of `repetitions` values, with the lowest and the highest."""

    name: str
    value: float
    unit: str
    low: float
    high: float
    repetitions: int


def row(name: str, values: list[float], unit: str) -> Row:
    """The median row of repeated values."""
    return Row(name, statistics.median(values), unit, min(values), max(values), len(values))


def alternate(variants: dict[str, Callable[[], object]], repetitions: int = REPETITIONS) -> dict[str, list[float]]:
    """Seconds of each variant, run in turn (a, b, a, b, ...) after one untimed round: slow minutes hit all alike."""
    seconds: dict[str, list[float]] = {name: [] for name in variants}
    for repetition in range(repetitions + 1):
        for name, work in variants.items():
            started = time.perf_counter()
            work()
            if repetition:
                seconds[name].append(time.perf_counter() - started)
    return seconds


def ratios(slow: list[float], fast: list[float]) -> list[float]:
    """Speed-up of each pair of neighbouring runs."""
    return [a / b for a, b in zip(slow, fast, strict=True)]


def machine() -> str:
    """What the figures were taken on."""
    gib = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30
    device = torch.cuda.get_device_name() if torch.cuda.is_available() else "no GPU"
    python = platform.python_version()
    return (f"{platform.machine()}, {os.cpu_count()} cores, {gib:.0f} GiB, {device}, Python {python}, "
            f"torch {torch.__version__}, {torch.get_num_threads()} threads, commit {commit()}")


def commit() -> str:
    """The short hash of the tree, with + where it is changed."""
    told = subprocess.run(["git", "describe", "--always", "--dirty=+"], capture_output=True, text=True)
    return told.stdout.strip() or "unknown"


def save(name: str, rows: list[Row]) -> None:
    """Print the rows and write benchmarks/results/<name>.json."""
    RESULTS.mkdir(exist_ok=True)
    record = {"machine": machine(), "rows": [asdict(r) for r in rows]}
    (RESULTS / f"{name}.json").write_text(json.dumps(record, indent=1) + "\n")
    table = Table(title=f"{name}: medians")
    for column in ("name", "value", "unit", "low", "high", "n"):
        table.add_column(column, justify="left" if column in ("name", "unit") else "right")
    for r in rows:
        table.add_row(r.name, f"{r.value:.4g}", r.unit, f"{r.low:.4g}", f"{r.high:.4g}", str(r.repetitions))
    Console().print(table)
