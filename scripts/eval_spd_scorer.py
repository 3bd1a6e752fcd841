"""Measure speculative decoding with a scorer against the rules that need no training, on held-out questions.

    python scripts/eval_spd_scorer.py --target DIR --draft DIR --scorer DIR --questions test.jsonl \
        --val-questions val.jsonl --harm-labels labels.jsonl --out DIR [--untrained DIR] [--all-rules]

Real multi-round decoding until the end token or the limit. Writes evaluation.json, evaluation.png and validation.json
(the runs on the validation questions that chose the scorer's threshold), and by_question.json (each run on each
question). A stopped command continues where it was; with --parts, evaluations on one pair decode each rule once.
"""

import argparse
import functools
import hashlib
import json
import os
import re
import shutil
import sys
from collections.abc import Collection, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path

from rich import box
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.table import Table
from transformers import AutoConfig

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from recipe.spd.scorer.config import ScoringModelConfig  # noqa: E402
from scripts.spd_evaluation import harm, measures, rules  # noqa: E402
from scripts.spd_evaluation.curves import best_mix, curves_of, speed, speed_at  # noqa: E402
from scripts.spd_evaluation.measures import EvaluationRow, Labelled  # noqa: E402
from scripts.spd_evaluation.plot import curves_in, save_plot  # noqa: E402
from scripts.spd_evaluation.pool import Harm, Job, Pool, Run, Scores, Task, visible_gpus  # noqa: E402
from verl.data.fingerprint import model_dir_fingerprint, model_folder  # noqa: E402
from verl.planning.checks import load_model_part  # noqa: E402
from verl.utils.accelerator import default_dtype  # noqa: E402
from verl.utils.fs import output_folder  # noqa: E402
from verl.utils.jsonl import read_objects  # noqa: E402

FIXED_RULES = (
    "target", "exact", "all", "random", "scorer", "scorer_untrained", "margin", "typical", "top_rank", "rank_margin",
    "deferred", "entropy", "words", "divergence", "divergence_strict", "ngram",
)  # fmt: skip
FINISHED = "finished_runs"  # in --out: what an evaluation that was stopped has computed
NGRAM = 3  # most tokens of the n-grams whose continuation is drafted, of the row `ngram`
SWEPT = {"margin": "margins", "typical": "typicals"}  # rule: option of its thresholds
MORE_SWEPT = {"top_rank": "ranks", "rank_margin": "margins", "deferred": "entropies", "entropy": "entropies",
              "divergence": "divergences", "divergence_strict": "divergences"}  # with --all-rules  # fmt: skip
# Thresholds of rules and scorers without labels, from which they would be chosen.
UNLABELLED = {"margins": [0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0], "typicals": [0.09, 0.06, 0.045, 0.03, 0.015],
              "ranks": [2, 3, 5], "entropies": [0.01, 0.1, 0.3, 0.6], "divergences": [1.0, 2.0, 3.0, 6.0],
              "scorer_thresholds": [-1.0, 0.0, 0.5, 1.0, 2.0]}  # fmt: skip
SHARES = [k / 20 for k in range(1, 20)]  # of the harmless mismatches that a threshold accepts
TRIED = 3  # thresholds of each rule and scorer, of those that accept SHARES
RIVALS = 3  # number of rules that --near-drop decodes of those whose thresholds labels choose
Areas = dict[str, dict[str, float | None]]  # split -> scorer or statistic -> area
TABLE_WIDTH = 118  # a pipe counts as 80 columns wide, too narrow for the table
console = Console()


def load_questions(path: Path, limit: int | None) -> list[dict]:
    """Lines with question_id, prompt_ids and ground_truth; the first `limit` of them."""
    questions = []
    for number, question in read_objects(path):
        missing = {"question_id", "prompt_ids", "ground_truth"} - set(question)
        if missing:
            raise ValueError(f"{path}, line {number}: lacks {sorted(missing)}; it has {sorted(question)}")
        questions.append(question)
    return questions[:limit]


def load_job(args: argparse.Namespace) -> Job:
    """The questions of both splits, which may not share one, and the labelled blocks."""
    test = load_questions(args.questions, args.limit)
    validation = load_questions(args.val_questions, args.val_limit)
    both = {q["question_id"] for q in test} & {q["question_id"] for q in validation}
    if both:
        raise ValueError(f"{len(both)} questions are in both splits, for example {min(both)!r}; split by question")
    labels = harm.read_labels(args.val_harm_labels) if args.val_harm_labels else []
    if not labels and (args.harmless_shares or args.val_harm_labels and not args.scorer_thresholds):
        raise ValueError(f"--val-harm-labels {args.val_harm_labels} gives no labels: name a file that has some, "
                         "or give --scorer-thresholds and no --harmless-shares")  # fmt: skip
    return Job(args, {"validation": validation, "test": test}, harm.read_labels(args.harm_labels), labels)


def evaluate(
    args: argparse.Namespace, progress: Progress
) -> tuple[list[EvaluationRow], list[EvaluationRow], int, dict[str, tuple[float, float]], Areas]:
    """All runs: (rows of the test questions, rows of the validation questions, number of test questions, for each
    scorer the drop at its threshold and half of the width of the drop's 95 % interval, the areas under the ROC curve of
    the scorers and of what the rules compare, on the labelled mismatches of each split that has any).

    Test runs of all thresholds run next to the validation runs, which alone choose the threshold of each scorer. With
    --near-drop they follow, for the chosen thresholds and those that `runs_near` gives. Writes by_question.json.
    """
    job = load_job(args)
    split_runs = {split: [Run(split, "target"), Run(split, "exact")] for split in ("validation", "test")}
    kept = args.parts or args.out / FINISHED
    if kept.exists():
        console.print(f"continues with the {len(list(kept.iterdir()))} finished parts in {kept}")
    with Pool(job, args.processes, progress, functools.partial(part_file, kept, fingerprint(args), args)) as pool:
        wanted = args.all_rules or args.harmless_shares or not (args.margins and args.typicals)
        scores, test_scores = scores_of(job, "validation", wanted), scores_of(job, "test", args.all_rules)
        pool.submit([*scores, *split_runs["validation"], *split_runs["test"]])
        labelled = {name: blocks for task in scores for name, blocks in pool.result(task).items()}
        known = {name: measures.harmless_share_and_auc(blocks) for name, blocks in labelled.items()}
        if known:
            named = ", ".join(f"{name} {area:.2f}" for name, (_, area) in known.items() if area is not None)
            console.print(f"labelled validation mismatches: {100 * known['scorer'][0]:.0f} % are harmless; area under "
                          f"the ROC curve: {named}", soft_wrap=True, highlight=False)  # fmt: skip
            exact, best = measures.accepted_without_error(job.validation)
            console.print(f"of their blocks exact match accepts {exact:.2f} draft tokens, a judge without error "
                          f"{best:.2f}", soft_wrap=True, highlight=False)  # fmt: skip
        swept = thresholds_of(args, pool, labelled, known)
        free = rules_without_training(args, swept)
        swept = {name: swept[name] for name in args.scorers}
        sweeps = {split: {name: [Run(split, name, z) for z in swept[name]] for name in swept} for split in split_runs}
        scorers_of = {split: [run for runs in by_name.values() for run in runs] for split, by_name in sweeps.items()}
        validation = [*split_runs["validation"], *scorers_of["validation"]]
        if args.all_rules:
            validation += [Run("validation", rule, threshold) for rule, threshold in free]
        test = split_runs["test"]
        rivals = [Run("test", rule, threshold) for rule, threshold in free]
        if args.near_drop is None:
            test = [*test, Run("test", "all")]
            rivals = [Run("test", "scorer_untrained", 0.0), *rivals]
        harms = [Harm((*test[1:], *scorers_of["test"], *rivals))]
        pool.submit([*validation, *test])
        if args.near_drop is None:
            pool.submit([*scorers_of["test"], *harms, *rivals])
        chooser = make_rows(pool, validation)
        chosen, estimates = [], {}
        for name, runs in sweeps["validation"].items():
            mine = [(row, run) for row, run in zip(chooser, validation, strict=True) if run in runs]
            rows = [row for row, _ in mine]
            drops = None
            if labelled:
                results = [pool.result(run).result for _, run in mine]
                counts = [(len(r.tokens), sum(r.judged_mismatches)) for r in results]  # of answers
                drops = [measures.pooled_drop(row, *count, labelled[name])
                         for row, count in zip(rows, counts, strict=True)]
            best = measures.choose_threshold(rows, args.max_val_drop, drops)
            chosen.append(Run("test", name, best.threshold))
            drop, error, *of_labels = drops[rows.index(best)] if drops else (best.drop, best.drop_se)
            estimates[name] = drop, 1.96 * error
            upper = drop + 1.96 * error
            if upper > args.max_val_drop:
                asked = len(job.questions["validation"])
                needed = measures.questions_needed(drop, error, args.max_val_drop, asked, *of_labels)
                advice = f"about {needed} validation questions would make it narrow enough; there are {asked}"
                if needed is None:
                    advice = "this drop itself is not below the limit, so a narrower interval does not help"
                console.print(f"[yellow]{name}: no threshold keeps the drop on validation questions within "
                              f"--max-val-drop {args.max_val_drop:g} at the end of its 95 % interval; "
                              f"{best.threshold:.3g} has the lowest, {100 * upper:.1f} points; the drop is "
                              f"{100 * drop:.1f} ± {100 * error:.1f}"
                              f"{', estimated from answers and labelled mismatches' if drops else ''}: "
                              f"{advice}[/yellow]")

        if args.near_drop is not None:
            near = [*chosen, *runs_near(chooser, args.near_drop, args.scorers)]
            scorers_of["test"] = [run for run in scorers_of["test"] if run in near]
            rivals = [run for run in rivals if run in near]
            harms = [Harm((*test[1:], *scorers_of["test"], *rivals))]
            pool.submit([*scorers_of["test"], *harms, *rivals])
        others = [run for run in scorers_of["test"] if run not in chosen]
        runs = [*test, *chosen, *rivals, *others]
        if args.near_drop is None:
            chance = Run("test", "random", measures.accepted_share(pool.result(chosen[0]).result))
            harms.append(Harm((chance,)))
            pool.submit([chance, harms[1]])
            runs.insert(len(test) + len(chosen), chance)
        rows = make_rows(pool, runs, chosen)
        write_by_question(pool, {"validation": (validation, chooser), "test": (runs, rows)})
        pool.submit(test_scores)
        tested = {name: measures.harmless_share_and_auc(blocks)
                  for task in test_scores for name, blocks in pool.result(task).items()}  # fmt: skip
        areas = {split: {name: area for name, (_, area) in of_split.items() if args.all_rules or name in args.scorers}
                 for split, of_split in (("validation", known), ("test", tested)) if of_split}  # fmt: skip
        shares = {run: share for harm in harms for run, share in zip(harm.runs, pool.result(harm), strict=True)}
    for run, row in zip(runs, rows, strict=True):
        row.harmless_accepted, row.harmful_accepted = shares.get(run, (None, None))  # the target alone judges nothing
    if args.all_rules and not args.temperature:
        own, exact = (pool.result(run) for run in runs[:2])
        prompts = [question["prompt_ids"] for question in job.questions["test"]]
        drafted = measures.ngram_drafts(prompts, own.result, args.gamma, NGRAM, args.target_first)
        rows.append(measures.measure("ngram", NGRAM, drafted, own.correct, exact_correct=exact.correct,
                                     target_tokens=sum(map(len, own.result.tokens))))
        rows[-1].seconds = None
    return rows, chooser, len(job.questions["test"]), estimates, areas


def scores_of(job: Job, split: str, rules_too: object) -> list[Scores]:
    """The tasks that score a split's labelled mismatches by the scorers and, if `rules_too`, by what the rules compare.

    Without labels none, else two: with --parts, evaluations of other scorers share the second.
    """
    names = (tuple(job.args.scorers), (*rules.STATISTICS, "deferred"))[: 1 + bool(rules_too)]
    return [Scores(some, split) for some in names if job.labelled(split)]


def runs_near(rows: Sequence[EvaluationRow], drop: float, scorers: Collection[str]) -> list[Run]:
    """Runs on test questions of the rule and of the scorer that accept the most at this drop on validation questions.

    Of each, the two thresholds between which a coin for each question does so; `rows`: of validation questions.
    """
    rules_of = {legend: names for names, legend, *_ in curves_in(row.rule for row in rows)}
    curves, near = curves_of(rows), []
    for trained in (False, True):
        legends = (legend for legend in curves if (rules_of[legend][0] in scorers) == trained)
        best = max(legends, key=lambda legend: speed_at(curves[legend], drop))
        *thresholds, _ = best_mix(curves[best], drop, speed)
        near += [Run("test", row.rule.removesuffix("_sweep"), row.threshold) for row in rows
                 if row.rule in rules_of[best] and row.threshold in thresholds]  # fmt: skip
    return near


def write_by_question(pool: Pool, runs: Mapping[str, tuple[Sequence[Run], Sequence[EvaluationRow]]]) -> None:
    """Write what each run did on each question of its split: right or not, accepted draft tokens, target forwards."""
    record = {
        split: [{"rule": row.rule, "threshold": row.threshold, "correct": outcome.correct,
                 "accepted": outcome.result.accepted, "rounds": outcome.result.rounds}
                for row, outcome in zip(rows, map(pool.result, of_split), strict=True)]
        for split, (of_split, rows) in runs.items()
    }  # fmt: skip
    (pool.job.args.out / "by_question.json").write_text(json.dumps(record) + "\n")


DECODING = ("gamma", "target_first", "temperature", "samples", "max_new_tokens", "batch_size", "seed", "device",
            "dtype")  # fmt: skip
CODE = (*(f"recipe/spd/rollout/{name}.py" for name in ("decoder", "answers", "hybrid")),
        *(f"verl/models/{name}.py" for name in ("kv_cache", "grouped_attention")),
        *(f"recipe/spd/scorer/{name}.py"
          for name in ("cached_scorer", "heads", "masks", "model", "own", "target", "token_tree")),
        *(f"scripts/spd_evaluation/{name}.py" for name in ("rules", "worker", "harm")))  # fmt: skip


def fingerprint(args: argparse.Namespace) -> str:
    """Hash of what all results depend on: the pair of models, questions and labels, how answers are decoded, and the
    code that decodes and judges them."""
    digest = hashlib.sha256(json.dumps([getattr(args, name) for name in DECODING]).encode())
    for name in CODE:
        digest.update((ROOT / name).read_bytes())
    for file in filter(None, (args.questions, args.val_questions, args.harm_labels, args.val_harm_labels)):
        digest.update(file.read_bytes())
    for model in (args.target, args.draft):
        digest.update(model_print(model))
    return digest.hexdigest()


@functools.cache
def model_print(model: str) -> bytes:
    """The fingerprint of a model's folder, or the name where there is no such folder; each is read once."""
    folder = model_folder(str(model))
    return (str(model) if folder is None else model_dir_fingerprint(folder)).encode()


def part_file(folder: Path, common: str, args: argparse.Namespace, part: Task) -> Path:
    """The file of a finished part: named by `common`, the part, and the scorers and files of rules that it uses."""
    digest = hashlib.sha256(f"{common}{part!r}".encode())
    for name in part.rules:
        if name in args.scorers:
            digest.update(model_print(args.scorers[name]))
        elif name in args.rules:
            digest.update(Path(args.rules[name][0]).read_bytes() + args.rules[name][1].encode())
        elif name == "scorer_untrained":
            digest.update(model_print(args.untrained or args.scorer))
    return folder / f"{digest.hexdigest()[:24]}.json"


def thresholds_of(
    args: argparse.Namespace, pool: Pool, labelled: Mapping[str, Labelled],
    known: Mapping[str, tuple[float, float | None]],
) -> dict[str, list[float]]:  # fmt: skip
    """Thresholds of each swept rule and each scorer: those that the command names or whose shares it names; else those
    that `searched` tries of SHARES; without labels UNLABELLED. With --near-drop, of the rules whose thresholds labels
    choose only the RIVALS with the greatest areas on labelled mismatches, the second values of `known`.
    """
    options = SWEPT | (MORE_SWEPT if args.all_rules else {}) | dict.fromkeys(args.scorers, "scorer_thresholds")
    free = [rule for rule, option in options.items() if rule in labelled and not getattr(args, option)]
    if args.near_drop is not None:
        areas = {rule: known[rule][1] or 0.0 for rule in free if rule not in args.scorers}
        for rule in sorted(areas, key=areas.__getitem__)[:-RIVALS]:
            free.remove(rule)
            del options[rule]
    named = {rule: getattr(args, option) or UNLABELLED[option] for rule, option in options.items()}
    spread = {}
    for rule in free:
        values = measures.spread_thresholds(labelled[rule], args.harmless_shares or SHARES)
        spread[rule] = [-value for value in values] if rule in rules.FALLING else values
    drop = args.max_val_drop if args.near_drop is None else args.near_drop
    return named | (spread if args.harmless_shares else searched(pool, spread, drop))


def searched(pool: Pool, spread: Mapping[str, Sequence[float]], drop: float) -> dict[str, list[float]]:
    """The thresholds of each rule that bisection tries for this drop against exact match on validation questions: at
    most TRIED, the strictest first. `spread`: its thresholds, the strictest first.
    """
    ends = {rule: [-1, len(values)] for rule, values in spread.items()}  # within the drop, above it
    tried: dict[str, set[int]] = {rule: set() for rule in spread}
    exact = pool.result(Run("validation", "exact")).correct if spread else []
    for _ in range(TRIED):
        middles = {rule: sum(between) // 2 for rule, between in ends.items() if between[1] - between[0] > 1}
        runs = {rule: Run("validation", rule, spread[rule][middle]) for rule, middle in middles.items()}
        pool.submit(runs.values())
        for rule, run in runs.items():
            lost = sum(exact) - sum(pool.result(run).correct)
            ends[rule][lost > drop * len(exact)] = middles[rule]
            tried[rule].add(middles[rule])
    return {rule: [spread[rule][k] for k in sorted(tried[rule])] for rule in spread}


def rules_without_training(args: argparse.Namespace, swept: Mapping[str, Sequence[float]]) -> list[tuple[str, float]]:
    """(rule, threshold) of every swept rule that needs no training."""
    free = [(rule, threshold) for rule, values in swept.items() if rule not in args.scorers for threshold in values]
    free += [("words", 0.0)] if args.all_rules else []  # without a threshold
    return free + [(name, value) for name, (_, _, values) in args.rules.items() for value in values]


def make_rows(pool: Pool, runs: Sequence[Run], chosen: Sequence[Run] = ()) -> list[EvaluationRow]:
    """The runs on one split as rows; its target and exact match come first, as the reference.

    The chosen run of a scorer keeps its name, its other runs are its `_sweep`.
    """
    scorers = {run.rule for run in chosen} or set(pool.job.args.scorers)
    target, exact = (pool.result(run) for run in runs[:2])
    differing = sum(a != b for a, b in zip(exact.result.tokens, target.result.tokens, strict=True))
    if differing and not pool.job.args.temperature:
        # Equal in exact arithmetic; a tie of two logits can fall differently in another batch shape.
        console.print(f"[yellow]exact match differs from the target's own text in {differing} answers[/yellow]")
    target_tokens = sum(len(tokens) for tokens in target.result.tokens)
    rows = []
    for run in runs:
        outcome = pool.result(run)
        rule = f"{run.rule}_sweep" if run.rule in scorers and run not in chosen else run.rule
        rows.append(measures.measure(rule, run.threshold, outcome.result, outcome.correct,
                                     exact_correct=exact.correct, target_tokens=target_tokens,
                                     samples=pool.job.args.samples))
    return rows


def show(rows: Sequence[EvaluationRow], questions: int) -> Table:
    """The rows as a table; accuracies and drops in points of a hundred."""
    table = Table(title=f"{questions} held-out questions; drop against exact match, paired, in points",
                  box=box.SIMPLE_HEAD, padding=(0, 1), pad_edge=False)
    for name in ("rule", "thr.", "accuracy %", "drop", "accepted", "tokens", "length", "cut %", "harmless", "harmful",
                 "s"):  # fmt: skip
        table.add_column(name, justify="left" if name == "rule" else "right", no_wrap=True)

    def percent(share: float | None) -> str:
        return "" if share is None else f"{100 * share:.0f} %"

    trained = {row.rule.removesuffix("_sweep") for row in rows if row.rule.endswith("_sweep")}
    for row in rows:
        table.add_row(
            row.rule, "" if row.threshold is None else f"{row.threshold:.3g}",
            f"{100 * row.accuracy:.1f} ±{100 * row.accuracy_se:.1f}", f"{100 * row.drop:.1f} ±{100 * row.drop_se:.1f}",
            f"{row.accepted_per_forward:.2f}", f"{row.tokens_per_forward:.2f}", f"{row.output_length_ratio:.2f}",
            f"{100 * row.not_terminated:.1f}", percent(row.harmless_accepted), percent(row.harmful_accepted),
            "" if row.seconds is None else f"{row.seconds:.1f}",
            style="bold green" if row.rule in trained else None,
        )
    table.caption = ("accepted, tokens: draft tokens and all tokens per target forward; length: target = 1; cut: at "
                     "the limit; harmless, harmful: share accepted; s: seconds, of kept parts when computed")
    return table


def summary(rows: Sequence[EvaluationRow]) -> list[str]:
    """The gain of the scorer, one line per comparison."""
    one = {row.rule: row for row in rows}
    scorer, exact = one["scorer"], one["exact"]
    low, high = (100 * (scorer.drop + sign * 1.96 * scorer.drop_se) for sign in (-1, 1))
    lines = [f"scorer: {scorer.accepted_per_forward:.2f} draft tokens a target forward, "
             f"{scorer.accepted_per_forward / max(exact.accepted_per_forward, 1e-9):.2f} times exact match's; "
             f"accuracy drop {100 * scorer.drop:.1f} points (95 % interval {low:.1f} to {high:.1f})"]
    if "random" in one:
        lines.append(f"scorer against the random share: {100 * (scorer.accuracy - one['random'].accuracy):+.1f} points")
    curve = [row for row in rows if row.rule in ("margin", "exact", "all")]
    if (at := measures.accuracy_on_curve(curve, scorer.accepted_per_forward)) is not None:
        lines.append(f"scorer against the margin rule at the same speed: {100 * (scorer.accuracy - at):+.1f} points")
    return lines


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--target", required=True, help="Hugging Face directory of the target model, with its tokenizer")
    add("--draft", required=True, help="directory of the draft model (same vocabulary)")
    add("--scorer", required=True, help="directory of the trained scorer")
    add("--compare", nargs="+", default=[], metavar="NAME=DIR", help="further scorers, reported in the same way")
    add("--rule", nargs="+", default=[], metavar="NAME=FILE:FUNCTION[:N,N,...]", help="judges of your own: for each "
        "threshold N (one of 0 without) FUNCTION(N) of a Python file returns a judge, a function of a Block")
    add("--untrained", help="directory of an untrained scorer; left out: the same config, drawn from --seed")
    add("--questions", type=Path, required=True, help="jsonl: question_id, prompt_ids, ground_truth")
    add("--val-questions", type=Path, required=True, help="the questions that choose the scorer's threshold")
    add("--harm-labels", type=Path, required=True, help="jsonl: one labelled mismatch a line (spd_evaluation/harm.py)")
    add("--val-harm-labels", type=Path, help="the same of validation questions, to choose the thresholds by")
    add("--out", type=output_folder, required=True, help="folder of evaluation.json and evaluation.png")
    add("--limit", type=int, help="only the first N held-out questions (default: all)")
    add("--val-limit", type=int, help="only the first N validation questions (default: all)")
    add("--gamma", type=int, default=8, help="drafted tokens a round (default %(default)d)")
    add("--target-first", action="store_true", help="the target writes the first token of each answer, as vLLM does: a "
        "served scorer then judges the same blocks")
    add("--temperature", type=float, default=0.0, help="draft and target sample; exact match is then rejection "
        "sampling, and the other rules judge the tokens that it would replace")
    add("--samples", type=int, default=1, help="answers per question, for a temperature above 0")
    add("--max-new-tokens", type=int, default=128, help="an answer cut there counts as wrong (default %(default)d)")
    add("--batch-size", type=int, default=256)
    add("--near-drop", type=float, help="with --all-rules: of the rules whose thresholds labels choose, only the three "
        "with the greatest areas are decoded, and test questions only with the chosen thresholds, "
        "and with those of the one rule and the one scorer that accept the most at this drop on validation questions")
    add("--parts", type=output_folder, help="folder of finished parts, which evaluations of other scorers on the same "
        "pair share; without it they are in --out, and are removed at the end")
    add("--harmless-shares", type=float, nargs="+", help="decode with all thresholds that accept these shares of the "
        "harmless labelled mismatches; left out: of shares from 0.05 to 0.95, with the three thresholds of each rule "
        "and scorer that bisection for --near-drop (else --max-val-drop) tries on validation questions")
    for option, kind, text in (
        ("scorer-thresholds", float, "on z of each scorer"), ("typicals", float, "eps; delta is eps / 0.3"),
        ("ranks", int, "accept draft tokens among the target's top N"),
        ("entropies", float, "of the deferred rule, in nats"),
        ("margins", float, "largest gap between the target's top logit and the draft token's"),
        ("divergences", float, "largest KL(draft, target), in nats"),
    ):  # fmt: skip
        default = " ".join(map("{:g}".format, UNLABELLED[option.replace("-", "_")]))
        add(f"--{option}", type=kind, nargs="+", help=f"{text}: thresholds in place of those that labels choose "
            f"(without --val-harm-labels {default})")  # fmt: skip
    add("--max-val-drop", type=float, default=0.01,
        help="the fastest scorer threshold is chosen whose accuracy drop on validation questions is at most this at "
        "the upper end of its 95 %% interval; if there is none, the one with the lowest upper end")
    add("--all-rules", action="store_true", help="sweep top ranks, deferred windows and divergence as well, and "
        "every rule on the validation questions too")
    add("--seed", type=int, default=0)
    add("--processes", type=int, help="which share each run's questions (default: one per core or GPU)")
    add("--device", default="cpu", help="cpu or cuda")
    add("--dtype", choices=("float32", "bfloat16", "float16"), help="of all models (default: bfloat16 on cuda "
        "and on CPUs with instructions for it, else float32)")
    args = parser.parse_args(argv)
    args.dtype = args.dtype or default_dtype(args.device)
    if args.near_drop is not None and not args.all_rules:
        parser.error("--near-drop chooses among rules too: add --all-rules")
    if args.processes is None:
        args.processes = len(os.sched_getaffinity(0)) if args.device == "cpu" else max(1, len(visible_gpus()))
    args.scorers, args.rules = {"scorer": args.scorer}, {}
    for text in args.compare:
        name, _, directory = text.partition("=")
        if not (name and directory) or name in {*FIXED_RULES, *args.scorers}:
            parser.error(f"--compare {text}: give NAME=DIR, with a name that no other rule has")
        args.scorers[name] = directory
    for text in args.rule:
        number = r"[-+]?(?:\d+\.?\d*|\.\d+)(?:e[-+]?\d+)?"
        given = re.fullmatch(rf"(\w+)=(.+?):(\w+)(?::({number}(?:,{number})*))?", text)
        if given is None or given[1] in {*FIXED_RULES, *args.scorers, *args.rules} or not Path(given[2]).is_file():
            parser.error(f"--rule {text}: give NAME=FILE:FUNCTION[:N,N], an existing file and a name of no other rule")
        args.rules[given[1]] = (given[2], given[3], [float(value) for value in (given[4] or "0").split(",")])
    for name, least in (("samples", 1), ("temperature", 0), ("processes", 1)):
        if getattr(args, name) < least:
            parser.error(f"--{name} {getattr(args, name)}: give at least {least}")
    if args.samples > 1 and not args.temperature:
        parser.error(f"--samples {args.samples} --temperature {args.temperature}: several samples need a temperature")
    return args


def main(argv: Sequence[str] | None = None) -> list[EvaluationRow]:
    args = parse(argv)
    for option in ("target", "draft"):
        load_model_part(f"--{option}", getattr(args, option), AutoConfig.from_pretrained)
    for directory in {*args.scorers.values(), *filter(None, [args.untrained])}:
        ScoringModelConfig.load(Path(directory))
    args.out.mkdir(parents=True, exist_ok=True)
    columns = (TextColumn("  {task.description:<28}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(),
               TimeRemainingColumn())  # fmt: skip
    with Progress(*columns, console=console) as progress:
        rows, validation, questions, estimates, areas = evaluate(args, progress)
    shutil.rmtree(args.out / FINISHED, ignore_errors=True)
    record = {"questions": questions, "dtype": args.dtype, "areas": areas, "rows": [asdict(row) for row in rows]}
    (args.out / "evaluation.json").write_text(json.dumps(record, indent=1) + "\n")
    chosen = next(row.threshold for row in rows if row.rule == "scorer")
    drop, width = estimates["scorer"]
    met = drop + width <= args.max_val_drop
    rule = (f"fastest with a drop of at most {args.max_val_drop} in its 95 % interval" if met else
            f"lowest end of the drop's 95 % interval, since none is at most {args.max_val_drop}")  # fmt: skip
    choice = {"rule": rule, "met": met, "chosen": chosen, "drop": drop, "interval": [drop - width, drop + width],
              "rows": [asdict(row) for row in validation]}
    (args.out / "validation.json").write_text(json.dumps(choice, indent=1) + "\n")
    save_plot(rows, questions, args.out / "evaluation.png")
    wide = Console(width=max(console.width, TABLE_WIDTH))
    wide.print(show(rows, questions))
    wide.print(*summary(rows), sep="\n")
    return rows


if __name__ == "__main__":
    try:
        main()
    except (ValueError, OSError) as error:  # a wrong option or file: no traceback
        sys.exit(str(error))
