"""Measure speculative decoding with a scorer against the rules that need no training, on held-out questions.

    python scripts/eval_spd_scorer.py --target DIR --draft DIR --scorer DIR --questions test.jsonl \
        --val-questions val.jsonl --harm-labels labels.jsonl --out DIR [--untrained DIR] [--all-rules]

Real multi-round decoding until the end token or the limit. Writes evaluation.json, evaluation.png and validation.json
(the runs on the validation questions that chose the scorer's threshold).
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
from pathlib import Path

import torch
import transformers
from rich import box
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.table import Table
from transformers import AutoModelForCausalLM, AutoTokenizer

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from scripts.spd_evaluation import (  # noqa: E402
    harm,
    measures,
    rules,  # noqa: E402
)
from scripts.spd_evaluation.measures import EvaluationRow  # noqa: E402
from scripts.spd_evaluation.plot import save_plot  # noqa: E402
from spd_scorer import AutoModelForSPDScoring, ScoringModelConfig, resolve_sep_token_id  # noqa: E402
from verl.workers.rollout.spd.answers import is_correct  # noqa: E402
from verl.workers.rollout.spd.decode import Judge, SpecResult, end_ids, greedy_generate, speculative_generate  # noqa: E402

TYPICAL = ((0.09, 0.3), (0.06, 0.2), (0.045, 0.15), (0.03, 0.1), (0.015, 0.05))
TABLE_WIDTH = 112  # a pipe counts as 80 columns wide, which would cut the figures off
console = Console()


class Bench:
    """Target, draft and the answer check, with one progress bar over all runs."""

    def __init__(self, args: argparse.Namespace, progress: Progress):
        self.args = args
        self.progress = progress
        self.tokenizer = AutoTokenizer.from_pretrained(args.target)
        self.target = load_model(args.target, args.device)
        self.draft = load_model(args.draft, args.device)
        ends = self.target.generation_config.eos_token_id  # chat models have several
        self.eos = self.tokenizer.eos_token_id if ends is None else ends

    def decode(self, questions: Sequence[dict], judge: Judge, name: str) -> SpecResult:
        """Speculative decoding of all questions under one judge."""
        task = self.progress.add_task(name, total=len(questions))
        result = speculative_generate(
            self.target, self.draft, [q["prompt_ids"] for q in questions], judge, gamma=self.args.gamma,
            max_new_tokens=self.args.max_new_tokens, eos_token_id=self.eos, batch_size=self.args.batch_size,
            # Chunks come in order, so the questions behind the last one seen are done but for the rows still here.
            on_block=lambda block, _: self.progress.update(task, completed=int(block.rows.max()) + 1 - len(block.rows)),
        )
        self.progress.update(task, completed=len(questions))
        return result

    def greedy(self, questions: Sequence[dict]) -> SpecResult:
        """The target alone."""
        task = self.progress.add_task("target alone", total=len(questions))
        result = greedy_generate(
            self.target, [q["prompt_ids"] for q in questions], max_new_tokens=self.args.max_new_tokens,
            eos_token_id=self.eos, batch_size=self.args.batch_size,
        )
        self.progress.update(task, completed=len(questions))
        return result

    def is_right(self, question: dict, tokens: Sequence[int]) -> bool:
        """Whether the text of an answer gives the question's ground truth."""
        text = self.tokenizer.decode(list(tokens), skip_special_tokens=True)
        return is_correct(text, question["ground_truth"])

    def correct(self, questions: Sequence[dict], result: SpecResult) -> list[bool]:
        """One entry a question; an answer cut at the limit is wrong."""
        answers = zip(questions, result.tokens, result.finished, strict=True)
        return [finished and self.is_right(question, tokens) for question, tokens, finished in answers]


class Split:
    """The runs on one set of questions; the target's own answers and exact match come first, as the reference."""

    def __init__(self, bench: Bench, questions: Sequence[dict]):
        self.bench = bench
        self.questions = questions
        self.rows: list[EvaluationRow] = []
        self.judged: list[tuple[EvaluationRow, Judge]] = []
        greedy = bench.greedy(questions)
        exact = bench.decode(questions, rules.exact(), "exact match")
        differing = sum(a != b for a, b in zip(exact.tokens, greedy.tokens, strict=True))
        if differing:
            # Equal in exact arithmetic; a tie of two logits can fall differently in another batch shape.
            console.print(f"[yellow]exact match differs from the target's own text in {differing} answers[/yellow]")
        self.target_tokens = sum(len(tokens) for tokens in greedy.tokens)
        self.exact_correct = bench.correct(questions, exact)
        self._file("target", None, greedy)
        self.judged.append((self._file("exact", None, exact), rules.exact()))

    def run(self, rule: str, threshold: float | None, judge: Judge, label: str | None = None) -> SpecResult:
        """Decode all questions under a judge and file the row."""
        name = label if label is not None else rule if threshold is None else f"{rule} {threshold:.3g}"
        result = self.bench.decode(self.questions, judge, name)
        self.judged.append((self._file(rule, threshold, result), judge))
        return result

    def _file(self, rule: str, threshold: float | None, result: SpecResult) -> EvaluationRow:
        row = measures.measure(
            rule, threshold, result, self.bench.correct(self.questions, result), exact_correct=self.exact_correct,
            target_tokens=self.target_tokens,
        )
        self.rows.append(row)
        return row

    def fill_harm(self, blocks: Sequence[harm.LabelledBlock]) -> None:
        """Judge the labelled blocks by every rule that ran."""
        shares = harm.harm_shares([judge for _, judge in self.judged], self.bench.target, self.bench.draft, blocks)
        for (row, _), (harmless, harmful) in zip(self.judged, shares, strict=True):
            row.harmless_accepted, row.harmful_accepted = harmless, harmful


def load_model(directory: str, device: str) -> torch.nn.Module:
    """A causal model in float32, or in its own type on a GPU."""
    dtype = torch.float32 if device == "cpu" else "auto"
    return AutoModelForCausalLM.from_pretrained(directory, dtype=dtype).to(device).eval()


def load_questions(path: Path, limit: int | None) -> list[dict]:
    """Lines with question_id, prompt_ids and ground_truth; the first `limit` of them."""
    questions = []
    for number, line in enumerate(path.read_text().splitlines(), 1):
        question = json.loads(line)
        missing = {"question_id", "prompt_ids", "ground_truth"} - set(question)
        if missing:
            raise ValueError(f"{path}, line {number}: no {sorted(missing)}; found {sorted(question)}")
        questions.append(question)
    return questions[:limit]


def evaluate(args: argparse.Namespace, progress: Progress) -> tuple[list[EvaluationRow], list[EvaluationRow], int]:
    """All runs: (rows of the test questions, rows of the validation questions, number of test questions)."""
    bench = Bench(args, progress)
    test = load_questions(args.questions, args.limit)
    validation = load_questions(args.val_questions, args.val_limit)
    both = {q["question_id"] for q in test} & {q["question_id"] for q in validation}
    if both:
        raise ValueError(f"{len(both)} questions stand in both splits, for example {min(both)!r}; split by question")
    blocks = harm.read_labels(args.harm_labels)
    trained, untrained = load_scorers(args, bench.target)

    def scored(model: torch.nn.Module) -> Callable[[float], Judge]:
        pad = bench.tokenizer.pad_token_id
        sep = resolve_sep_token_id(bench.tokenizer)
        ends = end_ids(bench.eos)
        return lambda z: rules.scorer(model, z, sep_token_id=sep, pad_token_id=pad, end_ids=ends)

    chooser = Split(bench, validation)
    for z in args.scorer_thresholds:
        chooser.run("scorer_sweep", z, scored(trained)(z), f"validation, scorer {z:g}")
    sweep = [row for row in chooser.rows if row.rule == "scorer_sweep"]
    chosen = measures.choose_threshold(sweep, args.max_val_drop).threshold

    split = Split(bench, test)
    split.run("all", None, rules.accept_all())
    share = measures.accepted_share(split.run("scorer", chosen, scored(trained)(chosen)))
    split.run("random", share, rules.random_share(share, args.seed))
    split.run("scorer_untrained", 0.0, scored(untrained)(0.0))
    for threshold in args.margins:
        split.run("margin", threshold, rules.margin(threshold))
    for z in args.scorer_thresholds:
        if z != chosen:  # that one is the row `scorer`
            split.run("scorer_sweep", z, scored(trained)(z))
    if args.all_rules:
        for eps, delta in TYPICAL:
            split.run("typical", eps, rules.typical(eps, delta))
        for threshold in args.divergences:
            split.run("divergence", threshold, rules.divergence(threshold))
            split.run("divergence_strict", threshold, rules.divergence(threshold, strict=True))
    split.fill_harm(blocks)
    return split.rows, chooser.rows, len(test)


def load_scorers(args: argparse.Namespace, target: torch.nn.Module) -> tuple[torch.nn.Module, torch.nn.Module]:
    """The trained scorer, and an untrained one: of its own directory, or of the same config from the seed.

    A `target` head shares the loaded target; an `own` scorer brings its backbone along.
    """

    def shared(config: ScoringModelConfig) -> torch.nn.Module | None:
        return target if config.backbone == "target" else None

    def load(directory: str) -> torch.nn.Module:
        config = ScoringModelConfig.load(Path(directory))
        return AutoModelForSPDScoring.from_pretrained(directory, base_model=shared(config))

    trained = load(args.scorer)
    if args.untrained is not None:
        untrained = load(args.untrained)
    else:
        config = replace(trained.config, seed=args.seed)
        untrained = AutoModelForSPDScoring.from_config(config, base_model=shared(config))
    return trained.to(args.device).eval(), untrained.to(args.device).eval()


def show(rows: Sequence[EvaluationRow], questions: int) -> Table:
    """The rows as a table; accuracies and drops in points of a hundred."""
    table = Table(title=f"{questions} held-out questions; drop against exact match, paired, in points",
                  box=box.SIMPLE_HEAD, padding=(0, 1), pad_edge=False)
    for name in ("rule", "thr.", "accuracy %", "drop", "acc.", "tok.", "length", "cut %", "harmless", "harmful", "s"):
        table.add_column(name, justify="left" if name == "rule" else "right", no_wrap=True)

    def percent(share: float | None) -> str:
        return "" if share is None else f"{100 * share:.0f} %"

    for row in rows:
        table.add_row(
            row.rule, "" if row.threshold is None else f"{row.threshold:.3g}",
            f"{100 * row.accuracy:.1f} ±{100 * row.accuracy_se:.1f}", f"{100 * row.drop:.1f} ±{100 * row.drop_se:.1f}",
            f"{row.accepted_per_forward:.2f}", f"{row.tokens_per_forward:.2f}", f"{row.output_length_ratio:.2f}",
            f"{100 * row.not_terminated:.1f}",
            percent(row.harmless_accepted), percent(row.harmful_accepted), f"{row.seconds:.1f}",
            style="bold green" if row.rule == "scorer" else None,
        )
    table.caption = "acc., tok.: accepted draft tokens, all tokens per target forward; harmless, harmful: share passed"
    return table


def summary(rows: Sequence[EvaluationRow]) -> list[str]:
    """What the scorer gained, in sentences."""
    one = {row.rule: row for row in rows if row.rule in ("exact", "scorer", "random")}
    scorer, exact = one["scorer"], one["exact"]
    low, high = (100 * (scorer.drop + sign * 1.96 * scorer.drop_se) for sign in (-1, 1))
    lines = [
        f"scorer: {scorer.accepted_per_forward:.2f} draft tokens a target forward, "
        f"{scorer.accepted_per_forward / max(exact.accepted_per_forward, 1e-9):.2f} times exact match's; "
        f"accuracy drop {100 * scorer.drop:.1f} points (95 % interval {low:.1f} to {high:.1f})",
        f"scorer against the random share: {100 * (scorer.accuracy - one['random'].accuracy):+.1f} points",
    ]
    curve = [row for row in rows if row.rule in ("margin", "exact", "all")]
    at = measures.accuracy_on_curve(curve, scorer.accepted_per_forward)
    if at is not None:
        lines.append(f"scorer against the margin rule at the same speed: {100 * (scorer.accuracy - at):+.1f} points")
    return lines


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--target", required=True, help="Hugging Face directory of the target model, with its tokenizer")
    add("--draft", required=True, help="directory of the draft model (same vocabulary)")
    add("--scorer", required=True, help="directory of the trained scorer")
    add("--untrained", help="directory of an untrained scorer; left out: the same config, drawn from --seed")
    add("--questions", type=Path, required=True, help="jsonl: question_id, prompt_ids, ground_truth")
    add("--val-questions", type=Path, required=True, help="the questions that choose the scorer's threshold")
    add("--harm-labels", type=Path, required=True, help="jsonl: one labelled mismatch a line (spd_evaluation/harm.py)")
    add("--out", type=Path, required=True, help="folder of evaluation.json and evaluation.png")
    add("--limit", type=int, help="only the first N held-out questions")
    add("--val-limit", type=int, help="only the first N validation questions")
    add("--gamma", type=int, default=8, help="drafted tokens a round")
    add("--max-new-tokens", type=int, default=128, help="an answer cut there counts as wrong")
    add("--batch-size", type=int, default=256)
    add("--scorer-thresholds", type=float, nargs="+", default=[-4.0, -2.0, 0.0, 1.0, 2.0, 3.0, 4.0, 6.0])
    add("--margins", type=float, nargs="+", default=[0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])
    add("--divergences", type=float, nargs="+", default=[1.0, 2.0, 3.0, 6.0])
    add("--max-val-drop", type=float, default=0.005, help="the fastest threshold within this validation drop wins")
    add("--all-rules", action="store_true", help="sweep typical acceptance and divergence as well")
    add("--seed", type=int, default=0)
    add("--threads", type=int, default=os.cpu_count(), help="CPU threads")
    add("--device", default="cpu", help="cpu or cuda")
    return parser.parse_args(argv)


def main(argv: Sequence[str] | None = None) -> list[EvaluationRow]:
    args = parse(argv)
    torch.set_num_threads(args.threads)
    transformers.logging.set_verbosity_error()  # a target loaded without its output layer is no news
    transformers.logging.disable_progress_bar()
    args.out.mkdir(parents=True, exist_ok=True)
    columns = (TextColumn("  {task.description:<28}"), BarColumn(), TimeElapsedColumn(), TimeRemainingColumn())
    with Progress(*columns, console=console) as progress, torch.no_grad():
        rows, validation, questions = evaluate(args, progress)
    record = {"questions": questions, "rows": [asdict(row) for row in rows]}
    (args.out / "evaluation.json").write_text(json.dumps(record, indent=1) + "\n")
    chosen = next(row.threshold for row in rows if row.rule == "scorer")
    choice = {"rule": f"fastest with a drop of at most {args.max_val_drop}, else least drop", "chosen": chosen,
              "rows": [asdict(row) for row in validation]}
    (args.out / "validation.json").write_text(json.dumps(choice, indent=1) + "\n")
    save_plot(rows, questions, args.out / "evaluation.png")
    wide = Console(width=max(console.width, TABLE_WIDTH))
    wide.print(show(rows, questions))
    for line in summary(rows):
        wide.print(line)
    return rows


if __name__ == "__main__":
    main()
