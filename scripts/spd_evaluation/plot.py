"""The picture of an evaluation: accuracy against accepted draft tokens per target forward, and against forwards."""

from collections.abc import Iterable, Sequence
from pathlib import Path

from scripts.spd_evaluation.measures import EvaluationRow

CURVES = (  # rules of one curve, legend, colour, marker
    (("margin",), "margin rule, swept", "#d95f02", "s"),
    (("typical",), "typical acceptance, swept", "#7570b3", "^"),
    (("top_rank",), "top ranks, swept", "#1f78b4", "<"),
    (("rank_margin",), "margin within the top 3, swept", "#fb9a99", ">"),
    (("deferred",), "deferred window, entropy swept", "#b2df8a", "p"),
    (("words",), "tokens without figures", "#ff7f00", "D"),
    (("entropy",), "entropy, swept", "#33a02c", "h"),
    (("divergence",), "divergence rule, swept", "#a6761d", "v"),
    (("divergence_strict",), "divergence rule, strict", "#666666", "D"),
    (("supervised", "supervised_sweep"), "supervised scorer, swept", "#6a3d9a", "d"),
    (("refined", "refined_sweep"), "GRPO from the supervised scorer, swept", "#b15928", "P"),
    (("scorer", "scorer_sweep"), "trained scorer, swept", "#1b9e77", "o"),
)
POINTS = {  # rule: legend, colour, marker
    "exact": ("exact match", "black", "*"),
    "all": ("accept everything", "#999999", "X"),
    "ngram": ("n-gram drafts, exact match", "black", "+"),
    "random": ("random share", "#e7298a", "P"),
    "scorer_untrained": ("untrained scorer", "#66a61e", "h"),
    "scorer": ("trained scorer, threshold from validation", "#1b9e77", "o"),
}


def curves_in(names: Iterable[str]) -> list[tuple[tuple[str, ...], str, str, str]]:
    """CURVES, and one like them for each other name of a rule or scorer: those of --rule and --compare."""
    known = {"target", *POINTS, *(rule for rules, *_ in CURVES for rule in rules)}
    own = dict.fromkeys(name.removesuffix("_sweep") for name in names if name not in known)
    return [*CURVES, *(((name, f"{name}_sweep"), name, f"C{i}", "x") for i, name in enumerate(own))]


ZOOM_POINTS = 9.0  # how far below the target's accuracy the close-up reaches


def save_plot(rows: Sequence[EvaluationRow], questions: int, path: Path) -> None:
    """Write a PNG with 95 % intervals: all rules on the left, the best of them close up in the middle, both by accepted
    draft tokens; on the right by the target's forwards.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(19, 6.4), dpi=110, layout="constrained")
    FigureCanvasAgg(figure)
    whole, close, cost = figure.subplots(1, 3)
    _draw(whole, rows, "accepted_per_forward", "accepted draft tokens per target forward")
    _draw(close, rows, "accepted_per_forward", "accepted draft tokens per target forward")
    _draw(cost, rows, "forwards_per_question", "target forwards per question")
    reference = next(row.accuracy for row in rows if row.rule == "exact")
    floor = 100 * reference - ZOOM_POINTS
    near = [row for row in rows if 100 * row.accuracy >= floor and row.rule not in ("target", "ngram")]
    top = min(1.0, max(row.accuracy + 1.96 * row.accuracy_se for row in near))
    for axes, field in ((close, "accepted_per_forward"), (cost, "forwards_per_question")):
        places = [getattr(row, field) for row in near]
        margin = 0.06 * (max(places) - min(places)) or 0.5
        axes.set_xlim(min(places) - margin, max(places) + margin)
        axes.set_ylim(floor, 100 * top + 0.5)
    _name_thresholds(close, rows, floor)
    whole.set_title("all rules")
    close.set_title("close up; the small numbers are thresholds")
    cost.set_title("close up by cost: further left is faster")
    figure.suptitle(f"Speculative decoding on {questions} held-out questions")
    figure.legend(*whole.get_legend_handles_labels(), loc="outside lower center", ncols=4, fontsize=9)
    figure.savefig(path)


def _draw(axes, rows: Sequence[EvaluationRow], cost: str, label: str) -> None:
    """Curves, points and the target's own accuracy by the field `cost` on one pair of axes."""
    for rules, legend, colour, marker in curves_in(row.rule for row in rows):
        curve = _curve(rows, rules)
        if curve:
            axes.errorbar(*_series(curve, cost), color=colour, marker=marker, markersize=5, linewidth=1.6, capsize=2,
                          elinewidth=0.8, label=legend)
    for rule, (legend, colour, marker) in POINTS.items():
        points = [row for row in rows if row.rule == rule]
        if points:
            axes.errorbar(*_series(points, cost), color=colour, marker=marker, markersize=11, markeredgecolor="black",
                          markeredgewidth=0.8, linestyle="none", capsize=3, label=legend, zorder=5)
    for row in rows:
        if row.rule == "target":
            axes.axhline(100 * row.accuracy, color="black", linewidth=0.8, linestyle=":", label="target alone")
    axes.set_xlabel(label)
    axes.set_ylabel("accuracy, % (bars: 95 % interval)")
    axes.grid(alpha=0.25)


def _name_thresholds(axes, rows: Sequence[EvaluationRow], floor: float) -> None:
    """Write each threshold next to its point: the scorer's above, the other rules' below."""
    for rules, _, colour, _ in curves_in(row.rule for row in rows):
        place = (5, 7) if rules[0] == "scorer" else (5, -12)
        for row in _curve(rows, rules):
            if 100 * row.accuracy > floor:
                axes.annotate(f"{row.threshold:.3g}", (row.accepted_per_forward, 100 * row.accuracy), fontsize=8,
                              color=colour, xytext=place, textcoords="offset points", annotation_clip=True)


def _curve(rows: Sequence[EvaluationRow], rules: Sequence[str]) -> list[EvaluationRow]:
    """The rows of one swept rule from slow to fast."""
    return sorted((row for row in rows if row.rule in rules), key=lambda row: row.accepted_per_forward)


def _series(rows: Sequence[EvaluationRow], cost: str) -> tuple[list[float], list[float], list[float]]:
    """Values of the field `cost`, accuracies and half intervals in percent."""
    return (
        [getattr(row, cost) for row in rows],
        [100 * row.accuracy for row in rows],
        [196 * row.accuracy_se for row in rows],
    )
