"""The HTTP server of a vLLM engine: what it answers, what it refuses, what happens to requests that are aborted."""

import asyncio
import functools
import json
import time
from contextlib import asynccontextmanager
from types import SimpleNamespace
from unittest.mock import patch

import aiohttp
import numpy as np
import pytest
import torch

from tests.helpers.engines import ask, make_engine, serve_weights
from verl.agents.agent_loop.server_manager import turn_seed
from verl.rollout.replica import ServerClient, ServerHandle
from verl.rollout.vllm_rollout.vllm_async_server import vLLMHttpServer
from verl.utils.http_json import ServerUnreachable, ServiceError

pytestmark = pytest.mark.process  # vLLM asks the system's tools about the machine when it starts

PAD, EOS = 0, 2


@pytest.fixture(scope="module")
def served(tied_llama):
    """(rollout, log-probs of the trained module for ids [T])."""
    engine = make_engine(tied_llama)
    rollout = serve_weights(engine, version=3, prompt_length=16, response_length=48)
    yield rollout, engine
    rollout.close()


async def until_held(server, task):
    """Return once the server holds the request of the task back."""
    while not server._held:
        assert not task.done()
        await asyncio.sleep(0.001)


def sampled(n, seed=7, **more):
    return {"temperature": 1.0, "max_tokens": n, "seed": seed, **more}


@asynccontextmanager
async def running(server, client, rid, tokens, log_probs):
    """A request that has generated a token. In this context a step of the engine takes a tenth of a second more."""
    step = server.engine.step
    with patch.object(server.engine, "step", lambda: (time.sleep(0.1), step())[1]):
        task = asyncio.create_task(client.generate(rid, [7], sampled(tokens), log_probs))
        while not any(request.output_ids for request in list(server.requests.values())):
            assert not task.done()
            await asyncio.sleep(0.001)
        yield task


def test_log_probs_are_those_of_the_trained_module(served):
    rollout, engine = served
    prompt = [7, 8, 9]
    output = ask(rollout, lambda c: c.generate("a", prompt, sampled(20), True))
    assert len(output.token_ids) == 20 and output.stop_reason == "length" and output.weights_version == 3
    ids = torch.tensor([prompt + output.token_ids])
    with torch.no_grad(), engine.eval_mode():
        logits = engine.module(ids).logits.float().log_softmax(-1)[0, len(prompt) - 1 : -1]
    expected = logits.gather(1, ids[0, len(prompt) :, None])[:, 0]
    assert np.allclose(output.log_probs, expected, atol=1e-3)


def test_a_seed_gives_the_same_tokens_alone_and_among_others(served):
    rollout, _ = served
    alone = ask(rollout, lambda c: c.generate("a", [7, 8], sampled(16), False)).token_ids

    async def among(client):
        return await asyncio.gather(*(client.generate(f"r{i}", [7, 8], sampled(16, i), False) for i in range(10)))

    together = [output.token_ids for output in ask(rollout, among)]
    assert together[7] == alone and len({tuple(ids) for ids in together}) > 5


def test_a_stop_token_ends_the_answer_and_counts(served):
    rollout, _ = served
    free = ask(rollout, lambda c: c.generate("a", [7, 8], sampled(16), False)).token_ids
    stop = free[5]
    output = ask(rollout, lambda c: c.generate("a", [7, 8], sampled(16, stop_token_ids=[stop]), False))
    assert output.token_ids == free[: free.index(stop) + 1] and output.stop_reason == "completed"


def test_aborted_requests_are_answered_with_their_tokens(served):
    rollout, _ = served
    full = ask(rollout, lambda c: c.generate("f", [7], sampled(47), True))

    async def abort(client):
        async with running(rollout.server, client, "long", 47, True) as task:
            await client.post("abort_request", {"rid": "long"})
        return await task

    output = ask(rollout, abort)
    assert output.stop_reason == "aborted" and 0 < len(output.token_ids) < 47
    assert output.token_ids == full.token_ids[: len(output.token_ids)]
    assert np.allclose(output.log_probs, full.log_probs[: len(output.token_ids)], atol=1e-5)


def test_a_client_that_leaves_aborts_its_request_and_new_weights_wait_for_none(served):
    rollout, engine = served

    async def leave(client):
        async with running(rollout.server, client, "gone", 47, False) as task:
            await client.post("pause_generation", {"mode": "in_place"})  # it runs as long as the test needs
        with pytest.raises(RuntimeError, match="while 1 requests run"):
            await asyncio.to_thread(rollout.update_weights, engine.get_per_tensor_param())
        refused = await client.post("update_weights_from_disk", {"model_path": "anything"})
        assert refused == {"success": False, "message": "1 requests run", "num_paused_requests": 0}
        with pytest.raises(ServiceError, match="1 requests run; abort them first"):
            await client.post("flush_cache", {})
        task.cancel()
        for _ in range(1000):
            if not rollout.server.requests:
                await client.post("continue_generation", {})
                return True
            await asyncio.sleep(0.005)

    assert ask(rollout, leave)


@pytest.mark.parametrize("seconds", [0.0, 0.1])  # of a step: the reply comes before and after the first interim one
def test_a_client_that_closes_its_sending_side_gets_its_reply(served, seconds):
    server, handle = served[0].server, served[0].server_handle
    body = json.dumps({"input_ids": [7], "sampling_params": sampled(3, ignore_eos=True)}).encode()
    head = ["POST /generate HTTP/1.1", "Host: x", f"Authorization: Bearer {handle.token}",
            "Content-Type: application/json", f"Content-Length: {len(body)}", "", ""]  # fmt: skip

    async def ask():
        reader, writer = await asyncio.open_connection(*handle.address.split(":"))
        writer.write("\r\n".join(head).encode() + body)
        writer.write_eof()
        return await asyncio.wait_for(reader.read(), 60)

    step = server.engine.step
    with patch.object(server.engine, "step", lambda: (time.sleep(seconds), step())[1]):
        parts = asyncio.run(ask()).split(b"\r\n\r\n")
    assert set(parts[:-2]) <= {b"HTTP/1.1 100 Continue"} and bool(parts[:-2]) >= bool(seconds)
    assert parts[-2].startswith(b"HTTP/1.1 200 OK") and len(json.loads(parts[-1])["output_ids"]) == 3


def test_pause_in_place_continues_with_the_same_tokens(served):
    rollout, _ = served
    full = ask(rollout, lambda c: c.generate("f", [7], sampled(40), False)).token_ids

    async def pause(client):
        async with running(rollout.server, client, "p", 40, False) as task:
            await client.post("pause_generation", {"mode": "in_place"})
        generated = len(rollout.server.requests["p"].output_ids)
        await asyncio.sleep(0.2)
        paused = not task.done() and len(rollout.server.requests["p"].output_ids) == generated < 40
        await client.post("continue_generation", {})
        return paused, (await task).token_ids

    assert ask(rollout, pause) == (True, full)


@pytest.mark.parametrize("how", ["abort_all", "rid", "release", "python"])
def test_a_request_that_waits_for_the_end_of_a_pause_can_be_aborted(served, how):
    rollout, _ = served
    server = rollout.server

    async def abort(client):
        await client.post("pause_generation", {"mode": "abort"})
        task = asyncio.create_task(client.generate("held", [7], sampled(40), True))
        await until_held(server, task)
        if how == "release":
            await asyncio.to_thread(rollout.release)
            await asyncio.to_thread(rollout.resume, ["weights", "kv_cache"])
        elif how == "python":
            done = await asyncio.to_thread(server.abort_all_requests)
            assert done == {"aborted_count": 1, "request_ids": ["held"]}
        else:
            await client.post("abort_request", {"abort_all": True} if how == "abort_all" else {"rid": "held"})
        try:
            return await asyncio.wait_for(task, 60)
        finally:
            await client.post("continue_generation", {})

    output = ask(rollout, abort)
    assert output.stop_reason == "aborted" and output.token_ids == output.log_probs == []


def test_prefixes_are_kept_while_requests_run_and_a_release_ends_them(served):
    rollout, _ = served

    async def release(client):
        async with running(rollout.server, client, "long", 47, True) as task:
            await client.post("pause_generation", {"mode": "in_place"})  # it runs as long as the test needs
        with pytest.raises(RuntimeError, match="vLLM keeps its prefix cache, since requests run"):
            await asyncio.to_thread(rollout.server.call, rollout.forget_prefixes)
        await asyncio.to_thread(rollout.release)
        output = await asyncio.wait_for(task, 60)
        await client.post("continue_generation", {})
        await asyncio.to_thread(rollout.resume, ["weights", "kv_cache"])
        return output

    output = ask(rollout, release)
    assert output.stop_reason == "aborted" and 0 < len(output.token_ids) == len(output.log_probs) < 47
    assert len(ask(rollout, lambda c: c.generate("next", [7], sampled(3), False)).token_ids) == 3


@pytest.mark.parametrize("wakes_first", [False, True])
def test_a_request_that_comes_while_the_engine_sleeps_is_answered_with_the_next_weights(served, wakes_first):
    rollout, engine = served
    expected = ask(rollout, lambda c: c.generate("before", [7], sampled(5), False)).token_ids

    async def early(client):
        await asyncio.to_thread(rollout.release)
        task = asyncio.create_task(client.generate("early", [7], sampled(5), False))
        await until_held(rollout.server, task)
        rollout.has_weights = False  # as on a GPU
        await asyncio.to_thread(rollout.resume, ["weights"])
        rollout.weights_version = 4
        update = functools.partial(rollout.update_weights, engine.get_per_tensor_param())
        wake = functools.partial(rollout.resume, ["kv_cache"])
        await asyncio.to_thread(wake if wakes_first else update)
        assert rollout.server._held and not task.done()
        await asyncio.to_thread(update if wakes_first else wake)
        return await asyncio.wait_for(task, 60)

    output = ask(rollout, early)
    rollout.weights_version = 3
    rollout.resume(["kv_cache"])
    assert (output.token_ids, output.weights_version) == (expected, 4)


def test_a_server_that_closes_holds_no_request():
    rollout = SimpleNamespace(adapter=None, is_awake=False, has_weights=True)
    server = vLLMHttpServer(BrokenEngine("none"), rollout, vocab_size=64, max_model_len=64)

    async def close():
        async with ServerClient(ServerHandle(server.address, server.token)) as client:
            task = asyncio.create_task(client.generate("held", [7], sampled(3), False))
            await until_held(server, task)
            await asyncio.to_thread(server.close)
            return await task

    assert asyncio.run(close()).stop_reason == "aborted"
    assert str(server.error) == "the server is closed"


class BrokenEngine:
    """An engine that fails in a method, or returns an output without tokens."""

    def __init__(self, method):
        self.method, self.rids = method, []

    def add_request(self, rid, *args, **kwargs):
        self.rids.append(rid)

    def abort_request(self, rids, internal):
        if self.method == "abort":
            raise ZeroDivisionError("the engine is broken")

    def step(self):
        time.sleep(0.01)
        if self.method == "step":
            raise ZeroDivisionError("the engine is broken")
        return [SimpleNamespace(request_id=self.rids[0], outputs=[None])] if self.method == "outputs" else []


@pytest.mark.parametrize(
    ("method", "error"), [("step", "ZeroDivisionError"), ("outputs", "AttributeError"), ("abort", "ZeroDivisionError")]
)
def test_an_engine_that_fails_answers_all_requests_with_the_error(method, error):
    rollout = SimpleNamespace(adapter=None, is_awake=True, has_weights=True)
    server = vLLMHttpServer(BrokenEngine(method), rollout, vocab_size=64, max_model_len=64)

    async def use():
        async with ServerClient(ServerHandle(server.address, server.token)) as client:
            first = asyncio.create_task(client.generate("a", [7], sampled(3), False))
            if method == "abort":  # by a client that leaves
                left = asyncio.create_task(client.generate("b", [7], sampled(3), False))
                while len(server.requests) < 2:
                    await asyncio.sleep(0.001)
                left.cancel()
            with pytest.raises(ServerUnreachable, match=f"answered 500: .*{error}"):
                await asyncio.wait_for(first, 10)
            with pytest.raises(ServerUnreachable, match="answered 500: .*the engine failed before"):
                await asyncio.wait_for(client.generate("c", [7], sampled(3), False), 10)
            async with aiohttp.ClientSession() as plain:  # without a token
                async with plain.get(f"http://{server.address}/health") as response:
                    return response.status

    assert asyncio.run(use()) == 503
    assert server.call(lambda: 5) == 5 and not server.requests
    server.engine.method = None
    server.close()


def test_turn_seeds():
    assert turn_seed(5, 0) == 5
    assert len({turn_seed(5, turn) for turn in range(100)} | {turn_seed(6, 1)}) == 101
    assert all(0 <= turn_seed(5, turn) < 2**56 for turn in range(1, 10))
