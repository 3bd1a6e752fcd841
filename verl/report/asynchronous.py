"""Pictures of an asynchronous run: when each side worked, how old samples were, how often they were interrupted."""

from collections import Counter, defaultdict
from pathlib import Path
from typing import Any

from verl.report.plots import COLOURS, Panel, svg_figure
from verl.utils.jsonl import read_objects

TIMELINE_FILE, JOURNAL_FILE = "async_timeline.jsonl", "async_journal.jsonl"
WORK = {"train": COLOURS[0], "generate": COLOURS[2], "sync": COLOURS[1], "idle": "#d9dee7"}
SYNCS_DRAWN = 12  # of the end of a run; more would be too narrow to see
STEPS_NAMED = 40  # more numbers would overlap
WIDE_IN = 12.0


def async_panels(run_dir: Path) -> tuple[list[Panel], list[Panel]]:
    """(wide pictures, narrow ones) of what the folder has files of; none for a synchronous run."""
    spans = [row for _, row in read_objects(run_dir / TIMELINE_FILE, growing=True)]
    wide = [_timeline(spans)] if spans else []
    ages, versions = sample_counts([row for _, row in read_objects(run_dir / JOURNAL_FILE, growing=True)])
    narrow = []
    if ages:
        what = "trained samples by the updates between the weights of their oldest token and the trained ones"
        narrow.append(Panel("Staleness", what, _histogram(ages, "updates behind")))
    if versions:
        what = "finished samples by the weight syncs at which they were interrupted"
        narrow.append(Panel("Partial generations", what, _histogram(versions, "interruptions")))
    return wide, narrow


def idle_cards(run_dir: Path) -> list[tuple[str, str]]:
    """(label, value): the shares of the run's time in which trainer and servers were idle."""
    seconds: dict[str, Counter[str]] = defaultdict(Counter)
    for _, span in read_objects(run_dir / TIMELINE_FILE, growing=True):
        seconds["trainer" if span["who"] == "trainer" else "servers"][span["what"]] += span["end"] - span["start"]
    return [
        (f"{side} idle", f"{spent['idle'] / spent.total():.0%}")
        for side in ("trainer", "servers")
        if (spent := seconds[side]).total() > 0
    ]


def sample_counts(rows: list[dict[str, Any]]) -> tuple[Counter[int], Counter[int]]:
    """(trained samples by age in updates, finished samples by interruptions) of the rows of a journal.

    A trained sample's row has the step that trained it, whose weights had step - 1 updates, and as `version` that of
    its oldest token.
    """
    ages, interruptions = Counter(), Counter()
    interrupted: Counter[str] = Counter()
    for row in rows:
        if row.get("state") == "interrupted":
            interrupted[row["sample"]] += 1
        elif row.get("state") == "finished":
            interruptions[interrupted.pop(row["sample"], 0)] += 1
        elif row.get("state") == "trained":
            ages[row["step"] - 1 - row["version"]] += 1
    return ages, interruptions


def _timeline(spans: list[dict[str, Any]]) -> Panel:
    """A line for each side, coloured by what it did, from the last SYNCS_DRAWN syncs on."""
    syncs = sorted(span["start"] for span in spans if span["who"] == "trainer" and span["what"] == "sync")
    first = syncs[-SYNCS_DRAWN] if len(syncs) >= SYNCS_DRAWN else min(span["start"] for span in spans)
    shown = [span for span in spans if span["end"] > first]
    shown = [span | {"start": max(0, span["start"] - first), "end": span["end"] - first} for span in shown]
    order = sorted({span["who"] for span in shown}, key=lambda who: (who != "trainer", len(who), who))

    def draw(figure: Any) -> None:
        from matplotlib.patches import Patch

        axes = figure.add_subplot()
        for line, who in enumerate(order):
            for what, colour in WORK.items():
                work = [span for span in shown if span["who"] == who and span["what"] == what]
                bars = [(span["start"], span["end"] - span["start"]) for span in work]
                axes.broken_barh(bars, (line - 0.4, 0.8), facecolors=colour, linewidth=0)
        times: dict[int, list[float]] = defaultdict(list)  # of a step, whose spans may be cut into parts
        for span in shown:
            if span["who"] == "trainer" and span["what"] == "train":
                times[span["version"] + 1] += [span["start"], span["end"]]
        for step, ends in times.items() if len(times) <= STEPS_NAMED else ():
            middle = (min(ends) + max(ends)) / 2
            axes.text(middle, order.index("trainer"), str(step), ha="center", va="center", color="white")
        axes.set_yticks(range(len(order)), [who.replace("_", " ") for who in order])
        axes.set_ylim(len(order) - 0.5, -0.5)
        axes.set_xlim(0, max(span["end"] for span in spans) - first)
        axes.set_xlabel("seconds")
        axes.spines[["top", "right", "left"]].set_visible(False)
        axes.tick_params(left=False)
        patches = [Patch(color=colour, label=what) for what, colour in WORK.items()]
        axes.legend(handles=patches, ncols=len(patches), frameon=False, loc="lower right", bbox_to_anchor=(1, 1))

    part = f"the last {SYNCS_DRAWN} weight syncs" if len(syncs) > SYNCS_DRAWN else "the run"
    note = f"{part}; the numbers are those of the steps"
    return Panel("Timeline", note, svg_figure(draw, WIDE_IN, 0.9 + 0.35 * len(order)))


def _histogram(counts: Counter[int], label: str) -> str:
    """Bars over whole numbers from 0 to the largest one, with the share of each."""

    def draw(figure: Any) -> None:
        from matplotlib.ticker import MaxNLocator, PercentFormatter

        axes = figure.add_subplot()
        numbers = range(min(0, *counts), max(counts) + 1)
        axes.bar(numbers, [counts[number] / counts.total() for number in numbers], color=COLOURS[0], width=0.8)
        axes.yaxis.set_major_formatter(PercentFormatter(1.0, decimals=0))
        axes.xaxis.set_major_locator(MaxNLocator(integer=True))
        axes.set_xlabel(label)
        axes.spines[["top", "right"]].set_visible(False)

    return svg_figure(draw)
