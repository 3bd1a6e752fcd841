"""The options around the SPD reward, each trained over several seeds and judged on the validation questions.

    python -m examples.spd_arithmetic.options [--seeds 0 1 2] [--options default gain ...] [--testbed DIR] [--out DIR]

Wants a test bed (`make demo` makes it). All trainings share one store of completions, and two run at a time; what is
trained already is reused. Ends with a table of means over seeds and OUT/options.json; the test questions are not used.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from rich.console import Console
from rich.table import Table
from transformers import AutoModelForCausalLM, AutoTokenizer

from examples.spd_arithmetic.demo import LIMIT, ROOT, STEPS, PhaseFailed, run_logged
from scripts.spd_evaluation import measures, rules
from spd_scorer import AutoModelForSPDScoring
from verl.workers.rollout.spd.answers import is_correct
from verl.workers.rollout.spd.decode import Judge, speculative_generate

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
    testbed, run = args.testbed, args.out / f"{option}-seed{seed}"
    command = [sys.executable, "train_spd_scorer.py", "--model", str(testbed / "target"), "--output-dir", str(run)]
    command += ["--blocks", str(testbed / "blocks_train.parquet")]
    command += ["--metadata", str(testbed / "metadata_train.parquet")]
    command += ["--store", str(args.out / "completions.sqlite3"), "--steps", str(args.steps), "--seed", str(seed)]
    command += ["--device", "cpu", "--epochs", "1000", "--max-tokens", str(LIMIT), "--save-freq", str(args.steps)]
    command += ["trainer.logger=[file]", "trainer.val_before_train=false", "trainer.report=false"]
    command += [setting.format(testbed=testbed) for setting in OPTIONS[option]]
    scorer = run / f"global_step_{args.steps}" / "actor" / "huggingface"
    if not scorer.exists():
        run_logged(command, args.out / f"{option}-seed{seed}.log")
        console.print(f"trained {option}, seed {seed}")
    return scorer


class Judged:
    """Decodes the validation questions under a rule, and compares with exact match on the same questions."""

    def __init__(self, testbed: Path):
        lines = (testbed / "questions_val.jsonl").read_text().splitlines()
        self.questions = [json.loads(line) for line in lines]
        self.tokenizer = AutoTokenizer.from_pretrained(testbed / "target")
        self.target = AutoModelForCausalLM.from_pretrained(testbed / "target").eval()
        self.draft = AutoModelForCausalLM.from_pretrained(testbed / "draft").eval()
        self.exact = self._decode(rules.exact())
        self.target_tokens = sum(len(tokens) for tokens in self.exact[0].tokens)  # exact match is the target's own text

    def _decode(self, judge: Judge) -> tuple:
        result = speculative_generate(
            self.target, self.draft, [q["prompt_ids"] for q in self.questions], judge, max_new_tokens=LIMIT,
            eos_token_id=self.tokenizer.eos_token_id,
        )
        texts = [self.tokenizer.decode(ids, skip_special_tokens=True) for ids in result.tokens]
        correct = [ended and is_correct(text, q["ground_truth"])
                   for ended, text, q in zip(result.finished, texts, self.questions, strict=True)]
        return result, correct

    def row(self, scorer: Path) -> measures.EvaluationRow:
        """What the scorer does at z > 0."""
        model = AutoModelForSPDScoring.from_pretrained(scorer, base_model=self.target).eval()
        result, correct = self._decode(rules.head_scorer(model, 0.0))
        return measures.measure("scorer", 0.0, result, correct, exact_correct=self.exact[1],
                                target_tokens=self.target_tokens)


def summarize(rows: Sequence[measures.EvaluationRow]) -> dict[str, float]:
    """Mean of each column over seeds, and half the range between the seeds."""
    found = {}
    for name in COLUMNS:
        values = [getattr(row, name) for row in rows]
        found |= {name: sum(values) / len(values), f"{name}_spread": (max(values) - min(values)) / 2}
    return found


def show(found: dict[str, dict[str, float]]) -> Table:
    """The comparison as people read it."""
    title = "z > 0 on validation questions; means and half ranges over seeds"
    table = Table("option", "accuracy %", "drop, points", "accepted", "length", title=title)
    for option, row in found.items():
        cells = [f"{100 * row[n]:.1f} ±{100 * row[n + '_spread']:.1f}" for n in COLUMNS[:2]]
        cells += [f"{row[n]:.2f} ±{row[n + '_spread']:.2f}" for n in COLUMNS[2:]]
        table.add_row(option, *cells)
    return table


def main(argv: list[str] | None = None) -> int:
    """Train and judge everything; gives the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--options", nargs="+", choices=OPTIONS, default=list(OPTIONS))
    parser.add_argument("--steps", type=int, default=STEPS["target"])
    parser.add_argument("--testbed", type=Path, default=ROOT / "outputs" / "spd_arithmetic" / "testbed")
    parser.add_argument("--out", type=Path, default=ROOT / "outputs" / "spd_options")
    args = parser.parse_args(argv)
    args.testbed, args.out = args.testbed.resolve(), args.out.resolve()
    if not (args.testbed / "testbed.json").exists():
        parser.error(f"--testbed {args.testbed} holds no test bed; make demo makes one")
    args.out.mkdir(parents=True, exist_ok=True)
    jobs = [(option, seed) for seed in args.seeds for option in args.options]
    try:
        with ThreadPoolExecutor(2) as pool:
            scorers = dict(zip(jobs, pool.map(lambda job: train(args, *job), jobs), strict=True))
    except PhaseFailed as failure:
        console.print(f"[red]{failure}[/red]")
        return 1
    judged = Judged(args.testbed)
    found = {o: summarize([judged.row(scorers[o, seed]) for seed in args.seeds]) for o in args.options}
    console.print(show(found))
    (args.out / "options.json").write_text(json.dumps({"seeds": args.seeds, "options": found}, indent=1))
    return 0


if __name__ == "__main__":
    sys.exit(main())
