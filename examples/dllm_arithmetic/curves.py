"""Pictures of the demo: losses of the rounds over steps, accuracy over tokens per forward and per second."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

LOSSES = ("train/loss", "train/loss_s0", "train/loss_s1", "train/loss_ar")
SMOOTH = 0.9
NEAR = 0.03  # of the axis: labels of closer points would overlap


def smoothed(values: Sequence[float]) -> list[float]:
    """Exponential moving average with decay SMOOTH, corrected for the bias of its start."""
    mean, weight, means = 0.0, 0.0, []
    for value in values:
        mean, weight = SMOOTH * mean + (1 - SMOOTH) * value, SMOOTH * weight + 1 - SMOOTH
        means.append(mean / weight)
    return means


def draw_curves(
    results: Mapping[str, Any], runs: Sequence[tuple[str, list[dict[str, Any]]]], file: Path
) -> None:
    """Write the PNG; `results` as in evaluation.json, `runs`: (name, rows of metrics.jsonl)."""
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
        furthest = max(row[key] for row in results["rows"])
        for i, name in enumerate(dict.fromkeys(row["model"] for row in results["rows"])):
            points = [(row[key], 100 * row["accuracy"], row["mode"]) for row in results["rows"] if row["model"] == name]
            axis.scatter(*list(zip(*points, strict=True))[:2], label=name)
            for x, y, modes in named_together(points, NEAR * furthest):
                axis.annotate(modes, (x, y), fontsize=7, xytext=(2, 4 - 8 * i), textcoords="offset points",
                              rotation=65 - 110 * i, va="top" if i else "bottom", rotation_mode="anchor")  # fmt: skip
        axis.set(xlabel=label, ylabel="accuracy, %", xlim=(0, 1.15 * furthest), ylim=(-30, 150),
                 yticks=range(0, 101, 20))  # fmt: skip
        axis.legend(fontsize=7, loc="center")
    figure.savefig(file, dpi=110)


def named_together(points: Sequence[tuple[float, float, str]], near: float) -> list[tuple[float, float, str]]:
    """Labels (x, y, names) of points (x, y, name): shared if the next x is less than `near` away and y less than 2."""
    labels: list[tuple[float, float, str]] = []
    last = (0.0, 0.0)
    for x, y, name in sorted(points):
        if labels and x - last[0] < near and abs(y - last[1]) < 2:
            labels[-1] = (*labels[-1][:2], f"{labels[-1][2]}, {name}")
        else:
            labels.append((x, y, name))
        last = (x, y)
    return labels
