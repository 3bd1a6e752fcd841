"""The demo's scorer in a vLLM server: held-out questions over HTTP by plain greedy, exact and judged speculation.

    python -m examples.spd_arithmetic.demo_serve [--demo DIR] [--questions 200]

Reads what `make demo` leaves. The demo's target is so small that drafting for it hardly pays: it is deepened first (the
same function at the cost of 66 million parameters, see deepen.py). Ends with a table, DEMO/served.json and a picture of
throughput over the number of concurrent requests.
"""

import argparse
import json
import re
import sys
import time
import urllib.request
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from rich.table import Table

from examples.demo_runner import ROOT, console
from examples.spd_arithmetic import deepen
from examples.spd_arithmetic.demo import LIMIT, STEPS, saved_scorer
from examples.spd_arithmetic.serving import Question, accuracy, choose_threshold, read_questions
from recipe.spd.vllm_plugin import engine_options
from scripts.serve_spd import flags_of
from verl.rollout.vllm_rollout.openai_server import LocalVllmServer

MIDDLEWARE = "recipe.spd.vllm_plugin.http.CountsMiddleware"
CONCURRENT = (1, 4, 16)
CANDIDATES = (-1.0, 0.0, 1.0)
VALIDATION = 100  # questions on which the threshold is chosen
FEW = 8  # questions a request slot answers when speed is measured
LABELS = {"greedy": "plain greedy", "exact": "exact speculation", "scorer": "scorer"}

SAME_WORK = ("--no-enable-prefix-caching",)  # ways of decoding that are compared answer the same prompts


@dataclass
class Served:
    """What one way of decoding gives on the held-out questions."""

    accuracy: float
    tokens_per_draft: float | None  # see `tokens_per_draft`
    tokens_per_second: dict[int, float]  # by concurrent requests


class Client:
    """A served model, asked for greedy answers."""

    def __init__(self, url: str, target: str, limit: int = LIMIT) -> None:
        """`limit`: tokens of an answer."""
        self.url, self.target, self.limit = url, target, limit

    def answers(self, questions: Sequence[Question], concurrent: int, **xargs: float) -> tuple[list[list[int]], float]:
        """Token ids of each answer, and the seconds of all."""

        def one(question: Question) -> list[int]:
            body = {"prompt": question.prompt_ids, "max_tokens": self.limit, "temperature": 0.0}
            data = json.dumps({**body, "return_token_ids": True, "vllm_xargs": xargs or None}).encode()
            request = urllib.request.Request(
                f"{self.url}/v1/completions", data, {"Content-Type": "application/json"}
            )
            with urllib.request.urlopen(request, timeout=300) as reply:
                return json.load(reply)["choices"][0]["token_ids"]

        begun = time.perf_counter()
        with ThreadPoolExecutor(concurrent) as pool:
            tokens = list(pool.map(one, questions))
        return tokens, time.perf_counter() - begun

    def drafts(self) -> float:
        """Verified drafts since the server's start, by its metrics page."""
        with urllib.request.urlopen(f"{self.url}/metrics", timeout=60) as reply:
            page = reply.read().decode()
        match = re.search(r"^vllm:spec_decode_num_drafts_total\{.*\} (\S+)", page, re.M)
        return float(match.group(1)) if match else 0.0

    def measure(self, questions: Sequence[Question], **xargs: float) -> Served:
        """Accuracy on all questions, speed at each number of concurrent requests."""
        self.answers(questions[:1], 1, **xargs)  # warms up
        before = self.drafts()
        tokens, seconds = self.answers(questions, max(CONCURRENT), **xargs)
        per_draft = tokens_per_draft(tokens, self.drafts() - before)
        speed = {max(CONCURRENT): sum(map(len, tokens)) / seconds}
        for concurrent in CONCURRENT[:-1]:
            some, seconds = self.answers(questions[: FEW * concurrent], concurrent, **xargs)
            speed[concurrent] = sum(map(len, some)) / seconds
        right = accuracy(self.target, questions, tokens)
        return Served(right, per_draft, dict(sorted(speed.items())))


def tokens_per_draft(answers: Sequence[Sequence[int]], drafts: float) -> float | None:
    """Mean number of tokens by which the verification of a draft extends its answer; None without drafts.

    For drafters that draft in every decoding step; the prefill gives an answer's first token. vLLM's own count of
    accepted draft tokens includes those after the end of an answer.
    """
    return (sum(map(len, answers)) - len(answers)) / drafts if drafts else None


@contextmanager
def server(
    target: str, log: Path, extra: Sequence[str] = (), length: int = 256, concurrent: int = max(CONCURRENT),
    limit: int = LIMIT,
) -> Iterator[tuple[Client, LocalVllmServer]]:  # fmt: skip
    """Start a vLLM server, yield a client and the server, and stop the server at the end.

    `length`: tokens of prompt and answer; `concurrent`: requests at a time; `limit`: tokens of an answer; all at most.
    """
    running = LocalVllmServer(target, log, length, ["--max-num-seqs", str(concurrent), *SAME_WORK, *extra])
    try:
        yield Client(running.wait_ready(600), target, limit), running
    finally:
        running.stop()


def run(args: argparse.Namespace) -> dict[str, Any]:
    """Serve and measure; the content of served.json."""
    testbed = args.demo / "testbed"
    target = args.demo / "deepened"
    deepen.main(["--model", str(testbed / "target"), "--out", str(target)])
    test = read_questions(testbed / "questions_test.jsonl", args.questions)
    validation = read_questions(testbed / "questions_val.jsonl", VALIDATION)
    options = engine_options(
        str(target), str(saved_scorer(args.demo / "target" / "run", STEPS)), draft=str(testbed / "draft"),
        allow_foreign_target=True,
    )  # fmt: skip
    del options["model"]
    results: dict[str, Served] = {}
    console.print("plain vLLM starts")
    with server(str(target), args.demo / "served_plain.log") as (client, _):
        results["greedy"] = client.measure(test)
    console.print("vLLM with draft and scorer starts")
    with server(str(target), args.demo / "served.log", [*flags_of(options), "--middleware", MIDDLEWARE]) as (client, _):

        def right(**xargs: float) -> float:
            return accuracy(str(target), validation, client.answers(validation, max(CONCURRENT), **xargs)[0])

        threshold = choose_threshold(right(spd=0), {t: right(spd_threshold=t) for t in CANDIDATES})
        results["exact"] = client.measure(test, spd=0)
        results["scorer"] = client.measure(test, spd_threshold=threshold)
    return {
        "questions": len(test), "threshold": threshold, "deepened": True,
        "results": {name: asdict(served) for name, served in results.items()},
    }  # fmt: skip


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


def draw(record: dict[str, Any], path: Path) -> None:
    """Throughput over concurrent requests, as a PNG."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7, 4.5), dpi=110, layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots()
    for name, served in record["results"].items():
        axes.plot(CONCURRENT, list(served["tokens_per_second"].values()), marker="o", label=LABELS[name])
    axes.set_xscale("log", base=2)
    axes.set_xticks(CONCURRENT, [str(n) for n in CONCURRENT])
    axes.set_xlabel("concurrent requests")
    axes.set_ylabel("tokens per second")
    axes.set_title("vLLM's server, deepened target")
    axes.grid(alpha=0.25)
    axes.legend()
    figure.savefig(path)


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
    draw(record, args.demo / "served.png")
    console.print(table_of(record))
    console.print(f"results {args.demo / 'served.json'}\npicture {args.demo / 'served.png'}")
    console.print(f"all in {time.monotonic() - begun:.0f} s")
    return 0


if __name__ == "__main__":
    sys.exit(main())
