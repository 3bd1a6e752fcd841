"""The frontier: every rule and the scorer, swept, over several seeds of target, draft and scorer.

    python -m examples.spd_arithmetic.frontier [--seeds 0 1 2] [--softness 0 0.2] [--questions 1000] [--out DIR]
                                               [--kept DIR]

Each seed is a test bed, a training and an evaluation of its own below OUT; what is there already is reused. Ends with
a table and a picture for each softness, and OUT/frontier.json. With --kept, rows of whole seeds are written to a
folder, and those that are there already are not measured again: the measurement can be spread over machines.
"""

import argparse
import itertools
import json
import math
import shutil
import sys
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from examples.demo_runner import ROOT, PhaseFailed, run_logged
from examples.spd_arithmetic.demo import LIMIT, STEPS, saved_scorer, training_command
from scripts.spd_evaluation.measures import EvaluationRow
from scripts.spd_evaluation.plot import CURVES, save_plot

# Where drops are 0 to 4 points, closer together than there.
MARGINS = ("2", "2.5", "3", "3.5", "4", "5", "8")
SCORER_THRESHOLDS = ("-2", "-1", "0", "0.5", "1", "1.5", "2", "3")
DROPS = tuple(i / 1000 for i in range(0, 31, 5))  # shares: 0 to 3 points
SCORER = "trained scorer, swept"
NEAR, WANTED = 0.005, 1.3  # at this drop so many times the best rule's accepted tokens
console = Console()


def commands(args: argparse.Namespace, seed: int, softness: float, out: Path) -> dict[str, list[str]]:
    """Test bed, training and evaluation of one seed."""
    python, testbed, run = sys.executable, out / "testbed", out / "run"
    make = [python, "-m", "examples.spd_arithmetic.make_testbed", "--out", str(testbed), "--seed", str(seed)]
    make += ["--softness", str(softness), "--n-test-questions", str(args.questions), "--max-new-tokens", str(LIMIT)]
    make += ["--n-train-questions", str(args.train_questions), "--n-train-blocks", str(args.blocks)]
    train = training_command(testbed, run, out / "completions.sqlite3", args.steps, seed)
    evaluate = [python, "scripts/eval_spd_scorer.py", "--out", str(out), "--all-rules", "--seed", str(seed)]
    evaluate += ["--target", str(testbed / "target"), "--draft", str(testbed / "draft")]
    evaluate += ["--scorer", str(saved_scorer(run, args.steps))]
    evaluate += ["--questions", str(testbed / "questions_test.jsonl")]
    evaluate += ["--val-questions", str(testbed / "questions_val.jsonl"), "--max-new-tokens", str(LIMIT)]
    evaluate += ["--harm-labels", str(testbed / "harm_labels.jsonl")]
    evaluate += ["--scorer-thresholds", *SCORER_THRESHOLDS, "--margins", *MARGINS]
    return {"test bed": make, "training": train, "evaluation": evaluate}


def one_seed(args: argparse.Namespace, seed: int, softness: float) -> list[EvaluationRow]:
    """The rows of one seed, made here or by an earlier run with the same commands."""
    out = args.out / f"u{softness:g}-seed{seed}"
    kept = args.kept and args.kept / f"{out.name}.json"
    if kept and kept.exists():
        console.print(f"u = {softness:g}, seed {seed}: {kept}")
        return _rows(kept)
    planned = commands(args, seed, softness, out)
    record, evaluation = out / "commands.json", out / "evaluation.json"
    if not (evaluation.exists() and record.exists() and json.loads(record.read_text()) == planned):
        for name, command in planned.items():
            with console.status(f"u = {softness:g}, seed {seed}: {name}"):
                run_logged(command, out / f"{name.replace(' ', '_')}.log")
        record.write_text(json.dumps(planned, indent=1))
    console.print(f"u = {softness:g}, seed {seed}: {evaluation}")
    if kept:
        args.kept.mkdir(parents=True, exist_ok=True)
        shutil.copy(evaluation, kept)
    return _rows(evaluation)


def _rows(evaluation: Path) -> list[EvaluationRow]:
    return [EvaluationRow(**row) for row in json.loads(evaluation.read_text())["rows"]]


def pool(seeds: Sequence[Sequence[EvaluationRow]]) -> list[EvaluationRow]:
    """Mean over seeds of every rule and threshold that all of them ran; errors of independent means.

    The threshold that validation chose differs between seeds, so the row `scorer` counts as one of its sweep.
    """
    tables = []
    for rows in seeds:
        renamed = [replace(row, rule="scorer_sweep" if row.rule == "scorer" else row.rule) for row in rows]
        tables.append({(row.rule, None if row.rule == "random" else row.threshold): row for row in renamed})
    pooled = []
    for key in tables[0]:
        same = [table[key] for table in tables if key in table]
        if len(same) < len(tables):
            continue
        values = {name: _mean([getattr(row, name) for row in same]) for name in asdict(same[0]) if name != "rule"}
        for name in ("accuracy_se", "drop_se"):
            values[name] = math.sqrt(sum(getattr(row, name) ** 2 for row in same)) / len(same)
        pooled.append(EvaluationRow(rule=key[0], **values))
    return pooled


def _mean(values: Sequence[float | None]) -> float | None:
    return None if any(v is None for v in values) else sum(values) / len(values)


def speed_at(curve: Sequence[EvaluationRow], drop: float) -> tuple[float, float]:
    """Most accepted tokens a forward of a swept rule at a drop of at most `drop`, and the standard error of the paired
    drop there (the larger one of the two that are mixed); (-inf, nan) where it has none.

    A rule may flip a coin between two of its thresholds for each question: that gives the straight line between them.
    """
    points = [(row.accepted_per_forward, row.drop_se) for row in curve if row.drop <= drop]
    for low, high in itertools.permutations(curve, 2):
        if low.drop < drop < high.drop:
            part = (drop - low.drop) / (high.drop - low.drop)
            speed = low.accepted_per_forward + part * (high.accepted_per_forward - low.accepted_per_forward)
            points.append((speed, max(low.drop_se, high.drop_se)))
    return max(points, default=(-math.inf, math.nan))


def compare(rows: Sequence[EvaluationRow]) -> list[dict[str, Any]]:
    """For each drop: the scorer's speed, and the best training-free rule with its own; errors are of the drop."""
    exact = [row for row in rows if row.rule == "exact"]
    curves = {legend: exact + [row for row in rows if row.rule in rules] for rules, legend, *_ in CURVES}
    comparison = []
    for drop in DROPS:
        speeds = {legend: speed_at(curve, drop) for legend, curve in curves.items()}
        rule = max((legend for legend in speeds if legend != SCORER), key=lambda legend: speeds[legend])
        (scorer, scorer_se), (best, best_se) = speeds[SCORER], speeds[rule]
        comparison.append({"drop": drop, "scorer": scorer, "scorer_drop_se": scorer_se, "best_rule": rule, "rule": best,
                      "rule_drop_se": best_se, "ratio": scorer / best})
    return comparison


def show(comparison: Sequence[dict[str, Any]], title: str) -> Table:
    """The comparison as people read it."""
    table = Table("drop, points", "scorer", "its drop, 95 %", "best rule", "its drop, 95 %", "", "ratio", title=title)
    for row in comparison:
        spans = [_interval(row["drop"], row[f"{who}_drop_se"]) for who in ("scorer", "rule")]
        table.add_row(f"{100 * row['drop']:.1f}", f"{row['scorer']:.2f}", spans[0], f"{row['rule']:.2f}", spans[1],
                      str(row["best_rule"]), f"{row['ratio']:.2f}")
    return table


def _interval(drop: float, error: float) -> str:
    """Up to `drop`, with the 95 % interval around it, in points."""
    return f"{100 * (drop - 1.96 * error):+.1f} to {100 * (drop + 1.96 * error):+.1f}"


def verdicts(comparison: Sequence[dict[str, Any]]) -> list[str]:
    """What the scorer is to show, and whether it does."""
    (near,) = (row["ratio"] for row in comparison if row["drop"] == NEAR)
    worst = min(comparison, key=lambda row: row["ratio"])
    return [
        f"{_met(near >= WANTED)}: at a drop of {100 * NEAR:g} points {near:.2f} times the best rule; {WANTED:g} wanted",
        f"{_met(worst['ratio'] >= 1.0)}: nowhere fewer than the best rule; least {worst['ratio']:.2f} times, at a drop "
        f"of {100 * worst['drop']:.1f} points ({worst['best_rule']})",
    ]


def _met(wanted: bool) -> str:
    return "met" if wanted else "missed"


def main(argv: list[str] | None = None) -> int:
    """Run all seeds; gives the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--softness", type=float, nargs="+", default=[0.0, 0.2])
    parser.add_argument("--questions", type=int, default=1000, help="held-out questions of each seed")
    parser.add_argument("--train-questions", type=int, default=1000)
    parser.add_argument("--blocks", type=int, default=5000, help="blocks a scorer is trained on")
    parser.add_argument("--steps", type=int, default=STEPS)
    parser.add_argument("--out", type=Path, default=ROOT / "outputs" / "spd_frontier")
    parser.add_argument("--kept", type=Path, help="folder of measured seeds, read and added to")
    args = parser.parse_args(argv)
    args.out = args.out.resolve()
    result = {}
    for softness in args.softness:
        try:
            rows = pool([one_seed(args, seed, softness) for seed in args.seeds])
        except PhaseFailed as failure:
            console.print(f"[red]{failure}[/red]")
            return 1
        comparison = compare(rows)
        questions = args.questions * len(args.seeds)
        title = f"Accepted draft tokens per target forward, u = {softness:g}, {questions} questions"
        console.print(show(comparison, title))
        for line in verdicts(comparison):
            console.print(line)
        picture = args.out / f"frontier-u{softness:g}.png"
        save_plot(rows, questions, picture)
        console.print(f"picture {picture}")
        result[f"u={softness:g}"] = {
            "questions": questions, "seeds": args.seeds, "comparison": comparison, "verdicts": verdicts(comparison),
            "rows": [asdict(row) for row in rows],
        }  # fmt: skip
    (args.out / "frontier.json").write_text(json.dumps(result, indent=1))
    return 0


if __name__ == "__main__":
    sys.exit(main())
