"""Generations that a weight update interrupts and that continue with the new weights."""

import asyncio

import pytest
import ray
import torch
from omegaconf import OmegaConf
from transformers import AutoModelForCausalLM

from verl.agents.agent_loop.interruptible import InterruptibleServerManager, rest_of
from verl.rollout.replica import ServerHandle, TokenOutput
from verl.rollout.vllm_rollout.vllm_async_server import vLLMReplica
from verl.rollout.weight_parts import pack_parts, read_part
from verl.single_controller.base import ResourcePool
from verl.workers.config import HFModelConfig, RolloutConfig

SETTINGS = {"name": "vllm", "mode": "async", "prompt_length": 64, "response_length": 128, "dtype": "float32",
            "max_num_seqs": 8, "max_num_batched_tokens": 256, "load_format": "dummy"}  # fmt: skip
PROMPT = list(range(5, 45))  # longer than a block of the prefix cache


def manager_of(handles, **rollout):
    config = OmegaConf.create({"actor_rollout_ref": {"rollout": {**SETTINGS, **rollout}}})
    return InterruptibleServerManager(config, handles)


def test_parts_of_weights_keep_names_types_and_values():
    weights = {"a": torch.arange(6, dtype=torch.bfloat16).view(2, 3), "b": torch.tensor(1.5), "c": torch.rand(300)}
    parts = list(pack_parts(iter(weights.items()), limit=64))
    assert [[name for name, _, _ in part.entries] for part in parts] == [["a", "b"], ["c"]]
    read = dict(pair for part in parts for pair in read_part(part))
    assert all(torch.equal(read[name], tensor) and read[name].dtype == tensor.dtype for name, tensor in weights.items())


def test_the_rest_of_a_turn_has_the_rest_of_its_budget_and_another_seed():
    sampling = {"max_tokens": 10, "min_tokens": 4, "seed": 7, "stop_token_ids": [1], "temperature": 0.5}
    assert rest_of(sampling, 0) == sampling
    one, other = rest_of(sampling, 3), rest_of(sampling, 6)
    assert (one["max_tokens"], one["min_tokens"]) == (7, 1) and (other["max_tokens"], other["min_tokens"]) == (4, 0)
    assert len({7, one["seed"], other["seed"]}) == 3 and one == rest_of(sampling, 3)
    assert one["stop_token_ids"] == [1] and one["temperature"] == 0.5


@pytest.mark.parametrize(
    ("parts", "stop", "tokens", "requests"),
    [
        ([(2, "aborted"), (3, "aborted"), (1, "completed")], "completed", 6, 3),
        ([(0, "aborted"), (4, "length")], "length", 4, 2),
        ([(6, "aborted"), (9, "completed")], "length", 6, 1),  # nothing is left of the budget
        ([(2, "completed"), (9, "completed")], "completed", 2, 1),
    ],
)
def test_an_interrupted_turn_is_one_answer(monkeypatch, parts, stop, tokens, requests):
    asked, interrupted, made = [], [], iter(parts)

    async def generate(self, rid, ids, sampling, log_probs):
        count, reason = next(made)
        asked.append((list(ids), sampling))
        first, version = len(ids), len(asked) + 10
        return TokenOutput(token_ids=list(range(first, first + count)), log_probs=[-float(version)] * count,
                           stop_reason=reason, weights_version=version)  # fmt: skip

    monkeypatch.setattr("verl.rollout.replica.ServerClient.generate", generate)
    manager = manager_of([ServerHandle("127.0.0.1:1")])
    manager.on_interrupted = lambda request, done: interrupted.append((request, done))
    manager.spans["r"] = []
    sampling = {"temperature": 1.0, "max_tokens": 6, "logprobs": True, "seed": 3}
    output = asyncio.run(manager.generate("r", prompt_ids=[0, 1], sampling_params=sampling))
    assert output.token_ids == list(range(2, 2 + tokens)) and output.stop_reason == stop
    assert len(output.log_probs) == tokens and len(asked) == requests
    spans = manager.spans["r"]
    assert [count for _, count in spans] == [count for count, _ in parts[:requests] if count]
    assert output.log_probs == [-float(version) for version, count in spans for _ in range(count)]
    assert [len(ids) - 2 + params["max_tokens"] for ids, params in asked] == [6] * requests
    assert len(interrupted) == requests - 1


@pytest.mark.process
def test_tokens_before_and_after_new_weights_have_the_log_probs_of_their_weights(ray_cluster, tiny_llama):
    """The continued part attends to keys of the new weights: none of the old cache is read."""
    replica = vLLMReplica(0, RolloutConfig(**SETTINGS), HFModelConfig(path=tiny_llama, load_tokenizer=False))
    old = AutoModelForCausalLM.from_pretrained(tiny_llama)
    new = AutoModelForCausalLM.from_pretrained(tiny_llama)
    torch.manual_seed(0)
    with torch.no_grad():
        for tensor in new.parameters():
            tensor += 0.3 * torch.randn_like(tensor)
    parts = [ray.put(part) for part in pack_parts(new.state_dict().items(), limit=1 << 16)]
    sampling = {"temperature": 1.0, "top_p": 1.0, "max_tokens": 120, "logprobs": True, "seed": 3, "ignore_eos": True}

    async def use():
        await replica.init_colocated(ResourcePool([1]))
        manager = manager_of([replica.server_handle])
        manager.spans["r"] = []
        server, worker = replica.workers[0].rollout.server, replica.workers[0]
        request = asyncio.create_task(manager.generate("r", prompt_ids=PROMPT, sampling_params=sampling))
        while not any(len(running.output_ids) > 40 for running in list(server.requests.values())):
            await asyncio.sleep(0)
        await manager.clients[0].post("pause_generation", {"mode": "abort"})
        await asyncio.to_thread(worker.update_weights, parts, 5)
        await asyncio.sleep(0.1)
        assert not request.done()  # the continued request waits
        await manager.clients[0].post("continue_generation", {})
        output = await request
        again = await manager.generate("s", prompt_ids=PROMPT, sampling_params={**sampling, "max_tokens": 1})
        await manager.close()
        await replica.close()
        return output, manager.spans["r"], again

    output, spans, again = asyncio.run(use())
    assert len(output.token_ids) == 120 and len(spans) == 2 and spans[1][0] == 5
    first = spans[0][1]
    assert 40 < first < 120 and first + spans[1][1] == 120
    assert again.weights_version == 5
    ids = torch.tensor([PROMPT + output.token_ids])
    with torch.no_grad():
        of_weights = [model(ids).logits[0, len(PROMPT) - 1 : -1].log_softmax(-1) for model in (old, new)]
    expected = [of_weights[i >= first][i, token].item() for i, token in enumerate(output.token_ids)]
    assert output.log_probs == pytest.approx(expected, abs=2e-4)
    assert abs(of_weights[0] - of_weights[1]).max() > 1  # the weights differ enough to be told apart
