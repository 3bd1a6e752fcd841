"""Draws the small panels of the report page as SVG text."""

import io
import math
import os
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

COLOURS = ("#2f6fde", "#e07b39", "#2f9e6e", "#b0489b", "#8a8f2a", "#4aa3b8", "#c8443c", "#7a6ad0")
WIDTH_IN, HEIGHT_IN = 4.4, 2.3


@dataclass
class Curve:
    """One metric over the run: `steps` and `values` have the same length."""

    name: str
    steps: list[int]
    values: list[float]


@dataclass
class Panel:
    """One picture of the page: title, explanation, SVG text."""

    title: str
    note: str
    svg: str


def smooth(values: list[float], window: int) -> list[float]:
    """Centred running mean over at most `window` neighbours, without NaN entries."""
    half = window // 2
    out = []
    for i in range(len(values)):
        near = [v for v in values[max(0, i - half) : i + half + 1] if math.isfinite(v)]
        out.append(sum(near) / len(near) if near else math.nan)
    return out


def svg_figure(draw: Callable[[Any], None], width_in: float = WIDTH_IN, height_in: float = HEIGHT_IN) -> str:
    """SVG text of what `draw` puts on an empty matplotlib figure."""
    import matplotlib

    matplotlib.use("Agg", force=False)
    from matplotlib.figure import Figure

    with matplotlib.rc_context({"svg.fonttype": "none", "font.size": 8, "font.family": "sans-serif"}):
        figure = Figure(figsize=(width_in, height_in), layout="constrained")
        draw(figure)
        figure.patch.set_alpha(0)
        for axes in figure.axes:
            axes.patch.set_alpha(0)
        out = io.StringIO()
        figure.savefig(out, format="svg", metadata={"Date": None, "Creator": None})
    text = out.getvalue()
    return text[text.index("<svg") :]


def draw_panel(curves: list[Curve], stacked: bool = False) -> str:
    """SVG text of one panel. Noisy curves (over 30 points) are drawn faint with their running mean on top."""

    def draw(figure: Any) -> None:
        from matplotlib.ticker import MaxNLocator

        axes = figure.add_subplot()
        if stacked:
            steps = sorted({s for c in curves for s in c.steps})
            by_step = [dict(zip(c.steps, c.values, strict=True)) for c in curves]
            heights = [[values.get(s, 0.0) for s in steps] for values in by_step]  # 0: the phase did not run
            axes.stackplot(steps, heights, labels=[c.name for c in curves], colors=COLOURS)
            totals = sorted(map(sum, zip(*heights, strict=True)))
            usual = totals[int(0.9 * (len(totals) - 1))]
            if totals[-1] > 3 * usual:  # a slow first step would flatten all others
                axes.set_ylim(0, 1.9 * usual)
                axes.set_title(f"highest step: {totals[-1]:.4g}, clipped", fontsize=7, loc="right", color="#667085")
        else:
            for curve, colour in zip(curves, COLOURS * (1 + len(curves) // len(COLOURS)), strict=False):
                style = {"color": colour, "linewidth": 1.4, "label": curve.name}
                if len(curve.steps) > 30:
                    axes.plot(curve.steps, curve.values, color=colour, alpha=0.22, linewidth=0.7)
                    axes.plot(curve.steps, smooth(curve.values, len(curve.steps) // 15), **style)
                else:
                    marker = "o" if len(curve.steps) < 12 else ""
                    axes.plot(curve.steps, curve.values, marker=marker, markersize=3, **style)
        if len(curves) > 1:
            handles, labels = axes.get_legend_handles_labels()
            short = [label.removeprefix(os.path.commonprefix(labels).rpartition("/")[0]).strip("/") for label in labels]
            axes.legend(handles, short, fontsize=7, frameon=False, loc="best", ncols=1 + len(curves) // 4)
        axes.set_xlabel("step")
        axes.xaxis.set_major_locator(MaxNLocator(integer=True))
        axes.spines[["top", "right"]].set_visible(False)
        axes.grid(alpha=0.25, linewidth=0.5)

    return svg_figure(draw)
