"""The options around the SPD reward, each trained over several seeds and judged on the validation questions.

    python -m examples.spd_arithmetic.options [--seeds 0 1 2] [--options default gain ...] [--testbed DIR] [--out DIR]

Wants a test bed (`make demo` makes it). All trainings share one store of completions, and two run at a time; what is
trained already is reused. Ends with a table of means over seeds and OUT/options.json; the test questions are not used.
"""

import argparse
import json
import sys
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from multiprocessing import Value
from pathlib import Path

from rich.console import Console
from rich.table import Table

from examples.demo_runner import ROOT, PhaseFailed, run_logged
from examples.spd_arithmetic.demo import LIMIT, STEPS, saved_scorer, training_command
from scripts.eval_spd_scorer import load_questions, parse
from scripts.spd_evaluation import measures
from scripts.spd_evaluation.pool import Job, Run
from scripts.spd_evaluation.worker import Worker

OPTIONS = {
    "default": [],
    "gain": ["spd.reward.length=gain"],
    "mask": ["spd.reward.zero_length=mask"],
    "length_penalty": ["spd.reward.length_penalty=1.0"],
    "rounds": ["spd.rollout.rounds=2", "spd.rollout.draft_path={testbed}/draft"],
}
COLUMNS = ("accuracy", "drop", "accepted_per_forward", "output_length_ratio")
console = Console()


def train(args: argparse.Namespace, option: str, seed: int) -> Path:
    """The scorer of one option and seed, trained here or by an earlier run."""
    testbed, run = args.testbed, args.runs / f"{option}-seed{seed}"
    command = training_command(testbed, run, args.runs / "completions.sqlite3", args.steps, seed)
    command += ["trainer.report=false", *(setting.format(testbed=testbed) for setting in OPTIONS[option])]
    scorer = saved_scorer(run, args.steps)
    if not scorer.exists():
        run_logged(command, args.runs / f"{option}-seed{seed}.log")
        console.print(f"trained {option}, seed {seed}")
    return scorer


def judge(testbed: Path, scorers: Mapping[tuple[str, int], Path]) -> dict[tuple[str, int], measures.EvaluationRow]:
    """Decode the validation questions with each scorer at z > 0; drops are against exact match."""
    options = ["--target", str(testbed / "target"), "--draft", str(testbed / "draft"), "--max-new-tokens", str(LIMIT)]
    for name in ("--questions", "--val-questions"):
        options += [name, str(testbed / "questions_val.jsonl")]
    options += ["--harm-labels", str(testbed / "harm_labels.jsonl"), "--out", str(testbed)]
    exact, rows = None, {}
    for job, scorer in scorers.items():
        args = parse([*options, "--scorer", str(scorer)])
        worker = Worker(Job(args, {"val": load_questions(args.questions, None)}, [], []), Value("q", 0))
        exact = exact or worker.decode(Run("val", "exact", 0.0))
        outcome = worker.decode(Run("val", "scorer", 0.0))
        rows[job] = measures.measure(
            "scorer", 0.0, outcome.result, outcome.correct, exact_correct=exact.correct,
            target_tokens=sum(len(tokens) for tokens in exact.result.tokens),  # exact match is the target's own text
        )  # fmt: skip
    return rows


def summarize(rows: Sequence[measures.EvaluationRow]) -> dict[str, float]:
    """Mean of each column over seeds, and half the range between the seeds."""
    results = {}
    for name in COLUMNS:
        values = [getattr(row, name) for row in rows]
        results |= {name: sum(values) / len(values), f"{name}_spread": (max(values) - min(values)) / 2}
    return results


def show(results: dict[str, dict[str, float]]) -> Table:
    """The comparison as people read it."""
    title = "z > 0 on validation questions; means and half ranges over seeds"
    table = Table("option", "accuracy %", "drop, points", "accepted", "length", title=title)
    for option, row in results.items():
        cells = [f"{100 * row[n]:.1f} ±{100 * row[n + '_spread']:.1f}" for n in COLUMNS[:2]]
        cells += [f"{row[n]:.2f} ±{row[n + '_spread']:.2f}" for n in COLUMNS[2:]]
        table.add_row(option, *cells)
    return table


def main(argv: list[str] | None = None) -> int:
    """Train and judge everything; gives the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--options", nargs="+", choices=OPTIONS, default=list(OPTIONS))
    parser.add_argument("--steps", type=int, default=STEPS)
    parser.add_argument("--testbed", type=Path, default=ROOT / "outputs" / "spd_arithmetic" / "testbed")
    parser.add_argument("--out", type=Path, default=ROOT / "outputs" / "spd_options")
    args = parser.parse_args(argv)
    args.testbed, args.out = args.testbed.resolve(), args.out.resolve()
    if not (args.testbed / "testbed.json").exists():
        parser.error(f"--testbed {args.testbed} holds no test bed; make demo makes one")
    fingerprint = json.loads((args.testbed / "testbed.json").read_text())["fingerprint"]
    args.runs = args.out / fingerprint[:12]  # scorers of another test bed are not reused
    args.runs.mkdir(parents=True, exist_ok=True)
    jobs = [(option, seed) for seed in args.seeds for option in args.options]
    try:
        with ThreadPoolExecutor(2) as pool:
            scorers = dict(zip(jobs, pool.map(lambda job: train(args, *job), jobs), strict=True))
    except PhaseFailed as failure:
        console.print(f"[red]{failure}[/red]")
        return 1
    rows = judge(args.testbed, scorers)
    results = {o: summarize([rows[o, seed] for seed in args.seeds]) for o in args.options}
    console.print(show(results))
    (args.out / "options.json").write_text(json.dumps({"seeds": args.seeds, "options": results}, indent=1))
    return 0


if __name__ == "__main__":
    sys.exit(main())
