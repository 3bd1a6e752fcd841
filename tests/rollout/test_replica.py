"""Rollout servers with ranks of their own: one engine in this process, served and called directly."""

import asyncio
import urllib.request

import pytest
import ray
import torch
from transformers import AutoModelForCausalLM

from verl.rollout.replica import RolloutMode, RolloutReplica, RolloutReplicaRegistry, ServerClient, host_to_bind
from verl.rollout.vllm_rollout.vllm_async_server import vLLMHttpServerBase, vLLMReplica
from verl.single_controller.base import ResourcePool
from verl.workers.config import AgentLoopConfig, CustomAsyncServerConfig, HFModelConfig, PrometheusConfig, RolloutConfig

SETTINGS = {"name": "vllm", "mode": "async", "prompt_length": 16, "response_length": 48, "dtype": "float32",
            "max_num_seqs": 8, "max_num_batched_tokens": 128, "load_format": "dummy"}  # fmt: skip


class OwnReplica(RolloutReplica):
    pass


@pytest.mark.process
def test_a_replica_of_its_own_answers_with_the_weights_in_the_folder(tiny_llama):
    replica = vLLMReplica(0, RolloutConfig(**SETTINGS), HFModelConfig(path=tiny_llama, load_tokenizer=False))
    prompt = [7, 8, 9]
    with torch.no_grad():
        model = AutoModelForCausalLM.from_pretrained(tiny_llama)
        expected = model.generate(torch.tensor([prompt]), max_new_tokens=8, do_sample=False)[0, 3:].tolist()
    greedy = {"temperature": 0.0, "max_tokens": 8, "ignore_eos": True}

    async def use():
        await replica.init_colocated(ResourcePool([1]))
        assert replica.rollout_mode is RolloutMode.COLOCATED and len(replica.workers) == 1
        async with ServerClient(replica.server_handle) as client:
            first = await client.generate("a", prompt, greedy, False)
            await replica.sleep()
            await replica.wake_up()
            again = await client.generate("b", prompt, greedy, False)
        server = replica.workers[0].rollout.server
        assert isinstance(server, vLLMHttpServerBase)
        assert "{}:{}".format(*server.get_server_address()) == replica.server_address
        named = {"temperature": 0.0, "max_tokens": 8, "ignore_eos": True, "logprobs": 0}
        direct = await server.generate(prompt, named | {"logprobs": True}, "c")
        await server.wait_for_requests_to_drain()
        await server.clear_kv_cache()
        with pytest.raises(ValueError, match="token ids only"):
            await server.generate(prompt, named, "d", image_data=[1])
        await replica.close()
        return first, again, direct

    first, again, direct = asyncio.run(use())
    assert first.token_ids == again.token_ids == direct.token_ids == expected
    assert len(direct.log_probs) == 8 and max(direct.log_probs) < 0


@pytest.mark.process
@pytest.mark.slow
def test_a_standalone_replica_answers_and_counts_its_tokens_for_prometheus(ray_cluster, tiny_llama):
    prometheus = PrometheusConfig(enable=True, served_model_name="policy")
    config = RolloutConfig(**SETTINGS, prometheus=prometheus)
    replica = vLLMReplica(0, config, HFModelConfig(path=tiny_llama, load_tokenizer=False))

    async def use():
        await replica.init_standalone()
        try:
            assert replica.rollout_mode is RolloutMode.STANDALONE and len(replica.workers) == 1
            async with ServerClient(replica.server_handle) as client:
                await client.generate("a", [7, 8, 9], {"max_tokens": 8, "ignore_eos": True}, False)
            url = f"http://{replica.server_address}/metrics"
            return await asyncio.to_thread(lambda: urllib.request.urlopen(url, timeout=10).read().decode())
        finally:
            await replica.close()

    lines = [line for line in asyncio.run(use()).splitlines() if not line.startswith("#")]
    counted = {line.partition("{")[0]: line for line in lines if 'model_name="policy"' in line}
    # The engine's own prompt at its start is counted too: one token, with two in the answer.
    assert float(counted["vllm:generation_tokens_total"].rpartition(" ")[2]) == 8 + 2
    assert float(counted["vllm:prompt_tokens_total"].rpartition(" ")[2]) == 3 + 1


@pytest.mark.parametrize(
    ("alive", "host"), [(None, "127.0.0.1"), ([True], "127.0.0.1"), ([True, False], "127.0.0.1"),
                        ([True, True], "10.0.0.7")]
)  # fmt: skip
def test_servers_are_reached_from_other_nodes_only_where_there_are_some(monkeypatch, alive, host):
    monkeypatch.setattr(ray, "is_initialized", lambda: alive is not None)
    monkeypatch.setattr(ray, "nodes", lambda: [{"Alive": up} for up in alive])
    monkeypatch.setattr(ray.util, "get_node_ip_address", lambda: "10.0.0.7")
    assert host_to_bind() == host


def test_a_pool_of_another_size_is_refused(tiny_llama):
    replica = vLLMReplica(0, RolloutConfig(**SETTINGS), HFModelConfig(path=tiny_llama, load_tokenizer=False))
    with pytest.raises(ValueError, match="the pool has 2 ranks, but an engine of this rollout runs on 1"):
        asyncio.run(replica.init_colocated(ResourcePool([2])))


def test_a_replica_class_of_the_users_own_comes_from_a_file():
    def config(name):
        custom = CustomAsyncServerConfig(path=f"pkg://{__name__}", name=name)
        return RolloutConfig(**SETTINGS, agent=AgentLoopConfig(custom_async_server=custom))

    assert RolloutReplicaRegistry.of(config("OwnReplica")) is OwnReplica
    assert RolloutReplicaRegistry.of(RolloutConfig(**SETTINGS)) is vLLMReplica
    with pytest.raises(TypeError, match="agent.custom_async_server.name='SETTINGS'.*RolloutReplica is needed"):
        RolloutReplicaRegistry.of(config("SETTINGS"))
    with pytest.raises(ValueError, match="rollout.name='hf' has no server for rollout.mode=async. Known: sglang, vllm"):
        RolloutReplicaRegistry.get("hf")
