"""The demo's scorer in a vLLM server: held-out questions over HTTP by plain greedy, exact and judged speculation.

    python -m examples.spd_arithmetic.demo_serve [--demo DIR] [--questions 200]

Reads what `make demo` leaves. The demo's target is so small that drafting for it hardly pays: it is deepened first (the
same function at the cost of 66 million parameters, see deepen.py). Ends with a table and DEMO/served.json.
"""

import argparse
import json
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.table import Table

from examples.demo_runner import ROOT, console
from examples.spd_arithmetic.deepen import write_deepened
from examples.spd_arithmetic.demo import STEPS, saved_scorer
from examples.spd_arithmetic.questions import Question
from examples.spd_arithmetic.serving import CONCURRENT, Client, accuracy, measure, read_questions, server
from recipe.spd.vllm_plugin import engine_options
from scripts.serve_spd import flags_of

MIDDLEWARE = "recipe.spd.vllm_plugin.http.CountsMiddleware"
CANDIDATES = (-1.0, 0.0, 1.0)
VALIDATION = 100  # questions on which the threshold is chosen
DROP_POINTS = 0.5  # of accuracy on them that a chosen threshold may cost
FEW = 8  # questions a request slot answers when speed is measured
LABELS = {"greedy": "plain greedy", "exact": "exact speculation", "scorer": "scorer"}


def choose_threshold(exact: float, judged: Mapping[float, float], drop_points: float = DROP_POINTS) -> float:
    """The lowest threshold that costs at most `drop_points` on validation questions; else the most accurate one.

    `exact`, `judged`: accuracy of exact acceptance, and of each threshold.
    """
    kept = [threshold for threshold, right in judged.items() if 100 * (exact - right) <= drop_points + 1e-9]
    return min(kept) if kept else max(judged, key=lambda threshold: (judged[threshold], threshold))


def speeds(client: Client, pid: int, questions: Sequence[Question], **xargs: float) -> dict[str, Any]:
    """Accuracy and tokens per draft on all questions; tokens per second by the number of concurrent requests."""
    client.answers(questions[:1], 1, **xargs)  # warms up
    whole = measure(client, pid, questions, max(CONCURRENT), **xargs)
    speed = {n: measure(client, pid, questions[: FEW * n], n, **xargs)["tokens_per_second"] for n in CONCURRENT[:-1]}
    return {"accuracy": whole["accuracy"], "tokens_per_draft": whole["tokens_per_draft"],
            "tokens_per_second": speed | {max(CONCURRENT): whole["tokens_per_second"]}}  # fmt: skip


def run(args: argparse.Namespace) -> dict[str, Any]:
    """Serve and measure; the content of served.json."""
    testbed = args.demo / "testbed"
    target = args.demo / "deepened"
    write_deepened(testbed / "target", target)
    test = read_questions(testbed / "questions_test.jsonl", args.questions)
    validation = read_questions(testbed / "questions_val.jsonl", VALIDATION)
    options = engine_options(
        str(target), str(saved_scorer(args.demo / "target" / "run", STEPS)), draft=str(testbed / "draft"),
        allow_foreign_target=True,
    )  # fmt: skip
    del options["model"]
    results: dict[str, dict[str, Any]] = {}
    console.print("plain vLLM starts")
    with server(str(target), args.demo / "served_plain.log") as (client, running):
        results["greedy"] = speeds(client, running.pid, test)
    console.print("vLLM with draft and scorer starts")
    judging = [*flags_of(options), "--middleware", MIDDLEWARE]
    with server(str(target), args.demo / "served.log", judging) as (client, running):

        def right(**xargs: float) -> float:
            return accuracy(str(target), validation, client.answers(validation, max(CONCURRENT), **xargs))

        threshold = choose_threshold(right(spd=0), {t: right(spd_threshold=t) for t in CANDIDATES})
        results["exact"] = speeds(client, running.pid, test, spd=0)
        results["scorer"] = speeds(client, running.pid, test, spd_threshold=threshold)
    return {"questions": len(test), "threshold": threshold, "deepened": True, "results": results}


def table_of(record: dict[str, Any]) -> Table:
    """The results as people read them."""
    title = (f"{record['questions']} held-out questions over HTTP; target deepened to 66 million parameters; "
             f"threshold {record['threshold']:g}")  # fmt: skip
    table = Table("", "accuracy %", "tokens/draft", *(f"tokens/s, {n} at once" for n in CONCURRENT), title=title)
    for name, served in record["results"].items():
        per_draft = "-" if served["tokens_per_draft"] is None else f"{served['tokens_per_draft']:.2f}"
        speed = (f"{value:.0f}" for value in served["tokens_per_second"].values())
        table.add_row(LABELS[name], f"{100 * served['accuracy']:.1f}", per_draft, *speed)
    return table


def main(argv: list[str] | None = None) -> int:
    """Run the demo; gives the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--demo", type=Path, default=ROOT / "outputs" / "spd_arithmetic", help="what make demo left")
    parser.add_argument("--questions", type=int, default=200)
    args = parser.parse_args(argv)
    args.demo = args.demo.resolve()
    if not saved_scorer(args.demo / "target" / "run", STEPS).is_dir():
        console.print(f"[red]{args.demo} holds no scorer with a target head: run make demo first[/red]")
        return 1
    begun = time.monotonic()
    record = run(args)
    (args.demo / "served.json").write_text(json.dumps(record, indent=1) + "\n")
    console.print(table_of(record))
    console.print(f"results {args.demo / 'served.json'}\nall in {time.monotonic() - begun:.0f} s")
    return 0


if __name__ == "__main__":
    sys.exit(main())
