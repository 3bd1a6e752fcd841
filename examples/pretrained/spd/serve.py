"""The pair in vLLM's server: plain greedy decoding, exact match and a scorer, over HTTP.

    python -m examples.pretrained.spd.serve --target DIR --draft DIR --scorers RULE=DIR ... --pair DIR --evaluation DIR
                                            --out FILE

Serves the scorer that accepts the most draft tokens on the evaluation's validation questions at a drop of two points,
with the threshold that the evaluation chose on them. Every way of decoding answers the same test questions, one request
at a time; OUT has accuracies, tokens per verified draft, tokens per second and per CPU second of the server, and how
many answers equal those of the recipe's own decoder in the same dtype.
"""

import argparse
import json
import time
from pathlib import Path
from typing import Any

import psutil
from rich.table import Table

from examples.demo_runner import console
from examples.pretrained.spd.gains import best
from examples.pretrained.spd.tasks import LIMIT
from examples.spd_arithmetic.demo_serve import MIDDLEWARE, Client, server, tokens_per_draft
from examples.spd_arithmetic.serving import Question, accuracy, read_questions
from recipe.spd.vllm_plugin import engine_options
from scripts.serve_spd import flags_of
from scripts.spd_evaluation.plot import CURVES
from verl.utils.accelerator import default_dtype, get_device_name

QUESTIONS = 100
LENGTH, CONCURRENT = 1024, 8  # tokens of prompt and answer, and most requests at a time, in the servers


def cpu_seconds(root: int) -> float:
    """CPU seconds of a process and its children so far."""
    process = psutil.Process(root)
    times = [each.cpu_times() for each in (process, *process.children(recursive=True))]
    return sum(each.user + each.system for each in times)


def measure(
    client: Client, pid: int, questions: list[Question], always_drafts: bool = True, **xargs: float
) -> dict[str, Any]:
    """What one way of decoding gives on the questions; `always_drafts`: in every step, unlike n-gram lookup."""
    client.answers(questions[:1], 1, **xargs)  # warms up
    before, cpu, begun = client.drafts(), cpu_seconds(pid), time.monotonic()
    tokens, _ = client.answers(questions, 1, **xargs)
    seconds, used = time.monotonic() - begun, cpu_seconds(pid) - cpu
    count = sum(map(len, tokens))
    per_draft = tokens_per_draft(tokens, client.drafts() - before) if always_drafts else None
    return {
        "accuracy": accuracy(client.target, questions, tokens), "tokens_per_draft": per_draft,
        "tokens_per_second": count / seconds, "tokens_per_cpu_second": count / used, "tokens": tokens,
    }  # fmt: skip


def result_table(title: str, results: dict[str, dict[str, Any]]) -> Table:
    """A row for each way of decoding, from what `measure` returned."""
    table = Table("", "accuracy %", "tokens/draft", "tokens/s", "tokens per CPU second", title=title)
    for name, row in results.items():
        per_draft = "-" if row["tokens_per_draft"] is None else f"{row['tokens_per_draft']:.2f}"
        table.add_row(name, f"{100 * row['accuracy']:.1f}", per_draft, f"{row['tokens_per_second']:.1f}",
                      f"{row['tokens_per_cpu_second']:.1f}")
    return table


def main(argv: list[str] | None = None) -> None:
    """Serve, measure, and write the record."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name in ("target", "draft", "pair", "evaluation", "out"):
        parser.add_argument(f"--{name}", type=Path, required=True)
    parser.add_argument("--scorers", nargs="+", required=True, metavar="RULE=DIR", help="by their names in EVALUATION")
    parser.add_argument("--gamma", type=int, default=8)
    parser.add_argument("--max-new-tokens", type=int, default=LIMIT)
    parser.add_argument("--questions", type=int, default=QUESTIONS)
    parser.add_argument("--dtype", default=default_dtype(get_device_name()),
                        help="of the models, in the server and outside of it")  # fmt: skip
    args = parser.parse_args(argv)
    questions = read_questions(args.pair / "questions_test.jsonl", args.questions)
    rows = json.loads((args.evaluation / "evaluation.json").read_text())["rows"]
    validation = json.loads((args.evaluation / "by_question.json").read_text())["validation"]
    legend = best(validation, trained=True)
    rule = next(rules[0] for rules, name, *_ in CURVES if name == legend)
    threshold = next(row["threshold"] for row in rows if row["rule"] == rule)
    scorer = dict(part.split("=", 1) for part in args.scorers)[rule]
    options = engine_options(str(args.target), scorer, draft=str(args.draft), gamma=args.gamma)
    del options["model"]
    results: dict[str, dict[str, Any]] = {}
    plain = ["--dtype", args.dtype]
    sizes = {"length": LENGTH, "concurrent": CONCURRENT, "limit": args.max_new_tokens}
    with server(str(args.target), args.out.with_suffix(".plain.log"), plain, **sizes) as (client, running):
        results["greedy"] = measure(client, running.pid, questions)
    extra = [*plain, *flags_of(options), "--middleware", MIDDLEWARE]
    with server(str(args.target), args.out.with_suffix(".log"), extra, **sizes) as (client, running):
        results["exact"] = measure(client, running.pid, questions, spd=0)
        results["scorer"] = measure(client, running.pid, questions, spd_threshold=threshold)
    tokens = {name: result.pop("tokens") for name, result in results.items()}
    decoded = own_decoder(args, questions, scorer, threshold)
    pairs = {"exact_equals_greedy": (tokens["exact"], tokens["greedy"]),
             **{f"{name}_equals_decoder": (tokens[name], decoded[name]) for name in decoded}}  # fmt: skip
    equal = {name: sum(a == b for a, b in zip(*answers, strict=True)) for name, answers in pairs.items()}
    record = {"questions": len(questions), "scorer": rule, "threshold": threshold, "dtype": args.dtype, **equal,
              "results": results}  # fmt: skip
    args.out.write_text(json.dumps(record, indent=1) + "\n")
    title = f"{len(questions)} test questions over HTTP, {legend.partition(',')[0]}, threshold {threshold:.3g}"
    console.print(result_table(title, results))
    console.print(f"of {len(questions)} answers, {equal['exact_equals_greedy']} of exact match equal those of greedy "
                  f"decoding; {equal['exact_equals_decoder']} of exact match and {equal['scorer_equals_decoder']} of "
                  "the scorer equal those of the recipe's own decoder", soft_wrap=True)  # fmt: skip


def own_decoder(
    args: argparse.Namespace, questions: list[Question], scorer: str, threshold: float
) -> dict[str, list[list[int]]]:  # fmt: skip
    """The answers of exact match and of the scorer by the recipe's decoder, in the blocks of a server."""
    from recipe.spd.rollout.decoder import speculative_generate
    from scripts.spd_evaluation.rules import above, exact
    from scripts.spd_evaluation.worker import load_model, load_scorer, scores_of
    from verl.utils.tokenizer import hf_tokenizer, stop_ids

    device = get_device_name()
    target, draft = (load_model(str(folder), device, args.dtype) for folder in (args.target, args.draft))
    model = load_scorer(scorer, target).to(device)
    tokenizer = hf_tokenizer(str(args.target))
    ends = stop_ids(tokenizer, str(args.target))
    prompts = [question.prompt_ids for question in questions]
    judges = {"exact": exact(), "scorer": above(scores_of(model, tokenizer, ends), threshold)}
    return {name: speculative_generate(
        target, draft, prompts, judge, gamma=args.gamma, max_new_tokens=args.max_new_tokens, eos_token_id=ends,
        batch_size=25, target_first=True,
    ).tokens for name, judge in judges.items()}  # fmt: skip


if __name__ == "__main__":
    main()
