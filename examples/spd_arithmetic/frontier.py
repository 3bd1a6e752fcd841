"""The frontier: every rule and the scorers, swept, over several seeds of target, draft and scorer.

    python -m examples.spd_arithmetic.frontier [--seeds 0 1 2 3 4] [--questions 1000] [--out DIR] [--kept DIR]

Each seed is a test bed, three trainings (GRPO, supervised with as many completions, GRPO from the supervised scorer)
and an evaluation of its own below OUT; what is there already is reused. Thresholds are chosen on validation questions,
all figures are of test questions. Ends with a table, a picture, OUT/frontier.json, and the figures over seeds in
OUT/spd_seeds.json, or the file of --results. With --kept, rows of whole seeds go to a folder as well, and those that
are there already from the same commands are not measured again: the measurement can be spread over machines.
"""

import argparse
import itertools
import json
import math
import shutil
import statistics
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from examples.demo_runner import ROOT, PhaseFailed, out_folder, python, run_logged
from examples.spd_arithmetic.demo import DTYPE, LIMIT, STEPS, saved_scorer, training_command
from examples.spd_arithmetic.train_pair import DEFAULTS
from scripts.spd_evaluation.curves import best_mix, curves_of, fewest, mixed, point_of, speed
from scripts.spd_evaluation.measures import EvaluationRow
from scripts.spd_evaluation.plot import CURVES, save_plot
from verl.utils.fs import output_file, output_folder

# Thresholds of the rules without training: few, but from almost no drop to 4 points, since each costs 1,600 answers.
FREE_RULES = {"--margins": "4 6 7 8", "--typicals": "0.015 0.001 0.0003", "--ranks": "2 3", "--entropies": "0.1 0.6",
              "--divergences": "1 3"}  # fmt: skip
HARMLESS_SHARES = ("0.9", "0.8", "0.7", "0.6", "0.5", "0.4", "0.3", "0.2")  # accepted above a threshold
DROPS = tuple(i / 1000 for i in range(0, 31, 5))  # shares: 0 to 3 points
SCORERS = ("scorer", "supervised", "refined")  # GRPO, cross-entropy on labels, GRPO from there
TRAINED = tuple(legend for name in SCORERS for rules, legend, *_ in CURVES if name in rules)
NAME = f"u{DEFAULTS['softness']:g}"  # of what belongs to this softness
MAX_VAL_DROP = "0.015"  # the upper end of an interval that is a point wide: about one point on other questions
NEAR, WANTED = 0.005, 1.3  # at this drop so many times the best rule's accepted tokens
T_95 = (12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262)  # Student's t at 97.5 %, 2 seeds and more
console = Console()


@dataclass(frozen=True)
class Seed:
    """What one seed measured."""

    test: list[EvaluationRow]
    validation: list[EvaluationRow]


def commands(questions: int, seed: int, out: Path) -> dict[str, list[str]]:
    """Test bed, trainings and evaluation of one seed; the supervised one gets its budget when GRPO's is known."""
    testbed, run = out / "testbed", out / "run"
    # written out: commands are compared with those of before
    settings = [word for name, value in DEFAULTS.items() for word in (f"--{name.replace('_', '-')}", value)]
    make = python("examples.spd_arithmetic.prepare_blocks", "--out", testbed, "--seed", seed, *settings,
                  "--n-test-questions", questions, "--max-new-tokens", LIMIT, "--dtype", DTYPE,
                  "--n-train-questions", 1000, "--n-train-blocks", 4000)
    store, labelled = out / "completions.sqlite3", out / "labelled"
    trainings = {name: training_command(testbed, place, store, STEPS, seed)
                 for name, place in (("training", run), ("supervised", labelled), ("refined", out / "refined"))}
    trainings["supervised"].insert(2, "--supervised")
    trainings["refined"].append(f"spd.adapter_path={labelled / 'supervised'}")
    evaluate = python(
        "scripts/eval_spd_scorer.py", "--out", out, "--all-rules", "--seed", seed, "--target", testbed / "target",
        "--draft", testbed / "draft", "--dtype", DTYPE, "--scorer", saved_scorer(run, STEPS), "--compare",
        f"supervised={labelled / 'supervised'}", f"refined={saved_scorer(out / 'refined', STEPS)}", "--questions",
        testbed / "questions_test.jsonl", "--val-questions", testbed / "questions_val.jsonl", "--max-new-tokens",
        LIMIT, "--harm-labels", testbed / "harm_labels.jsonl", "--val-harm-labels",
        testbed / "harm_labels_val.jsonl", "--harmless-shares", *HARMLESS_SHARES, "--max-val-drop", MAX_VAL_DROP,
    )
    for option, values in FREE_RULES.items():
        evaluate += [option, *values.split()]
    return {"test bed": make, **trainings, "evaluation": evaluate}


def one_seed(args: argparse.Namespace, seed: int) -> Seed:
    """The rows of one seed, made here or by an earlier run with the same commands; every phase is done once."""
    out = args.out / f"{NAME}-seed{seed}"
    kept = args.kept and args.kept / f"{out.name}.json"
    planned, record, measured = commands(args.questions, seed, out), out / "commands.json", out / "measured.json"
    text = json.dumps(planned)
    for folder, name in ((str(out), "OUT"), (sys.executable, "python"), (str(ROOT), ".")):
        text = text.replace(folder, name)
    portable = json.loads(text)  # the commands without this machine's folders
    if kept and kept.exists() and json.loads(kept.read_text()).get("commands") == portable:
        console.print(f"seed {seed}: {kept}")
        return _read(kept)
    done = json.loads(record.read_text()) if record.exists() else {}
    for number, (name, command) in enumerate(planned.items()):
        if list(done.items())[: number + 1] == list(planned.items())[: number + 1]:
            continue  # it and all before it ran with the same commands
        done = dict(list(planned.items())[:number])
        if name == "training":  # the number of its completions is the label budget: those of a killed one count too
            shutil.rmtree(out / "run", ignore_errors=True)
            for file in out.glob("completions.sqlite3*"):
                file.unlink()
        if name == "supervised":
            command = [*command, "--label-budget", str(completions_used(out / "run" / "metrics.jsonl"))]
        with console.status(f"seed {seed}: {name}"):
            run_logged(command, out / f"{name.replace(' ', '_')}.log")
        record.write_text(json.dumps({**done, name: planned[name]}, indent=1))
        done[name] = planned[name]
    rows = {split: json.loads((out / f"{name}.json").read_text()) for split, name in
            (("test", "evaluation"), ("validation", "validation"))}  # fmt: skip
    measured.write_text(json.dumps({"commands": portable, **{split: rows[split]["rows"] for split in rows}}))
    console.print(f"seed {seed}: {measured}")
    if kept:
        args.kept.mkdir(parents=True, exist_ok=True)
        shutil.copy(measured, kept)
    return _read(measured)


def completions_used(metrics: Path) -> int:
    """Distinct completions that a training with an empty store asked for."""
    steps = [json.loads(line)["data"] for line in metrics.read_text().splitlines()]
    return int(sum(step["spd/completions/asked"] for step in steps if "spd/completions/asked" in step))


def _read(file: Path) -> Seed:
    record = json.loads(file.read_text())
    return Seed(*([EvaluationRow(**row) for row in record[split]] for split in ("test", "validation")))


def compare(seeds: Sequence[Seed]) -> list[dict[str, Any]]:
    """Choose thresholds on validation questions, for each allowed drop and curve, and measure them on test questions.

    Values are means over seeds with standard errors. `speed` and `drop` are those of the choice with the most accepted
    tokens per forward; `saved` is exact match's number of target forwards over that of the choice with the fewest.
    """
    tests = [curves_of(seed.test) for seed in seeds]
    validations = [curves_of(seed.validation) for seed in seeds]
    comparison = []
    for drop in DROPS:
        entry: dict[str, Any] = {"allowed": drop, "curves": {}}
        for legend in tests[0]:
            results: dict[str, list[float]] = {"drop": [], "speed": [], "saved": []}
            for test, validation in zip(tests, validations, strict=True):
                fast, lean = (
                    mixed(test[legend][low], test[legend][high], part)
                    for low, high, part in (best_mix(validation[legend], drop, value) for value in (speed, fewest))
                )
                results["drop"].append(fast.drop)
                results["speed"].append(fast.speed)
                results["saved"].append(test[legend][None].forwards / lean.forwards)
            entry["curves"][legend] = {name: mean_and_spread(values) for name, values in results.items()}
        rules = [legend for legend in entry["curves"] if legend not in TRAINED]
        entry["best_rule"] = max(rules, key=lambda legend: entry["curves"][legend]["speed"][0])
        entry["ratio"] = entry["curves"][TRAINED[0]]["speed"][0] / entry["curves"][entry["best_rule"]]["speed"][0]
        comparison.append(entry)
    return comparison


def mean_and_spread(values: Sequence[float]) -> tuple[float, float]:
    """Mean over seeds and its standard error from their differences; no error (nan) of a single seed."""
    error = statistics.stdev(values) / math.sqrt(len(values)) if len(values) > 1 else math.nan
    return statistics.fmean(values), error


def seed_figures(seeds: Sequence[Seed]) -> dict[str, float]:
    """Of each scorer at its validation-chosen threshold on test questions: gain, its accepted draft tokens per forward
    over exact match's, drop in points, tokens per forward, target forwards per question over exact match's. min, mean
    and max are over seeds, sd is between seeds, and ci the half width of the mean's 95 % interval (Student's t), in
    which both seeds and questions vary.
    """
    figures = {}
    for rule in SCORERS:
        prefix = "seed" if rule == "scorer" else rule
        by_rule = [{row.rule: row for row in seed.test} for seed in seeds]
        gains = [rows[rule].accepted_per_forward / rows["exact"].accepted_per_forward for rows in by_rule]
        drops = [100 * rows[rule].drop for rows in by_rule]
        tokens = [rows[rule].tokens_per_forward for rows in by_rule]
        forwards = [rows[rule].forwards_per_question / rows["exact"].forwards_per_question for rows in by_rule]
        figures |= {f"{prefix}_gain_min": min(gains), f"{prefix}_gain_mean": statistics.fmean(gains),
                    f"{prefix}_drop_mean": statistics.fmean(drops), f"{prefix}_drop_max": max(drops),
                    f"{prefix}_tokens_per_forward_mean": statistics.fmean(tokens),
                    f"{prefix}_forwards_mean": statistics.fmean(forwards)}  # fmt: skip
        if len(seeds) > 1:
            for name, values in (("gain", gains), ("drop", drops)):
                spread = statistics.stdev(values)
                width = T_95[min(len(seeds), len(T_95) + 1) - 2] * spread / math.sqrt(len(seeds))
                figures |= {f"{prefix}_{name}_sd": spread, f"{prefix}_{name}_ci": width}
    return figures


def pool(seeds: Sequence[Sequence[EvaluationRow]]) -> list[EvaluationRow]:
    """Mean over seeds of every rule and threshold, with errors between seeds, for the picture.

    Scorers' thresholds differ between seeds: those in the same place of their sweep belong together.
    """
    tables = []
    for rows in seeds:
        renamed = [replace(row, rule=f"{row.rule}_sweep" if row.rule in SCORERS else row.rule) for row in rows]
        swept = sorted(renamed, key=lambda row: (row.rule, row.threshold is not None, row.threshold))
        groups = [list(group) for _, group in itertools.groupby(swept, lambda row: row.rule)]
        tables.append({(row.rule, place): row for group in groups for place, row in enumerate(group)})
    pooled = []
    for key in tables[0]:
        same = [table[key] for table in tables if key in table]
        if len(same) < len(tables):
            continue
        values = {name: _mean([getattr(row, name) for row in same]) for name in asdict(same[0]) if name != "rule"}
        if len(same) > 1:
            for name in ("accuracy", "drop"):
                values[f"{name}_se"] = mean_and_spread([getattr(row, name) for row in same])[1]
        points = [point_of(row) for row in same]
        values["accepted_per_forward"] = sum(p.accepted for p in points) / sum(p.forwards for p in points)
        pooled.append(EvaluationRow(rule=key[0], **values))
    return pooled


def _mean(values: Sequence[float | None]) -> float | None:
    return None if any(v is None for v in values) else sum(values) / len(values)


def show(comparison: Sequence[dict[str, Any]], title: str) -> Table:
    """The comparison as people read it."""
    names = [legend for legend in comparison[0]["curves"] if legend in TRAINED]
    table = Table("allowed drop", *names, "best rule", "ratio", title=title)
    for entry in comparison:
        cells = [_cell(entry["curves"][legend]) for legend in names]
        best = entry["best_rule"]
        table.add_row(
            f"{100 * entry['allowed']:.1f}", *cells, f"{best}: {_cell(entry['curves'][best])}", f"{entry['ratio']:.2f}"
        )
    table.caption = "accepted per forward ± (exact match's forwards over its own), drop on test questions ± in points"
    return table


def _cell(values: dict[str, tuple[float, float]]) -> str:
    (drop, drop_se), (fast, fast_se), (saved, _) = (values[name] for name in ("drop", "speed", "saved"))
    errors = ("", "") if math.isnan(fast_se) else (f" ±{fast_se:.2f}", f" ±{100 * drop_se:.1f}")
    return f"{fast:.2f}{errors[0]} ({saved:.2f}), {100 * drop:.1f}{errors[1]}"


def verdicts(comparison: Sequence[dict[str, Any]]) -> list[str]:
    """What the scorer is to show, and whether it does."""
    (near,) = (entry["ratio"] for entry in comparison if entry["allowed"] == NEAR)
    worst = min(comparison, key=lambda entry: entry["ratio"])
    return [
        f"{_met(near >= WANTED)}: at a drop of {100 * NEAR:g} points {near:.2f} times the best rule; {WANTED:g} wanted",
        f"{_met(worst['ratio'] >= 1.0)}: nowhere fewer than the best rule; least {worst['ratio']:.2f} times, at a drop "
        f"of {100 * worst['allowed']:.1f} points ({worst['best_rule']})",
    ]


def _met(wanted: bool) -> str:
    return "met" if wanted else "missed"


def main(argv: list[str] | None = None) -> int:
    """Run all seeds; gives the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2, 3, 4])
    parser.add_argument("--questions", type=int, default=1000, help="held-out questions of each seed")
    parser.add_argument("--out", type=out_folder, default=str(ROOT / "outputs" / "spd_frontier"))
    parser.add_argument("--kept", type=output_folder, help="folder of measured seeds, read and added to")
    parser.add_argument("--results", type=output_file, help="figures over seeds (default OUT/spd_seeds.json)")
    args = parser.parse_args(argv)
    try:
        seeds = [one_seed(args, seed) for seed in args.seeds]
    except PhaseFailed as failure:
        console.print(f"[red]{failure}[/red]")
        return 1
    comparison, rows = compare(seeds), pool([seed.test for seed in seeds])
    console.print(show(comparison, f"{len(seeds)} seeds of {args.questions} test questions"))
    for line in verdicts(comparison):
        console.print(line)
    picture = args.out / f"frontier-{NAME}.png"
    save_plot(rows, args.questions * len(seeds), picture)
    console.print(f"picture {picture}")
    softness = DEFAULTS["softness"]
    figures = {"softness": softness, "seeds": args.seeds, "questions": args.questions, **seed_figures(seeds)}
    console.print_json(json.dumps(figures))
    everything = {**figures, "comparison": comparison, "verdicts": verdicts(comparison),
                  "rows": [asdict(row) for row in rows]}  # fmt: skip
    (args.out / "frontier.json").write_text(json.dumps({f"u={softness:g}": everything}, indent=1))
    (args.results or args.out / "spd_seeds.json").write_text(json.dumps(figures, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
