"""Bodies that a client of the rollout server may send: each is refused with status 400, and the engine never sees it.

To add one, append its text to a table. An engine in place of vLLM's: it fails in `step` for what was let through.
"""

import asyncio
import json
from types import SimpleNamespace

import aiohttp
import pytest

from verl.rollout.vllm_rollout.request_checks import checked_body, sampling_arguments
from verl.rollout.vllm_rollout.vllm_async_server import vLLMHttpServer

OF_ANOTHER_TYPE = ['"x"', "true", "[]", "{}", "[1]", '{"a": 1}', "NaN", "Infinity", "-Infinity", "1e400", str(2**70),
                   "-" + str(2**70), '"1"', '"NaN"']  # fmt: skip
OUT_OF_RANGE = {
    "temperature": ["-1", "-0.001", "1e308", "-1e-300"],
    "top_p": ["0", "-0.5", "1.0001", "2", "1e-300"],
    "top_k": ["-2", "1.5", "0.0", "2147483648"],
    "repetition_penalty": ["0", "-1", "1e-300", "1e300"],
    **dict.fromkeys(("max_tokens", "max_new_tokens"), ["0", "-1", "1.5"]),
    **dict.fromkeys(("min_tokens", "min_new_tokens"), ["-1", "1.5", "2147483648"]),
    "stop_token_ids": ["5", "[true]", "[1.5]", '["x"]', "[null]", "[-1]", "[[1]]", f"[{2**70}]"],
    **dict.fromkeys(("seed", "sampling_seed"), ["1.5", "-1.5", str(2**63), str(-(2**63) - 1), "1e5"]),
    "ignore_eos": ["1", "0", "1.0"],
}
SAMPLING = [f'{{"{name}": {value}}}' for name, values in OUT_OF_RANGE.items() for value in values]
SAMPLING += [f'{{"{name}": {value}}}' for name in OUT_OF_RANGE for value in OF_ANOTHER_TYPE
             if (name, value) not in {("ignore_eos", "true"), ("stop_token_ids", "[]"), ("stop_token_ids", "[1]")}]
SAMPLING += ['{"logprobs": 5}', '{"n": 100000}', '{"best_of": 9}', '{"": 1}',
             '{"logits_processors": ["os.system"]}', '{"structured_outputs": {"regex": "(a+)+$"}}',
             '{"TEMPERATURE": 1}', '{"bad_words": ["x"]}', '{"extra_args": {}}', '{"__class__": "x"}',
             f'{{"min_new_tokens": 2, "stop_token_ids": {[*range(64)]}}}']  # fmt: skip
BODIES = [
    "[]", "1", '"x"', "true", "nope", "{", '{"a":', "{'a': 1}", "\x00", "[" * 100_000, '{"a":' * 100_000, "\ufeff{",
    '{"input_ids": "7"}', '{"input_ids": 7}', '{"input_ids": {"0": 7}}', '{"input_ids": true}', '{"rid": 5}',
    '{"rid": ["a"]}', '{"rid": {"a": 1}}', '{"rid": true}', '{"sampling_params": []}', '{"sampling_params": 5}',
    '{"sampling_params": "temperature"}', '{"sampling_params": true}', '{"return_logprob": 1}',
    '{"return_logprob": "yes"}', '{"return_logprob": []}', '{"abort_all": 1}', '{"abort_all": "true"}',
    '{"mode": "explode"}', '{"mode": 5}', '{"mode": ["abort"]}', '{"tags": "weights"}', '{"tags": ["all"]}',
    '{"tags": [1]}', '{"tags": [["weights"]]}', '{"model_path": 5}', '{"model_path": ["/"]}',
    '{"weight_version": 5}', '{"weight_version": {}}', '{"abort_all_requests": "no"}', "1" * 5000,
]  # fmt: skip
PROMPTS = [[], [-1], [64], [True], [1.0], [None], ["7"], [[7]], [2**70], [7] * 64]


@pytest.mark.parametrize("text", SAMPLING, ids=str)
def test_sampling_parameters_out_of_their_range_are_refused(text):
    with pytest.raises(ValueError, match="sampling_params"):
        sampling_arguments(json.loads(text), room=40, vocab_size=64)


@pytest.mark.parametrize("text", BODIES, ids=lambda text: text[:40])
def test_fields_of_another_type_are_refused(text):
    with pytest.raises(ValueError):
        checked_body(text.encode())


def test_parameters_at_the_ends_of_their_ranges_become_vllms():
    by_vllm = {"max_tokens": 99, "min_tokens": 0, "seed": 2**63 - 1}
    assert sampling_arguments(by_vllm, 40, 64) == {
        "max_tokens": 40, "min_tokens": 0, "seed": 2**63 - 1, "ignore_eos": False, "stop_token_ids": [],
    }  # fmt: skip
    given = {"temperature": 0, "top_p": 1, "top_k": -1, "repetition_penalty": 1.0, "max_new_tokens": 99,
             "ignore_eos": False, "min_new_tokens": 0, "stop_token_ids": [2, 63, 64],
             "sampling_seed": 2**63 - 1}  # fmt: skip
    assert sampling_arguments(given, room=40, vocab_size=64) == {
        "temperature": 0, "top_p": 1, "top_k": -1, "repetition_penalty": 1.0, "max_tokens": 40, "ignore_eos": False,
        "min_tokens": 0, "stop_token_ids": [2, 63], "seed": 2**63 - 1,
    }  # fmt: skip
    alone = {"max_tokens": 40, "ignore_eos": True, "stop_token_ids": []}
    assert sampling_arguments({"ignore_eos": True, "stop_token_ids": [2]}, 40, 64) == alone
    all_but_one = {"min_tokens": 2, "stop_token_ids": [*range(63)] * 2}
    assert sampling_arguments(all_but_one, 40, 64)["min_tokens"] == 2
    assert sampling_arguments(all_but_one | {"ignore_eos": True}, 40, 63)["stop_token_ids"] == []
    assert checked_body(b'{"rid": "a", "mode": null, "other": 1}') == {"rid": "a", "other": 1}
    assert checked_body(b"") == {}


class OneTokenEngine:
    """Answers every request with token 5."""

    def __init__(self):
        self.running = []

    def add_request(self, rid, *args, **kwargs):
        self.running.append(rid)

    def abort_request(self, rids, internal):
        self.running = [rid for rid in self.running if rid not in rids]

    def step(self):
        answer = SimpleNamespace(token_ids=[5], logprobs=None, finish_reason="stop")
        ended, self.running = self.running, []
        return [SimpleNamespace(request_id=rid, outputs=[answer], num_cached_tokens=0, finished=True) for rid in ended]


@pytest.fixture
def server():
    rollout = SimpleNamespace(adapter=None, is_awake=True, has_weights=True)
    made = vLLMHttpServer(OneTokenEngine(), rollout, vocab_size=64, max_model_len=64)
    yield made
    made.close()


async def post(server, path, body, token=None):
    """(status, reply)"""
    headers = {"Authorization": f"Bearer {token or server.token}"}
    async with aiohttp.ClientSession() as session:
        async with session.post(f"http://{server.address}/{path}", data=body, headers=headers) as reply:
            return reply.status, await reply.json()


@pytest.mark.process
def test_over_http_each_is_400_and_the_server_answers_the_next_request(server):
    async def attack():
        bodies = [*BODIES, *(f'{{"input_ids": [7], "sampling_params": {text}}}' for text in SAMPLING)]
        bodies += [json.dumps({"input_ids": ids}) for ids in PROMPTS]
        for body in bodies:
            assert (await post(server, "generate", body.encode()))[0] == 400, body[:80]
        for path in ("abort_request", "pause_generation", "flush_cache", "resume_memory_occupation"):
            for body in BODIES:
                assert (await post(server, path, body.encode()))[0] == 400, (path, body[:80])
        return await post(server, "generate", b'{"input_ids": [7], "sampling_params": {"sampling_seed": 3}}')

    status, reply = asyncio.run(attack())
    assert status == 200 and reply["output_ids"] == [5] and server.error is None


@pytest.mark.process
@pytest.mark.parametrize("token", ["guess", "gu\u00e9ss", "\u2603", "a" * 5000])
def test_a_wrong_token_is_401_in_any_alphabet(server, token):
    status, reply = asyncio.run(post(server, "generate", b"{}", token))
    assert status == 401 and "Authorization" in reply["error"]["message"]


@pytest.mark.process
@pytest.mark.parametrize("is_open", [False, True])
def test_metrics_need_the_token_unless_a_prometheus_reads_them(is_open):
    made = vLLMHttpServer(OneTokenEngine(), None, vocab_size=64, max_model_len=64, open_metrics=is_open)

    async def statuses():
        async with aiohttp.ClientSession() as session:
            asked = [(path, headers) for path in ("metrics", "health", "model_info")
                     for headers in ({}, {"Authorization": f"Bearer {made.token}"})]  # fmt: skip
            replies = [await session.get(f"http://{made.address}/{path}", headers=given) for path, given in asked]
            return [reply.status for reply in replies]

    try:
        assert asyncio.run(statuses()) == [200 if is_open else 401, 200, 200, 200, 401, 200]
    finally:
        made.close()


@pytest.mark.process
def test_a_held_request_is_not_aborted_by_another_one_with_its_id(server):
    async def twice():
        body = b'{"rid": "a", "input_ids": [7]}'
        await post(server, "pause_generation", b"{}")
        first = asyncio.create_task(post(server, "generate", body))
        while not server._held:
            await asyncio.sleep(0.001)
        second = await post(server, "generate", body)
        await post(server, "continue_generation", b"{}")
        return second, await asyncio.wait_for(first, 10)

    (status, reply), answer = asyncio.run(twice())
    assert status == 400 and "rid='a' is taken" in reply["error"]["message"]
    assert answer[0] == 200 and answer[1]["output_ids"] == [5]


@pytest.mark.process
def test_a_client_that_leaves_ends_its_own_request_only(server):
    server._held["a"] = kept = SimpleNamespace(rid="a")
    server.call(server._abort_abandoned, SimpleNamespace(rid="a", other=True))
    assert server._held.pop("a") is kept
