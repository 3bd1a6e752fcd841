"""Greedy decoding, n-gram drafts and a refined model that drafts for itself in vLLM's server, one request at a time.

    python -m examples.pretrained.dllm.serve --model DIR --questions FILE --out FILE [--twin DIR] [--mode redraft]
                                             [--guesses 3]

Each server answers the same questions. OUT has, for each, accuracy, tokens per verified draft, tokens per second and
per CPU second of the server, and `refined_over_greedy`: tokens per second of the refined model with its own drafts
over those without.
"""

import argparse
import json
from pathlib import Path
from typing import Any

import pandas as pd
from rich.table import Table

from dllm_reasoning.inference.settings import SELF_DRAFT_MODES, self_draft_options
from examples.demo_runner import console
from examples.pretrained.dllm.tasks import LIMIT
from examples.pretrained.spd.serve import LENGTH
from examples.spd_arithmetic.questions import Question
from examples.spd_arithmetic.serving import measure, server
from scripts.serve_spd import flags_of
from verl.utils.fs import output_file
from verl.utils.tokenizer import hf_tokenizer

NGRAM = {"method": "ngram", "num_speculative_tokens": 5, "prompt_lookup_max": 3, "prompt_lookup_min": 1}
CONCURRENT = 8  # requests at a time that the servers are prepared for


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
    for name in ("model", "questions", "out"):
        parser.add_argument(f"--{name}", type=output_file if name == "out" else Path, required=True)
    parser.add_argument("--twin", type=Path, help="a further model, by greedy decoding and with n-gram drafts")
    parser.add_argument("--limit", type=int, default=60, help="questions; the first ones")
    parser.add_argument("--max-new-tokens", type=int, default=LIMIT)
    parser.add_argument("--mode", choices=SELF_DRAFT_MODES, default="redraft",
                        help="of the refined model's drafts: see SelfDraftSettings")  # fmt: skip
    parser.add_argument("--guesses", type=int, help="most guesses of a window")
    args = parser.parse_args(argv)
    rows, tokenizer = pd.read_parquet(args.questions)[: args.limit], hf_tokenizer(str(args.model))
    questions = [
        Question(str(i), row.instruction, tokenizer(row.instruction, add_special_tokens=False)["input_ids"], row.answer)
        for i, row in enumerate(rows.itertuples())
    ]
    drafting = self_draft_options(str(args.model), mode=args.mode, guesses=args.guesses)
    del drafting["model"]
    ways = {
        "greedy": (args.model, {}), "refined": (args.model, drafting),
        "n-gram": (args.model, {"speculative_config": NGRAM}),
    }  # fmt: skip
    if args.twin:
        ways |= {"twin, greedy": (args.twin, {}), "twin, n-gram": (args.twin, {"speculative_config": NGRAM})}
    results: dict[str, dict[str, Any]] = {}
    for number, (name, (model, options)) in enumerate(ways.items()):
        log = args.out.with_suffix(f".{number}.log")
        with server(str(model), log, flags_of(options), LENGTH, CONCURRENT, args.max_new_tokens) as (client, running):
            client.answers(questions[:1], 1)  # warms up
            always = options.get("speculative_config") != NGRAM
            results[name] = measure(client, running.pid, questions, always_drafts=always)
    tokens = {name: result.pop("tokens") for name, result in results.items()}
    same = {name: sum(a == b for a, b in zip(tokens["greedy"], tokens[name], strict=True))
            for name in ("refined", "n-gram")}  # fmt: skip
    ratio = results["refined"]["tokens_per_second"] / results["greedy"]["tokens_per_second"]
    record = {"questions": len(questions), "same_as_greedy": same, "refined_over_greedy": ratio, "results": results}
    args.out.write_text(json.dumps(record, indent=1) + "\n")
    console.print(result_table(f"{len(questions)} test questions over HTTP, one at a time", results))
    console.print(f"tokens per second with its own drafts over greedy decoding: {ratio:.2f}; answers equal to greedy "
                  f"decoding's: {same['refined']} (own drafts), {same['n-gram']} (n-gram) of {len(questions)}")


if __name__ == "__main__":
    main()
