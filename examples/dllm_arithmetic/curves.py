"""Pictures of the demo: losses of the rounds over steps, accuracy over tokens per forward and per second; AUP."""

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

LOSSES = ("train/loss", "train/loss_s0", "train/loss_s1", "train/loss_ar")
SMOOTH = 0.9
COLOURS = ("tab:blue", "tab:orange")  # of the models
MARKERS = "os^vDP*Xhd<>"  # of the generation modes
AUP_ALPHA, AUP_WORST = 3.0, 5.0  # weight of lost accuracy; points below the slowest mode at which a mode is left out


def smoothed(values: Sequence[float]) -> list[float]:
    """Exponential moving average with decay SMOOTH, corrected for the bias of its start."""
    mean, weight, means = 0.0, 0.0, []
    for value in values:
        mean, weight = SMOOTH * mean + (1 - SMOOTH) * value, SMOOTH * weight + 1 - SMOOTH
        means.append(mean / weight)
    return means


def accuracy_under_parallelism(rows: Sequence[Mapping[str, Any]], best: float) -> float:
    """AUP of a model's modes, in % times tokens per forward (d3LLM, arXiv 2601.07568, section on AUP).

    `rows` have `accuracy` y (0 to 1) and `tokens_per_forward` r; `best` is the highest accuracy of any model, y_max.
    With the modes in order of r, those of at least y_1 - 5 points: r_1 y_1 + sum of (r_i - r_(i-1)) times the mean of
    y W(y) at both, where W(y) = min(exp(-3 (1 - y / y_max)), 1) and y is in %.
    """
    points = sorted((row["tokens_per_forward"], 100 * row["accuracy"]) for row in rows)
    first = points[0][1]
    points = [(r, y, y * min(math.exp(-AUP_ALPHA * (1 - y / (100 * best))), 1.0))
              for r, y in points if y >= first - AUP_WORST]  # fmt: skip
    area = points[0][0] * first
    for (r, _, weighted), (next_r, _, next_weighted) in zip(points, points[1:], strict=False):
        area += (next_r - r) * (weighted + next_weighted) / 2
    return area


def draw_curves(
    results: Mapping[str, Any], runs: Sequence[tuple[str, list[dict[str, Any]]]], file: Path
) -> None:
    """Write the PNG; `results` as in evaluation.json, `runs`: (name, rows of metrics.jsonl)."""
    from matplotlib.figure import Figure

    labels = {"tokens_per_forward": "tokens per forward",
              "tokens_per_second": "tokens per second, one question at a time"}  # fmt: skip
    measured = [key for key in labels if any(key in row for row in results["rows"])]
    figure = Figure(figsize=(1.5 + 4.5 * (1 + len(measured)), 4.5), layout="constrained")
    losses, *panels = figure.subplots(1, 1 + len(measured))
    for name, rows in runs:
        for key in LOSSES:
            points = [(row["step"], row["data"][key]) for row in rows if key in row["data"]]
            if points:
                steps, values = zip(*points, strict=True)
                losses.plot(steps, smoothed(values), label=f"{name}, {key.removeprefix('train/')}")
    losses.set(xlabel="step", ylabel="loss, smoothed", yscale="log")
    losses.legend(fontsize=7)
    modes = dict.fromkeys(row["mode"] for row in results["rows"])
    models = dict.fromkeys(row["model"] for row in results["rows"])
    for axis, key in zip(panels, measured, strict=True):
        for row in results["rows"]:
            if key not in row:  # measured for other modes only
                continue
            axis.scatter(row[key], 100 * row["accuracy"], color=COLOURS[list(models).index(row["model"])], s=60,
                         marker=MARKERS[list(modes).index(row["mode"])], alpha=0.8, edgecolors="black")  # fmt: skip
        axis.set(xlabel=labels[key], ylabel="accuracy, %", xlim=(0, None), ylim=(-5, 105))
        axis.grid(alpha=0.3)
    for colour, name in zip(COLOURS, models, strict=False):
        panels[-1].scatter([], [], color=colour, marker="s", label=name)
    for marker, name in zip(MARKERS, modes, strict=False):
        panels[-1].scatter([], [], facecolors="none", edgecolors="black", marker=marker, label=name)
    panels[-1].legend(fontsize=8, loc="center left", bbox_to_anchor=(1.02, 0.5))
    figure.savefig(file, dpi=110)
