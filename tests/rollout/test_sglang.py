"""SGLang as the rollout: with a real server (pytest -m sglang), and with the recorded answers of that server."""

import asyncio
import dataclasses
import json
import os
import types
from contextlib import nullcontext
from pathlib import Path

import pytest
import torch
from transformers import LlamaForCausalLM

from tests.helpers.engines import ask, left_padded, make_engine
from tests.helpers.http_exchange import Exchange
from tests.helpers.models import save_tiny_llama
from verl.protocol import DataProto
from verl.rollout.sampling import GenerationRequest
from verl.rollout.server_process import LocalServerError
from verl.rollout.sglang_rollout.async_sglang_server import SAMPLING_NAMES, SGLangHttpServer, SGLangReplica
from verl.rollout.sglang_rollout.sglang_rollout import ServerAdapter
from verl.utils.http_json import ServerUnreachable, ServiceError
from verl.utils.import_utils import is_sglang_available
from verl.workers.config import HFModelConfig, RolloutConfig, ServerConfig

RECORD = Path(__file__).with_name("sglang_exchange.json")  # written by make test-sglang RECORD_SGLANG=1
REAL = pytest.param("real", marks=[pytest.mark.sglang, pytest.mark.process])
VOCABULARY, LONGEST = 64, 416


class RecordedServer(SGLangHttpServer):
    """The real server, and a proxy in front of it that records requests and replies."""

    def launch_server(self):
        self.exchange = Exchange(super().launch_server())
        return self.exchange.handle

    def stop(self, keep_log=False):
        if hasattr(self, "exchange"):
            self.exchange.close()
        super().stop(keep_log)


class ReplayedServer:
    """Answers from the record."""

    def __init__(self, *args):
        self.exchange = Exchange(entries=json.loads(RECORD.read_text()))

    def launch_server(self):
        return dataclasses.replace(self.exchange.handle, vocab_size=VOCABULARY, sampling_names=SAMPLING_NAMES)

    def stop(self):
        self.exchange.close()


@pytest.fixture(scope="module", params=["recorded", REAL])
def served(request, tiny_llama):
    """(rollout with the weights of an engine, that engine)."""
    if request.param == "real" and not is_sglang_available():
        pytest.skip("needs the environment of make sglang-env")
    engine = make_engine(tiny_llama)

    class Rollout(ServerAdapter):
        server_class = RecordedServer if request.param == "real" else ReplayedServer

    lengths = {"prompt_length": 16, "response_length": LONGEST - 16, "max_num_seqs": 32}
    config = RolloutConfig(name="sglang", mode="async", dtype="float32", calculate_log_probs=True,
                           update_weights_bucket_megabytes=1, **lengths)  # fmt: skip
    rollout = Rollout(config, engine.model_config.load(), engine.mesh)
    send(rollout, engine.get_per_tensor_param(), version=3)
    yield rollout, engine
    rollout.close()
    if request.param == "real" and os.environ.get("RECORD_SGLANG"):
        rollout.server.exchange.save(RECORD)


def send(rollout, weights, version):
    rollout.weights_version = version
    asyncio.run(rollout.resume(["weights"]))
    asyncio.run(rollout.update_weights(weights))
    asyncio.run(rollout.resume(["kv_cache"]))


def sampled(n, **more):
    return {"temperature": 1.0, "max_tokens": n, "ignore_eos": True, **more}


def log_probs(module, prompt, answer, temperature=1.0):
    ids = torch.tensor([prompt + answer])
    with torch.no_grad():
        logits = module(ids).logits.float().div(temperature).log_softmax(-1)[0, len(prompt) - 1 : -1]
    return logits.gather(1, torch.tensor(answer)[:, None])[:, 0].tolist()


def test_log_probs_are_those_of_the_trained_module(served):
    rollout, engine = served
    with engine.eval_mode():
        for temperature in (1.0, 0.7):
            params = sampled(20, temperature=temperature)
            output = ask(rollout, lambda c, p=params: c.generate("a", [7, 8, 9], p, True))
            assert len(output.token_ids) == 20 and output.stop_reason == "length" and output.weights_version == 3
            expected = log_probs(engine.module, [7, 8, 9], output.token_ids, temperature)
            assert output.log_probs == pytest.approx(expected, abs=1e-3)


def test_a_stop_token_ends_the_answer_and_counts(served):
    rollout, _ = served
    greedy = {"temperature": 0.0, "max_tokens": 12, "ignore_eos": True}
    free = ask(rollout, lambda c: c.generate("free", [7, 8], greedy, False)).token_ids
    stop = free[4]
    params = {"temperature": 0.0, "max_tokens": 12, "stop_token_ids": [stop]}
    output = ask(rollout, lambda c: c.generate("stop", [7, 8], params, False))
    assert output.token_ids == free[: free.index(stop) + 1] and output.stop_reason == "completed"


def test_a_conversation_may_fill_the_model_length_and_its_prefix_is_cached(served):
    rollout, _ = served
    output = ask(rollout, lambda c: c.generate("full", [7, 9, 11], sampled(LONGEST - 3), False))
    assert len(output.token_ids) == LONGEST - 3
    longer = [7, 9, 11, *output.token_ids[:300]]
    again = ask(rollout, lambda c: c.generate("next", longer, sampled(4), False))
    assert len(again.token_ids) == 4 and again.cached_tokens > 250


def test_what_the_engine_cannot_take_is_refused_and_it_lives_on(served):
    rollout, _ = served
    before = len(rollout.server.exchange.arrived)
    for ids in ([7, VOCABULARY], [-1], [], [True]):
        with pytest.raises(ValueError, match=r"is not a token id of the model \(0..63\)|at least one token id"):
            ask(rollout, lambda c, ids=ids: c.generate("b", ids, sampled(3), False))
    assert len(rollout.server.exchange.arrived) == before  # none was sent
    with pytest.raises(ServiceError, match="longer than the model's context length") as refused:
        ask(rollout, lambda c: c.generate("long", [7] * 600, sampled(3), False))
    assert refused.value.status == 400
    assert len(ask(rollout, lambda c: c.generate("c", [7], sampled(3), False)).token_ids) == 3


def test_an_aborted_request_is_answered_with_its_tokens(served):
    rollout, engine = served

    async def abort(client, rid, body):
        for seconds in (0.5, 2.0, 8.0, 0.1):  # until the abort comes while it generates, which the machine decides
            task = asyncio.create_task(client.generate(rid, [7], sampled(LONGEST - 1), True))
            await asyncio.sleep(seconds)
            await client.post("abort_request", body)
            output = await task
            if output.stop_reason == "aborted" and output.token_ids:
                break
        return output

    for rid, body in (("one", {"rid": "one"}), ("any", {"abort_all": True})):
        output = ask(rollout, lambda c, rid=rid, body=body: abort(c, rid, body))
        assert output.stop_reason == "aborted" and 0 < len(output.token_ids) < LONGEST - 1
        with engine.eval_mode():
            assert output.log_probs == pytest.approx(log_probs(engine.module, [7], output.token_ids), abs=1e-3)


def test_pause_holds_requests_until_generation_continues(served):
    rollout, _ = served

    async def pause(client):
        await client.post("pause_generation", {"mode": "in_place"})
        task = asyncio.create_task(client.generate("held", [7], sampled(8), False))
        await asyncio.sleep(0.3)
        held = not task.done()
        await client.post("continue_generation", {})
        return held, len((await task).token_ids)

    assert ask(rollout, pause) == (True, 8)


def test_new_weights_answer_after_release_and_resume(served, tmp_path):
    rollout, engine = served
    other = LlamaForCausalLM.from_pretrained(save_tiny_llama(tmp_path, seed=1)).eval()
    for weights, version, module in (
        (other.state_dict().items(), 4, other), (engine.get_per_tensor_param(), 3, engine.module),
    ):  # fmt: skip
        asyncio.run(rollout.release())
        asyncio.run(rollout.release())  # the second does nothing
        send(rollout, weights, version)
        asyncio.run(rollout.resume(["weights", "kv_cache"]))  # nothing is released: SGLang would end
        output = ask(rollout, lambda c, v=version: c.generate(f"v{v}", [7, 8, 9], sampled(10), True))
        assert output.weights_version == version and output.cached_tokens == 0
        with engine.eval_mode():
            assert output.log_probs == pytest.approx(log_probs(module, [7, 8, 9], output.token_ids), abs=1e-3)


def test_a_batch_is_answered_in_order(served):
    rollout, engine = served
    ids = torch.tensor([[0, 7, 8], [9, 10, 11]])
    mask = (ids > 0).long()
    meta = {"n": 2, "eos_token_id": 2, "pad_token_id": 0, "temperature": 0.5}
    tensors = {"input_ids": ids, "attention_mask": mask, "position_ids": (mask.cumsum(1) - 1).clamp(min=0)}
    output = asyncio.run(rollout.generate_sequences(DataProto.from_dict(tensors, meta_info=meta))).batch
    assert output["prompts"].tolist() == ids.repeat_interleave(2, 0).tolist()
    for row in range(4):
        prompt = ids[row // 2][mask[row // 2] > 0].tolist()
        answer = output["responses"][row][output["response_mask"][row] > 0].tolist()
        with engine.eval_mode():
            expected = log_probs(engine.module, prompt, answer, 0.5)
        assert output["rollout_log_probs"][row, : len(answer)].tolist() == pytest.approx(expected, abs=1e-3)


def test_the_replica_wakes_and_sleeps_through_the_ranks(served):
    rollout, _ = served
    calls = []
    group = types.SimpleNamespace(
        world_size=1, rollout_server=lambda: [rollout.server_handle], rollout_mode=lambda: calls.append("awake"),
        trainer_mode=lambda: calls.append("asleep"),
    )  # fmt: skip
    replica = SGLangReplica(0, rollout.config, rollout.model_config)

    async def use():
        await replica.init_hybrid(group)
        await replica.sleep()
        await replica.wake_up()
        await replica.clear_kv_cache()

    asyncio.run(use())
    assert calls == ["asleep", "awake"] and replica.server_address == rollout.server_handle.address


def replaying(path, config, *exchanges):
    """A rollout whose server answers each (path, body of a request, status, text) once."""
    entries = [{"path": f"/{place}", "body": body, "status": status, "type": "application/json", "text": text,
                "after": []} for place, body, status, text in exchanges]  # fmt: skip

    class Server(ReplayedServer):
        def __init__(self, *args):
            self.exchange = Exchange(entries=entries)

        def seconds_up(self):
            return 1.0

    class Rollout(ServerAdapter):
        server_class = Server

    return Rollout(config, HFModelConfig(path=path, load_tokenizer=False).load(), None)


def test_an_older_server_gets_weights_without_a_session(tiny_llama):
    rollout = replaying(
        tiny_llama, RolloutConfig(name="sglang", mode="async", free_cache_engine=False),
        ("begin_weight_update", {}, 404, "null"), ("update_weights_from_tensor", {"flush_cache": False}, 200, "null"),
        ("begin_weight_update", {}, 400, "null"),
    )  # fmt: skip
    asyncio.run(rollout.update_weights([("w", torch.ones(3))]))
    assert rollout.server.exchange.arrived == [0, 1]
    with pytest.raises(ServiceError, match="begin_weight_update answered 400"):
        asyncio.run(rollout.update_weights([("w", torch.ones(3))]))
    with pytest.raises(RuntimeError, match="not given the actor's weights"):
        asyncio.run(rollout.generate_sequences(None))
    rollout.close()


@pytest.mark.parametrize(("attempts", "answered"), [(1, False), (2, True)])
def test_a_request_that_fails_is_sent_again(tiny_llama, attempts, answered):
    config = RolloutConfig(name="sglang", free_cache_engine=False, load_format="auto", response_length=4,
                           server=ServerConfig(max_attempts=attempts, retry_delay=0.0))  # fmt: skip
    prompts = left_padded([2], 2)
    params = {"temperature": 1.0, "top_p": 1.0, "top_k": -1, "max_new_tokens": 4, "repetition_penalty": 1.0,
              "stop_token_ids": [2], "ignore_eos": False,
              "sampling_seed": GenerationRequest.from_batch(prompts, config).seeds[0][0]}  # fmt: skip
    body = {"input_ids": prompts.batch["input_ids"][0].tolist(), "sampling_params": params, "return_logprob": False}
    reply = {"output_ids": [7, 2], "meta_info": {"finish_reason": {"type": "stop"}}}
    exchanges = [("generate", body, 503, "null"), ("generate", body, 200, json.dumps(reply))]
    rollout = replaying(tiny_llama, config, *exchanges)
    with nullcontext() if answered else pytest.raises(ServerUnreachable, match="answered 503"):
        output = asyncio.run(rollout.generate_sequences(prompts))
        assert output.batch["responses"].tolist() == [[7, 2, 0, 0]]
    rollout.close()


def test_graphs_statistics_experts_and_quantization_reach_the_server(tiny_llama, tmp_path):
    (tmp_path / "q.json").write_text('{"quant_method": "awq", "bits": 4}')
    model = HFModelConfig(path=tiny_llama, load_tokenizer=False).load()
    server = object.__new__(SGLangHttpServer)
    server.model_config, server.gpus = model, ["0", "1"]
    server.config = RolloutConfig(
        name="sglang", cudagraph_capture_sizes=[1, 8], disable_log_stats=False, tensor_model_parallel_size=2,
        expert_parallel_size=2, quantization_config_file=str(tmp_path / "q.json"),
    )  # fmt: skip
    options = server._options()
    assert (options["cuda_graph_bs"], options["log_level"], options["ep_size"]) == ([1, 8], "info", 2)
    assert options["json_model_override_args"] == {"quantization_config": {"quant_method": "awq", "bits": 4}}


@pytest.mark.process
def test_a_server_that_does_not_start_shows_its_log_and_never_its_key(tiny_llama):
    model = HFModelConfig(path=tiny_llama, load_tokenizer=False).load()
    config = RolloutConfig(name="sglang", engine_kwargs={"sglang": {"no_such_option": [1, 2]}})
    server = SGLangHttpServer(config, model)
    log, handle = server.log_file, server.server_handle
    assert server.folder.stat().st_mode & 0o077 == 0 and handle.vocab_size == VOCABULARY
    with pytest.raises(LocalServerError, match=f"the local SGLang server has ended. Last lines of {log}"):
        server.launch_server()
    text = log.read_text()
    assert "--no-such-option 1 2" in text and "--context-length 1032" in text and handle.token not in text
    assert "--disable-radix-cache" not in text and "--max-total-tokens" in text
    server.stop()
    assert not server.folder.exists()
