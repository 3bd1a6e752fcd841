"""Questions put to a model in vLLM's server over HTTP: its answers, their speed and accuracy."""

import json
import re
import time
import urllib.request
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any

import psutil
from transformers import AutoTokenizer

from examples.spd_arithmetic.questions import Question, is_right
from verl.rollout.vllm_rollout.openai_server import LocalVllmServer
from verl.utils.tokenizer import stop_ids

CONCURRENT = (1, 4, 16)  # requests at a time
SAME_WORK = ("--no-enable-prefix-caching",)  # ways of decoding that are compared answer the same prompts
Row = dict[str, Any]


def read_questions(path: Path, limit: int | None = None) -> list[Question]:
    """The first `limit` questions of a test bed's file."""
    return [Question(**json.loads(line)) for line in path.read_text().splitlines()[:limit]]


def first_choice(url: str, body: Row, timeout: float) -> Row:
    """The first choice of a server's answer to a request, which is sent as JSON."""
    request = urllib.request.Request(url, json.dumps(body).encode(), {"Content-Type": "application/json"})
    with urllib.request.urlopen(request, timeout=timeout) as reply:
        return json.load(reply)["choices"][0]


class Client:
    """A served model, asked for greedy answers."""

    def __init__(self, url: str, target: str, limit: int) -> None:
        """`limit`: tokens of an answer."""
        self.url, self.target, self.limit = url, target, limit

    def answers(self, questions: Sequence[Question], concurrent: int, **xargs: float) -> list[list[int]]:
        """Token ids of each answer."""

        def one(question: Question) -> list[int]:
            body = {"prompt": question.prompt_ids, "max_tokens": self.limit, "temperature": 0.0}
            body |= {"return_token_ids": True, "vllm_xargs": xargs or None}
            return first_choice(f"{self.url}/v1/completions", body, 300)["token_ids"]

        with ThreadPoolExecutor(concurrent) as pool:
            return list(pool.map(one, questions))

    def drafts(self) -> float:
        """Verified drafts since the server's start, by its metrics page."""
        with urllib.request.urlopen(f"{self.url}/metrics", timeout=60) as reply:
            page = reply.read().decode()
        match = re.search(r"^vllm:spec_decode_num_drafts_total\{.*\} (\S+)", page, re.M)
        return float(match.group(1)) if match else 0.0


@contextmanager
def server(
    target: str, log: Path, extra: Sequence[str] = (), length: int = 256, concurrent: int = max(CONCURRENT),
    limit: int = 128,
) -> Iterator[tuple[Client, LocalVllmServer]]:  # fmt: skip
    """Start a vLLM server, yield a client and the server, and stop the server at the end.

    `length`: tokens of prompt and answer; `concurrent`: requests at a time; `limit`: tokens of an answer; all at most.
    """
    running = LocalVllmServer(target, log, length, ["--max-num-seqs", str(concurrent), *SAME_WORK, *extra])
    try:
        yield Client(running.wait_ready(600), target, limit), running
    finally:
        running.stop()


def cpu_seconds(root: int) -> float:
    """CPU seconds of a process and its children so far."""
    process = psutil.Process(root)
    times = [each.cpu_times() for each in (process, *process.children(recursive=True))]
    return sum(each.user + each.system for each in times)


def measure(
    client: Client, pid: int, questions: Sequence[Question], concurrent: int = 1, always_drafts: bool = True,
    **xargs: float,
) -> Row:  # fmt: skip
    """What one way of decoding gives on the questions; `always_drafts`: in every step, unlike lookup."""
    before, cpu, begun = client.drafts(), cpu_seconds(pid), time.monotonic()
    tokens = client.answers(questions, concurrent, **xargs)
    seconds, used = time.monotonic() - begun, cpu_seconds(pid) - cpu
    count = sum(map(len, tokens))
    per_draft = tokens_per_draft(tokens, client.drafts() - before) if always_drafts else None
    return {
        "accuracy": accuracy(client.target, questions, tokens), "tokens_per_draft": per_draft,
        "tokens_per_second": count / seconds, "cpu_seconds": used, "tokens_per_cpu_second": count / used,
        "tokens": tokens,
    }  # fmt: skip


def tokens_per_draft(answers: Sequence[Sequence[int]], drafts: float) -> float | None:
    """Mean number of tokens by which the verification of a draft extends its answer; None without drafts.

    For drafters that draft in every decoding step; the prefill gives an answer's first token. vLLM's own count of
    accepted draft tokens includes those after the end of an answer.
    """
    return (sum(map(len, answers)) - len(answers)) / drafts if drafts else None


def accuracy(model: str, questions: Sequence[Question], answers: Sequence[Sequence[int]]) -> float:
    """Share of answers (token ids) that have ended and name the right number; `model` is the target's folder."""
    decode, ends = _texts_of(model)
    right = [is_right(ids, q.ground_truth, decode, ends) for q, ids in zip(questions, answers, strict=True)]
    return sum(right) / len(right)


@cache
def _texts_of(model: str):
    tokenizer = AutoTokenizer.from_pretrained(model)
    return lambda ids: tokenizer.decode(ids, skip_special_tokens=True), frozenset(stop_ids(tokenizer))
