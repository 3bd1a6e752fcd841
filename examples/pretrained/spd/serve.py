"""The pair in vLLM's server: plain greedy decoding, exact match and a scorer, over HTTP.

    python -m examples.pretrained.spd.serve --target DIR --draft DIR --scorer DIR --pair DIR --evaluation DIR --out FILE

The scorer's threshold is the one that the evaluation chose on validation questions. Every way of decoding answers the
same test questions, one request at a time; OUT has accuracies, tokens per verified draft, tokens per second and per CPU
second of the server, and how many answers equal those of the recipe's own decoder in the same dtype.
"""

import argparse
import json
import time
from pathlib import Path
from typing import Any

import psutil
from rich.table import Table

from examples.demo_runner import console
from examples.pretrained.spd.tasks import LIMIT
from examples.spd_arithmetic.demo_serve import MIDDLEWARE, Client, server, tokens_per_draft
from examples.spd_arithmetic.serving import Question, accuracy, read_questions
from recipe.spd.vllm_plugin import engine_options
from scripts.serve_spd import flags_of
from verl.utils.accelerator import default_dtype

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
    for name in ("target", "draft", "scorer", "pair", "evaluation", "out"):
        parser.add_argument(f"--{name}", type=Path, required=True)
    parser.add_argument("--gamma", type=int, default=8)
    parser.add_argument("--max-new-tokens", type=int, default=LIMIT)
    parser.add_argument("--questions", type=int, default=QUESTIONS)
    parser.add_argument("--rule", default="refined", help="the scorer's name in the evaluation")
    parser.add_argument("--dtype", default=default_dtype("cpu"), help="of the models, in the server and outside of it")
    args = parser.parse_args(argv)
    questions = read_questions(args.pair / "questions_test.jsonl", args.questions)
    rows = json.loads((args.evaluation / "evaluation.json").read_text())["rows"]
    threshold = next(row["threshold"] for row in rows if row["rule"] == args.rule)
    options = engine_options(str(args.target), str(args.scorer), draft=str(args.draft), gamma=args.gamma)
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
    same = sum(a == b for a, b in zip(results["greedy"].pop("tokens"), results["exact"].pop("tokens"), strict=True))
    decoded = own_decoder(args, questions, threshold)
    agree = sum(a == b for a, b in zip(results["scorer"].pop("tokens"), decoded, strict=True))
    record = {"questions": len(questions), "threshold": threshold, "dtype": args.dtype,
              "exact_equals_greedy": same, "scorer_equals_decoder": agree, "results": results}  # fmt: skip
    args.out.write_text(json.dumps(record, indent=1) + "\n")
    title = f"{len(questions)} test questions over HTTP, threshold {threshold:.3g}"
    console.print(result_table(title, results))
    console.print(f"{same} of {len(questions)} answers of exact match equal greedy decoding's; {agree} of the scorer's "
                  "equal those of the recipe's own decoder")


def own_decoder(args: argparse.Namespace, questions: list[Question], threshold: float) -> list[list[int]]:
    """The scorer's answers by the recipe's decoder, in the blocks of a server."""
    from recipe.spd.rollout.decoder import speculative_generate
    from scripts.spd_evaluation.rules import above
    from scripts.spd_evaluation.worker import load_model, load_scorer, scores_of
    from verl.utils.tokenizer import hf_tokenizer, stop_ids

    target, draft = (load_model(str(folder), "cpu", args.dtype) for folder in (args.target, args.draft))
    model = load_scorer(str(args.scorer), target)
    tokenizer = hf_tokenizer(str(args.target))
    ends = stop_ids(tokenizer, str(args.target))
    prompts = [question.prompt_ids for question in questions]
    judge = above(scores_of(model, tokenizer, ends), threshold)
    return speculative_generate(
        target, draft, prompts, judge, gamma=args.gamma, max_new_tokens=args.max_new_tokens, eos_token_id=ends,
        batch_size=25, target_first=True,
    ).tokens


if __name__ == "__main__":
    main()
