"""Makes the self-contained offline report page (report.html) of a run from the files in its folder.

    python -m verl.report RUN_DIR

Reads `metrics.jsonl` (one `{"step": int, "data": {name: number}}` a line), `samples.jsonl`, `starts.jsonl`,
`async_timeline.jsonl`, `async_journal.jsonl`, `run_config.yaml` and `versions.json`; all but the first are optional,
and the run need not have ended.
"""

import base64
import json
import math
import os
from collections import defaultdict
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

import jinja2
from markupsafe import Markup

from verl.report.asynchronous import async_panels, idle_cards
from verl.report.health import RULES
from verl.report.metric_names import Headlines, left_out, metrics_of_recipes
from verl.report.plots import Curve, Panel, draw_panel
from verl.utils.jsonl import read_objects, replace_text
from verl.utils.visible_text import visible

LARGEST = 1e200  # magnitude of a number that is drawn
TEMPLATE = Path(__file__).with_name("template.html.jinja")

# Panels shown first when the run has their metrics, after those of recipes.
HEADLINES: Headlines = (
    ("Reward", "mean score of a sample; GRPO raises it", ("critic/score/mean",)),
    ("Policy loss", "", ("actor/pg_loss",)),
    ("Loss", "mean over the learned tokens of a step", ("train/loss",)),
    ("Entropy", "nats per decision", ("actor/entropy",)),
    ("Gradient norm", "before clipping", ("actor/grad_norm", "train/grad_norm")),
    ("Drift", "log-prob now against at sampling; zero where the old pass is skipped",
     ("actor/logprob_drift", "actor/logprob_drift_max", "actor/ppo_kl")),
    ("Rollout against trainer", "KL at the sampled tokens; near 0 where they agree",
     ("rollout_corr/kl", "rollout_corr/k3_kl")),
    ("Correlation of rollout and trainer", "of token probabilities; near 1 where they agree",
     ("training/rollout_actor_probs_pearson_corr",)),
    ("Response length", "tokens", ("response_length/mean", "response_length/max")),
    ("Best of k samples", "expected largest score of k samples of a prompt", ("health/best@",)),
    ("Validation", "", ("val-core/", "val/loss")),
    ("Learning rate", "", ("actor/lr", "train/lr")),
    ("Throughput", "tokens per second and rank", ("perf/throughput",)),
    ("Memory", "GiB, the most of a rank so far", ("perf/max_memory_",)),
)
TRENDS = {
    "critic/score/mean": "reward", "train/loss": "loss", "val/loss": "validation loss",
    "rollout_corr/kl": "KL of rollout and trainer", "perf/throughput": "tokens per second and rank",
}  # fmt: skip
COUNTERS = {
    "training/dropped_samples": "dropped samples", "actor/nonfinite_steps": "non-finite steps",
    "train/skipped_steps": "skipped steps",
}  # fmt: skip


@dataclass
class HealthRow:
    """A line of the table of health checks: the last value, and the steps at which it was beyond its limits, if any.

    `advice` says what that means and what to do.
    """

    name: str
    last: str
    limits: str
    broken: str
    advice: str


def collect_series(rows: list[dict]) -> dict[str, Curve]:
    """Metric name -> (steps, values); a step logged twice (after a resume) keeps its last value."""
    by_name: dict[str, dict[int, float]] = defaultdict(dict)
    for row in rows:
        for name, value in row["data"].items():
            if isinstance(value, int | float):
                by_name[name][int(row["step"])] = float(value)
    ordered = {name: sorted(points.items()) for name, points in by_name.items()}
    return {name: Curve(name, [s for s, _ in points], [v for _, v in points]) for name, points in ordered.items()}


def _matching(series: dict[str, Curve], wanted: tuple[str, ...]) -> list[Curve]:
    """The curves of these metrics; a name that ends in "/", "_" or "@" is the beginning of several."""
    exact = {w for w in wanted if not w.endswith(("/", "_", "@"))}
    families = tuple(w for w in wanted if w.endswith(("/", "_", "@")))
    return [c for name, c in series.items() if name in exact or name.startswith(families)]


def _headlines() -> Headlines:
    return (*(headline for recipe in metrics_of_recipes() for headline in recipe.headlines), *HEADLINES)


def headline_panels(series: dict[str, Curve]) -> list[Panel]:
    """The headlines of recipes and of HEADLINES that this run has data for, and the stacked timings."""
    panels = []
    for title, note, wanted in _headlines():
        if curves := _matching(series, wanted):
            panels.append(Panel(title, note, draw_panel(curves)))
    timings = [c for n, c in series.items() if n.startswith("timing_s/") and n.count("/") == 1 and n != "timing_s/step"]
    timings = [Curve(c.name, c.steps, [v if math.isfinite(v) else 0.0 for v in c.values]) for c in timings]
    if timings:
        least = sum(sum(c.values) for c in timings) / 100
        timings = sorted((c for c in timings if sum(c.values) >= least), key=lambda c: -sum(c.values))
        note = "stacked, one step; phases of at least 1 %"
        panels.append(Panel("Seconds per phase", note, draw_panel(timings[:8], stacked=True)))
    return panels


def other_panels(series: dict[str, Curve]) -> tuple[list[Panel], list[tuple[str, str]]]:
    """Panels of all other metrics, siblings (`a/b/x`, `a/b/y`) in one; and (name, note) of those that are not drawn:
    a constant curve, or one equal to a curve already drawn."""
    headlines = {c.name: c for _, _, wanted in _headlines() for c in _matching(series, wanted)}
    drawn = {(tuple(c.steps), tuple(c.values)): c.name for c in headlines.values()}
    siblings: dict[str, list[Curve]] = defaultdict(list)
    flat = []
    for name, curve in sorted(series.items()):
        if name in headlines or name.startswith("timing_s/"):
            continue
        same = drawn.setdefault((tuple(curve.steps), tuple(curve.values)), name)
        if len(curve.steps) > 1 and len(set(curve.values)) == 1:
            flat.append((name, f"{curve.values[0]:g} at every step"))
        elif same != name:
            flat.append((name, f"equal to {same}"))
        else:
            siblings[name.rsplit("/", 1)[0] if name.count("/") > 1 else name].append(curve)
    panels = []
    for parent, curves in siblings.items():
        panels.append(Panel(parent if len(curves) > 1 else curves[0].name, "", draw_panel(curves)))
    return panels, flat


def health_rows(series: dict[str, Curve]) -> list[HealthRow]:
    """The health checks that the run has values for, those that were broken first."""
    rows = []
    for rule in RULES:
        if curve := series.get(rule.metric):
            stretches = rule.broken_steps(curve.steps, curve.values)
            steps = ", ".join(str(first) if first == last else f"{first}-{last}" for first, last in stretches)
            name, advice = rule.metric.removeprefix("health/").replace("_", " "), f"{rule.meaning}. {rule.remedy}"
            rows.append(HealthRow(name, f"{curve.values[-1]:.3g}", rule.limits, steps, advice))
    return sorted(rows, key=lambda row: not row.broken)


def summary_cards(series: dict[str, Curve], steps: int, planned: int | None = None) -> list[tuple[str, str]]:
    """(label, value) pairs at the top of the page: steps, first and last reward, sums of dropped and failed items."""
    cards = [("steps", str(steps))] if planned is None else [("steps, finished of planned", f"{steps} of {planned}")]
    trends, counters = dict(TRENDS), dict(COUNTERS)
    for recipe in metrics_of_recipes():
        trends |= recipe.trends
        counters |= recipe.counters
    for name, label in trends.items():
        if name in series:
            values = series[name].values
            k = max(1, len(values) // 10)
            first, last = sum(values[:k]) / k, sum(values[-k:]) / k
            cards.append((f"{label}, first and last {'tenth' if k > 1 else 'step'}", f"{first:.3g} → {last:.3g}"))
    if "timing_s/step" in series:
        cards.append(("seconds in steps", f"{sum(series['timing_s/step'].values):.0f}"))
    cards += [(label, f"{sum(series[name].values):.0f}") for name, label in counters.items() if name in series]
    return cards


def write_report(run_dir: str | os.PathLike, title: str | None = None) -> Path:
    """Write RUN_DIR/report.html and return its path.

    Shows the PNG pictures in RUN_DIR as well. Raises FileNotFoundError when it has no metrics.jsonl.
    """
    run_dir = Path(run_dir)
    metrics_file = run_dir / "metrics.jsonl"
    if not metrics_file.exists():
        raise FileNotFoundError(f"{run_dir} holds no metrics.jsonl: name a run's folder (trainer.default_local_dir)")
    rows = _read(metrics_file)
    series = collect_series(rows)
    steps = max((int(r["step"]) for r in rows), default=0)
    starts = list_starts(_read(run_dir / "starts.jsonl"))
    config_file, versions_file = run_dir / "run_config.yaml", run_dir / "versions.json"
    others, flat = other_panels(series)
    wide, narrow = async_panels(run_dir)
    env = jinja2.Environment(autoescape=True, undefined=jinja2.StrictUndefined, trim_blocks=True, lstrip_blocks=True,
                             finalize=_shown)  # fmt: skip
    page = env.from_string(TEMPLATE.read_text()).render(
        title=title or run_dir.resolve().name,
        made=datetime.now().strftime("%Y-%m-%d %H:%M:%S"),
        cards=summary_cards(series, steps, starts[-1]["total_steps"] if starts else None) + idle_cards(run_dir),
        left_out=[f"{share:.0%} {text} ({metric})." for metric, share, text in left_out(rows)],
        starts=starts,
        health=health_rows(series),
        wide=wide,
        narrow=narrow,
        panels=headline_panels(series),
        others=others,
        flat=flat,
        samples=last_samples(_read(run_dir / "samples.jsonl")),
        pictures=[
            (picture.stem.capitalize(), base64.b64encode(picture.read_bytes()).decode())
            for picture in sorted(run_dir.glob("*.png"))
        ],
        config=config_file.read_text() if config_file.exists() else "",
        versions=json.loads(versions_file.read_text()) if versions_file.exists() else {},
    )
    out = run_dir / "report.html"
    replace_text(out, page)
    return out


def _read(path: Path) -> list[dict]:
    """The rows of a file; none if it does not exist."""
    return [_drawable(row) for _, row in read_objects(path, growing=True)]


def _drawable(value: Any) -> Any:
    """A value of JSON with NaN in place of numbers whose differences or sums would overflow."""
    if isinstance(value, dict):
        return {name: _drawable(entry) for name, entry in value.items()}
    if isinstance(value, list):
        return [_drawable(entry) for entry in value]
    return math.nan if isinstance(value, int | float) and abs(value) > LARGEST else value


def _shown(value: Any) -> Any:
    return visible(value) if isinstance(value, str) and not isinstance(value, Markup) else value


def list_starts(rows: list[dict]) -> list[dict]:
    """Each start of a run with its end: `step` and `total_steps` at the start, `end` in words.

    A start without a row of its end was killed, unless it is the last one, which may still be running.
    """
    starts = [row for row in rows if "config" in row]
    ends = {row["start"]: row for row in rows if "ended" in row}
    for row in starts:
        if end := ends.get(row["start"]):
            row["end"] = f"{end['time'].replace('T', ' ')}, {end['ended']} after step {end['step']}"
        else:
            row["end"] = "running, or killed" if row is starts[-1] else "killed"
    return starts


def last_samples(samples: list[dict], limit: int = 18) -> list[dict]:
    """The newest samples, best first within a step; at most `limit`. `notes` is the text of their extras."""
    order = {"best": 0, "worst": 1, "random": 2}
    newest = sorted(samples[-limit:], key=lambda s: (-s["step"], order[s["kind"]]))
    return [{**sample, "notes": _notes(sample["extras"])} for sample in newest]


def _notes(extras: dict[str, float | str | None]) -> list[str]:
    """`name value` of each extra; of the flags of recipes, the names of those that are set."""
    notes, flags = [], tuple(flag for recipe in metrics_of_recipes() for flag in recipe.flags)
    for name, value in extras.items():
        if name.startswith(flags):
            notes += [name.replace("_", " ")] if value else []
        elif name != "score" and value is not None:
            notes.append(f"{name} {value:.4g}" if isinstance(value, int | float) else f"{name} {value}")
    return notes
