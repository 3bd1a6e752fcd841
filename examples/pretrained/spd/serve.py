"""A pair in vLLM's server: greedy decoding, exact match and a scorer, over HTTP, with drafts of several lengths.

    python -m examples.pretrained.spd.serve --target DIR --draft DIR --scorers RULE=DIR ... --questions FILE
                                            --evaluation DIR --out DIR [--rounds 2]

Drafts come from the draft model, from n-gram lookup and, where the package arctic-inference is installed, from suffix
lookup. The scorer is the one that accepts the most draft tokens on the evaluation's validation questions at a drop of
two points, with the fastest of its thresholds that drop by at most that there. Each server has one kind of drafts of
one length, and answers the same questions at each number of concurrent requests, by exact match and by the scorer in
turn; all servers are started once a round, one after the other. OUT/served.json has the medians over the rounds, and
for each kind of drafts the scorer's tokens per second over those of exact match and of greedy decoding, each with its
best number of draft tokens. A stopped command continues with the servers that it has not measured.
"""

import argparse
import json
import os
from collections.abc import Iterator, Sequence
from importlib.util import find_spec
from pathlib import Path
from statistics import median
from typing import Any

from rich.table import Table

from examples.demo_runner import console
from examples.pretrained.spd.gains import DROP, best, curves
from examples.spd_arithmetic.questions import Question
from examples.spd_arithmetic.serving import CONCURRENT, Row, measure, read_questions, server
from recipe.spd.vllm_plugin import engine_options
from scripts.serve_spd import flags_of
from scripts.spd_evaluation.plot import CURVES
from verl.utils.accelerator import default_dtype, get_device_name
from verl.utils.fs import output_folder

LENGTH = 1024  # tokens of prompt and answer in the servers
GAMMAS = (3, 4, 6, 8)
# Without a draft model. Suffixes of earlier answers would contain those that the other ways of decoding gave to the
# same questions, so that only the request's own text is searched.
LOOKUPS = {
    "n-gram": {"method": "ngram", "prompt_lookup_max": 3, "prompt_lookup_min": 1},
    "suffix": {"method": "suffix", "suffix_decoding_max_cached_requests": 0},
}
FIGURES = ("tokens_per_second", "tokens_per_draft", "accuracy", "cpu_seconds")


def chosen_scorer(evaluation: Path) -> tuple[str, float]:
    """The name in the evaluation of the scorer that is served, and its threshold; SystemExit if none keeps the drop."""
    validation = json.loads((evaluation / "by_question.json").read_text())["validation"]
    legend = best(validation, trained=True)
    points = {threshold: point for threshold, point in curves(validation)[legend].items() if threshold is not None}
    kept = [threshold for threshold, point in points.items() if point.drop <= DROP]
    if not kept:
        lost = f"every threshold of {legend} drops by more than {100 * DROP:g} points"
        raise SystemExit(f"{evaluation}: {lost}; train longer (--scorer-steps of examples.pretrained.spd.demo)")
    rule = next(rules[0] for rules, name, *_ in CURVES if name == legend)
    return rule, max(kept, key=lambda threshold: points[threshold].speed)


def server_options(args: argparse.Namespace, scorer: str, drafts: str, gamma: int | None) -> list[str]:
    """What vLLM's command line needs for drafts of this kind (`none`, `model` or a key of LOOKUPS) and length."""
    if gamma is None:
        return []
    drafter: dict[str, Any] = {"draft": str(args.draft), "gamma": gamma}
    if drafts in LOOKUPS:  # on whose drafts the scorer was not trained
        drafter = {"speculative_config": {**LOOKUPS[drafts], "num_speculative_tokens": gamma},
                   "allow_foreign_drafter": True}  # fmt: skip
    options = engine_options(str(args.target), scorer, **drafter)
    del options["model"]
    return flags_of(options)


def rows_of_server(
    args: argparse.Namespace, questions: Sequence[Question], options: Sequence[str], log: Path, drafts: str,
    threshold: float,
) -> Iterator[Row]:  # fmt: skip
    """Start a server, and measure each way of decoding at each number of concurrent requests."""
    ways = {"exact": {"spd": 0}, "scorer": {"spd_threshold": threshold}} if options else {"greedy": {}}
    sizes = {"length": LENGTH, "concurrent": max(CONCURRENT), "limit": args.max_new_tokens}
    with server(str(args.target), log, ["--dtype", args.dtype, *options], **sizes) as (client, running):
        client.answers(questions[:1], 1)  # warms up
        for concurrent in CONCURRENT:
            for decoding, xargs in ways.items():
                result = measure(client, running.pid, questions, concurrent, drafts == "model", **xargs)
                yield {"decoding": decoding, "concurrent": concurrent, **{name: result[name] for name in FIGURES}}


def medians(rows: Sequence[Row]) -> list[Row]:
    """One row for each way of decoding, drafts and number of requests: the medians over rounds."""
    grouped: dict[tuple, list[Row]] = {}
    for row in rows:
        key = tuple((name, value) for name, value in row.items() if name not in FIGURES)
        grouped.setdefault(key, []).append(row)

    def middle(name: str, same: list[Row]) -> float | None:
        values = [row[name] for row in same if row[name] is not None]
        return median(values) if values else None

    return [dict(key) | {name: middle(name, same) for name in FIGURES} for key, same in grouped.items()]


def fastest(rows: Sequence[Row], decoding: str, drafts: str, concurrent: int) -> Row:
    """The row with the best number of draft tokens."""
    wanted = (decoding, drafts, concurrent)
    same = [row for row in rows if (row["decoding"], row["drafts"], row["concurrent"]) == wanted]
    return max(same, key=lambda row: row["tokens_per_second"])


def ratios(rows: Sequence[Row], drafts: str) -> dict[str, dict[int, float]]:
    """Tokens per second of the scorer over exact match and greedy decoding, by the number of concurrent requests."""
    others = {"exact": drafts, "greedy": "none"}
    speeds = {n: fastest(rows, "scorer", drafts, n)["tokens_per_second"] for n in CONCURRENT}
    return {f"spd_served_over_{name}": {n: speed / fastest(rows, name, of, n)["tokens_per_second"]
                                        for n, speed in speeds.items()} for name, of in others.items()}  # fmt: skip


def result_table(record: dict[str, Any]) -> Table:
    """A row for each way of decoding and kind of drafts, each with its best number of draft tokens in brackets."""
    columns = [f"tokens/s, {n} at once" for n in CONCURRENT]
    title = (f"{record['questions']} test questions over HTTP, threshold {record['threshold']:.3g}; accuracy and "
             f"tokens per draft at {CONCURRENT[0]} request at a time")  # fmt: skip
    table = Table("", "drafts", "accuracy %", "tokens/draft", *columns, title=title)
    for decoding, drafts in dict.fromkeys((row["decoding"], row["drafts"]) for row in record["rows"]):
        shown = [fastest(record["rows"], decoding, drafts, n) for n in CONCURRENT]
        per_draft = "-" if shown[0]["tokens_per_draft"] is None else f"{shown[0]['tokens_per_draft']:.2f}"
        speeds = [f"{row['tokens_per_second']:.1f}" + (f" ({row['gamma']})" if row["gamma"] else "") for row in shown]
        table.add_row(decoding, drafts, f"{100 * shown[0]['accuracy']:.1f}", per_draft, *speeds)
    return table


def described(record: dict[str, Any]) -> str:
    """The ratios in words."""
    lines = []
    for drafts, of_drafts in record["ratios"].items():
        for name, values in of_drafts.items():
            named = ", ".join(f"{ratio:.2f} at {n}" for n, ratio in values.items())
            what = {"spd_served_over_exact": "exact match", "spd_served_over_greedy": "greedy decoding"}[name]
            lines.append(f"drafts: {drafts}; the scorer's tokens per second over {what}: {named} requests at once")
    return "\n".join(lines)


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    """The options."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name in ("target", "draft", "questions", "evaluation", "out"):
        parser.add_argument(f"--{name}", type=output_folder if name == "out" else Path, required=True)
    parser.add_argument("--scorers", nargs="+", required=True, metavar="RULE=DIR", help="by their names in EVALUATION")
    parser.add_argument("--gammas", type=int, nargs="+", default=GAMMAS, help="numbers of draft tokens")
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--limit", type=int, default=48, help="questions; the first ones")
    parser.add_argument("--max-new-tokens", type=int, default=200)
    parser.add_argument("--dtype", default=default_dtype(get_device_name()), help="of the models")
    return parser.parse_args(argv)


def main(argv: Sequence[str] | None = None) -> None:
    """Serve, measure, and write the record."""
    args = parse(argv)
    questions = read_questions(args.questions, args.limit)
    rule, threshold = chosen_scorer(args.evaluation)
    scorer = dict(part.split("=", 1) for part in args.scorers)[rule]
    kinds = ["model", *(name for name in LOOKUPS if name != "suffix" or find_spec("arctic_inference"))]
    setups = [("none", None), *((drafts, gamma) for drafts in kinds for gamma in args.gammas)]
    args.out.mkdir(parents=True, exist_ok=True)
    rows = []
    for number in range(args.rounds):
        for drafts, gamma in setups:
            part = args.out / f"round{number}_{drafts}_{gamma or 0}.json"
            if not part.exists():
                console.print(f"round {number + 1} of {args.rounds}, drafts: {drafts}, {gamma or 0} tokens")
                options = server_options(args, scorer, drafts, gamma)
                log = part.with_suffix(".log")
                measured = list(rows_of_server(args, questions, options, log, drafts, threshold))
                part.with_suffix(".partial").write_text(json.dumps(measured))
                os.replace(part.with_suffix(".partial"), part)
            rows += [{"drafts": drafts, "gamma": gamma} | row for row in json.loads(part.read_text())]
    found = medians(rows)
    record = {"questions": len(questions), "scorer": rule, "threshold": threshold, "dtype": args.dtype,
              "ratios": {drafts: ratios(found, drafts) for drafts in kinds}, "rows": found}  # fmt: skip
    (args.out / "served.json").write_text(json.dumps(record, indent=1) + "\n")
    console.print(result_table(record))
    console.print(described(record), soft_wrap=True, highlight=False)


if __name__ == "__main__":
    main()
