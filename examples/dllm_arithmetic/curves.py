"""Pictures of the demo: losses of the rounds over steps, accuracy over tokens per forward and per second."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

LOSSES = ("train/loss", "train/loss_s0", "train/loss_s1", "train/loss_ar")
SMOOTH = 0.9


def smoothed(values: Sequence[float]) -> list[float]:
    """Running mean that forgets by SMOOTH a step, without its start's bias."""
    mean, weight, found = 0.0, 0.0, []
    for value in values:
        mean, weight = SMOOTH * mean + (1 - SMOOTH) * value, SMOOTH * weight + 1 - SMOOTH
        found.append(mean / weight)
    return found


def draw_curves(
    found: Mapping[str, Any], runs: Sequence[tuple[str, list[dict[str, Any]]]], file: Path
) -> None:
    """Write the PNG; `found` as in evaluation.json, `runs`: (name, rows of metrics.jsonl)."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(15, 4.5), layout="constrained")
    losses, forwards, seconds = figure.subplots(1, 3)
    for name, rows in runs:
        for key in LOSSES:
            points = [(row["step"], row["data"][key]) for row in rows if key in row["data"]]
            if points:
                steps, values = zip(*points, strict=True)
                losses.plot(steps, smoothed(values), label=f"{name}, {key.removeprefix('train/')}")
    losses.set(xlabel="step", ylabel="loss, smoothed", yscale="log")
    losses.legend(fontsize=7)
    for axis, key, label in ((forwards, "tokens_per_forward", "tokens per forward"),
                             (seconds, "tokens_per_second", "tokens per second, one question at a time")):  # fmt: skip
        for name in dict.fromkeys(row["model"] for row in found["rows"]):
            rows = [row for row in found["rows"] if row["model"] == name]
            axis.scatter([row[key] for row in rows], [100 * row["accuracy"] for row in rows], label=name)
            for row in rows:
                axis.annotate(row["mode"], (row[key], 100 * row["accuracy"]), fontsize=7, xytext=(3, 3),
                              textcoords="offset points")  # fmt: skip
        axis.set(xlabel=label, ylabel="accuracy, %")
        axis.legend(fontsize=7)
    figure.savefig(file, dpi=110)
