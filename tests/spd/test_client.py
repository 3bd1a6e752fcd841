"""The client against small real HTTP servers that answer, fail, hang, or serve another model."""

import asyncio
import shutil
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace

import pytest

from recipe.spd.rollout.client import CompletionClient, RequestRefused, preferred_first, same_model, server_urls
from recipe.spd.rollout.store import Completion
from recipe.spd.settings import SPDRolloutSettings
from tests.helpers.http_server import serving

FAST = SPDRolloutSettings(timeout_s=30.0, attempts=3, prompts_per_request=4, concurrency=2, max_tokens=8)


class FakeServer:
    """Answers each prompt with its last id + 100 and an end token; after 50 to 57 without an end, 8 to 1 times.

    `behaviour(number of the request)` may wait first, and return another answer: (status, value).
    """

    def __init__(self, behaviour=None, model="target"):
        self.behaviour, self.model, self.lock = behaviour, model, threading.Lock()
        self.requests: list[dict] = []
        self.inside = self.most_inside = 0

    def complete(self, prompt: list[int]) -> tuple[list[int], str]:
        """(token ids, why they end)"""
        last = prompt[-1]
        return ([last + 100, 2], "stop") if last < 50 else ([last + 100] * (58 - last), "length")

    def answer(self, request):
        if request.path == "/v1/models":
            return 200, {"data": [{"id": "served", "root": self.model}]}
        with self.lock:
            self.requests.append(request.body)
            number = len(self.requests)
            self.inside += 1
            self.most_inside = max(self.most_inside, self.inside)
        other = self.behaviour(number) if self.behaviour else None
        with self.lock:
            self.inside -= 1
        made = [self.complete(prompt) for prompt in request.body["prompt"]]
        choices = [{"index": i, "token_ids": ids, "finish_reason": why} for i, (ids, why) in enumerate(made)]
        return other or (200, {"choices": choices[::-1]})  # the order of choices is not promised

    @contextmanager
    def running(self) -> Iterator[str]:
        with serving(self.answer) as (url, _):
            yield url


@contextmanager
def client(*urls, settings=FAST):
    yield CompletionClient(list(urls), "target", eos_token_ids=[2], settings=settings, backoff_s=0.01)


def ask(c, n=10):
    return [done and done.token_ids for done in c.complete([((1, i), 8) for i in range(n)])]


EXPECTED = [(i + 100,) for i in range(10)]


def fail(count):
    return 500, "broken"


def hang(count):
    time.sleep(60)


def slow(count):
    time.sleep(0.2)


def test_answers_come_in_order_in_chunks_with_bounded_concurrency():
    server = FakeServer(slow)
    with server.running() as url, client(url) as c:
        c.check_model()
        got = []
        requests = [((1, i), 8) for i in range(10)]
        done = c.complete(requests, on_chunk=lambda where, what: got.append((where, len(what))))
        assert [d.token_ids for d in done] == EXPECTED  # without the end token
        assert sorted(i for where, _ in got for i in where) == list(range(10))
        assert c.complete([((50,), 8)]) == [Completion((150,) * 8, hit_limit=True)]
    assert server.most_inside == 2 and max(len(r["prompt"]) for r in server.requests) == 4
    stated = {"model": "served", "max_tokens": 8, "stop_token_ids": [2], "temperature": 0.0, "top_p": 1.0, "top_k": -1,
              "min_p": 0.0, "repetition_penalty": 1.0, "presence_penalty": 0.0, "frequency_penalty": 0.0}  # fmt: skip
    assert server.requests[0].items() >= stated.items()


def test_a_caller_in_an_event_loop_gets_its_answers():
    async def cell():  # of a notebook
        return ask(c)

    with FakeServer().running() as url, client(url) as c:
        assert asyncio.run(cell()) == EXPECTED


def test_a_completion_is_cut_at_its_own_limit_whatever_shares_its_request():
    server = FakeServer()
    with server.running() as url, client(url, settings=replace(FAST, concurrency=1)) as c:
        # 50 answers eight tokens without an end, 7 one token and the end.
        done = c.complete([((50,), 8), ((50,), 3), ((7,), 2), ((7,), 1)])
    assert done[:2] == [Completion((150,) * 8, hit_limit=True), Completion((150,) * 3, hit_limit=True)]
    assert done[2:] == [Completion((107,), hit_limit=False), Completion((107,), hit_limit=True)]  # no room for the end
    (body,) = server.requests
    assert body["max_tokens"] == 8


def test_the_requests_of_one_rank_go_to_every_server():
    servers = [FakeServer(slow) for _ in range(4)]
    with ExitStack() as stack:
        urls = [stack.enter_context(server.running()) for server in servers]
        c = stack.enter_context(client(*urls, settings=replace(FAST, concurrency=8)))
        assert None not in c.complete([((1, i % 50), 8) for i in range(84)])
    asked = [sum(len(body["prompt"]) for body in server.requests) for server in servers]
    assert sum(asked) == 84 and min(asked) >= 8  # 21 each if all were equally fast


def test_a_completion_cut_by_the_server_s_context_length_is_refused():
    with FakeServer().running() as url, client(url) as c:
        with pytest.raises(RequestRefused, match="ended a completion at 5 tokens because .* full.*max-model-len"):
            c.complete([((53,), 8)])


def test_a_failure_that_passes_is_retried():
    with FakeServer(lambda count: (503, "busy") if count <= 2 else None).running() as url, client(url) as c:
        assert ask(c) == EXPECTED


def test_a_broken_and_a_hanging_server_are_left_for_one_that_works():
    broken, hanging, working = FakeServer(fail), FakeServer(hang), FakeServer()
    with broken.running() as a, hanging.running() as b, working.running() as good:
        with client(a, b, good, settings=replace(FAST, timeout_s=2.0)) as c:
            c.router.backoff_s = 600.0
            start = time.monotonic()
            assert ask(c) == EXPECTED
            assert time.monotonic() - start < 30
            seen = len(broken.requests) + len(hanging.requests)
            assert ask(c) == EXPECTED  # those that failed are asked last from now on
            assert len(broken.requests) + len(hanging.requests) == seen


def test_nothing_is_made_up_when_no_server_answers():
    with FakeServer(fail).running() as url, client(url, "http://127.0.0.1:9") as c:
        assert ask(c, 3) == [None, None, None]
        assert c.last_error
    with client("http://127.0.0.1:9") as c, pytest.raises(ConnectionError, match="none of the SPD servers"):
        c.check_model()


def test_a_refused_request_is_an_error_at_once():
    server = FakeServer(lambda count: (400, "too long"))
    with server.running() as url, client(url) as c, pytest.raises(RequestRefused, match='400: "too long"'):
        ask(c, 1)
    assert len(server.requests) == 1


def test_same_model_by_path_files_or_name(tiny_llama, tmp_path):
    copy = shutil.copytree(tiny_llama, tmp_path / "copy")
    assert same_model(str(copy), tiny_llama) and same_model("meta/Llama-3-8B", "/elsewhere/Llama-3-8B")
    (copy / "config.json").write_text("{}")
    assert not same_model(str(copy), tiny_llama)


def test_servers_of_environment_config_and_rank(monkeypatch):
    assert server_urls(None) == [] and server_urls(["http://a:1/"]) == ["http://a:1"]
    monkeypatch.setenv("SPD_VLLM_URLS", "http://b:1/v1, http://c:2")
    assert server_urls(["http://a:1"]) == ["http://b:1", "http://c:2"]
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "2,3")
    assert preferred_first(["x", "y", "z"], rank=0) == ["z", "x", "y"]
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert preferred_first(["x", "y", "z"], rank=1) == ["y", "z", "x"]
