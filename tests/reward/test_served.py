"""Reward models on vLLM servers: scores are those of a forward by transformers; requests are spread over servers."""

import asyncio
import contextlib
import json
import os
import threading
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest
import torch
from aiohttp import ClientSession
from transformers import AutoModelForSequenceClassification

from tests.helpers.http_server import serving
from tests.helpers.models import make_tokenizer
from tests.helpers.rl_run import compose_run, metrics_rows
from tests.helpers.watched_runs import family
from tests.reward.test_managers import batch
from verl.config.reward_model import RewardModelConfig, RewardModelModelConfig, RewardModelRolloutConfig
from verl.reward.loading import load_served_reward
from verl.reward.served import RewardModelManager, ServedRewardManager
from verl.reward.stream import can_stream
from verl.roles.reward_server import RewardModelServer
from verl.rollout.replica import ServerHandle
from verl.rollout.vllm_rollout.openai_server import LocalVllmServer
from verl.trainer.main_ppo import TaskRunner

pytestmark = pytest.mark.process


@pytest.fixture
def servers():
    """Two servers that answer with their name after their gate has opened."""
    with contextlib.ExitStack() as stack:
        made = [SimpleNamespace(name=name, seen=[], gate=threading.Event(), status=200) for name in "ab"]
        for server in made:

            def answer(request, server=server):
                server.seen.append(request.body["n"])
                server.gate.wait(10)
                assert request.headers["Authorization"] == f"Bearer token of {server.address}"
                return server.status, {"server": server.name, "path": request.path}

            url, _ = stack.enter_context(serving(answer))
            server.address = url.removeprefix("http://")
        yield made
        for server in made:
            server.gate.set()


def group_of(addresses):
    handles = [address and ServerHandle(address, f"token of {address}") for address in addresses]
    return SimpleNamespace(server_handle=lambda: handles, close_rollout=lambda: None)


async def ask(address, n):
    async with ClientSession() as session, session.post(f"http://{address}/classify?x=1", json={"n": n}) as reply:
        return reply.status, await reply.json(content_type=None) if reply.status < 500 else await reply.text()


def test_requests_go_to_the_least_busy_server(servers):
    first, second = servers
    second.gate.set()
    manager = RewardModelManager({}, group_of([server.address for server in servers] + [None]))
    address = manager.get_router_address()

    async def requests():
        held = asyncio.create_task(ask(address, 0))
        while not first.seen:
            await asyncio.sleep(0.01)
        others = [await ask(address, n) for n in (1, 2, 3)]  # the first server is busy all the time
        first.gate.set()
        return await held, others

    held, others = asyncio.run(requests())
    assert held == (200, {"server": "a", "path": "/classify?x=1"})
    assert [answer["server"] for _, answer in others] == ["b"] * 3 and second.seen == [1, 2, 3]
    first.status = 400
    assert asyncio.run(ask(address, 4))[0] == 400  # a refusal is passed on
    manager.close()


def test_a_dead_server_is_named_and_the_router_is_for_this_machine_only(servers):
    alive = servers[0].address
    manager = RewardModelManager({}, group_of(["127.0.0.1:9", "127.0.0.1:9"]))
    status, text = asyncio.run(ask(manager.get_router_address(), 0))
    assert status == 502 and text.startswith("127.0.0.1:9: ClientConnectorError")
    manager.close()
    servers[0].gate.set()
    for addresses in ([None, alive], ["127.0.0.1:9", alive]):
        manager = RewardModelManager({}, group_of(addresses))
        address = manager.get_router_address()
        listening = {c.laddr for c in psutil.Process().net_connections("tcp") if c.status == psutil.CONN_LISTEN}
        assert ("127.0.0.1", int(address.rpartition(":")[2])) in listening
        assert asyncio.run(ask(address, 0)) == (200, {"server": "a", "path": "/classify?x=1"})
        manager.close()


SERVED = {
    "actor_rollout_ref__rollout__temperature": "1.0", "reward_model__enable": "true",
    "reward_model__rollout__name": "vllm", "reward_model__rollout__dtype": "float32",
    "reward_model__rollout__max_model_len": 64, "trainer__save_freq": -1, "trainer__total_training_steps": 1,
}  # fmt: skip


@pytest.mark.slow
def test_every_path_of_a_server_needs_its_token(tiny_llama, tmp_path):
    server = LocalVllmServer(tiny_llama, tmp_path / "log", 32, host="127.0.0.1", token="secret-7f3a")
    try:
        server.wait_ready(300)  # with the token
        for path in ("/v1/completions", "/tokenize", "/classify", "/pause", "/invocations", "/v1/models", "/metrics"):
            for token in ("", "secret", "\u00e9"):
                headers = {"Authorization": f"Bearer {token}"} if token else {}
                assert asyncio.run(status_of(server.url + path, headers)) == 401, path
        assert asyncio.run(status_of(server.url + "/v1/models", {"Authorization": "Bearer secret-7f3a"})) == 405
        assert "secret-7f3a" not in (tmp_path / "log").read_text()
        assert not any("secret-7f3a" in " ".join(p.cmdline()) for p in family(server.pid))
        folder = psutil.Process(server.pid).environ()["PYTHONPATH"].split(os.pathsep)[0]
        assert (Path(folder) / "verl" / "__init__.py").is_file()  # vLLM imports the middleware by its name
    finally:
        server.stop()


async def status_of(url, headers):
    async with ClientSession() as session, session.post(url, json={}, headers=headers) as reply:
        return reply.status


def servers_running(folder):
    return [p for p in psutil.process_iter(["cmdline"]) if str(folder) in " ".join(p.info["cmdline"] or [])]


@pytest.mark.slow
def test_a_discriminative_model_in_a_pool_of_its_own(ray_cluster, tiny_llama, tmp_path):
    torch.manual_seed(3)
    model = AutoModelForSequenceClassification.from_pretrained(tiny_llama, num_labels=1, pad_token_id=0)
    torch.nn.init.normal_(model.score.weight, std=1.0)
    model.save_pretrained(tmp_path / "rm")
    make_tokenizer().save_pretrained(tmp_path / "rm")
    config = compose_run(
        tmp_path / "run", tiny_llama, **SERVED, reward_model__model__path=tmp_path / "rm",
        reward_model__enable_resource_pool="true", reward_model__n_gpus_per_node=1, reward_model__nnodes=1,
        custom_reward_function__path="null", trainer__rollout_data_dir=tmp_path / "dump",
    )  # fmt: skip
    TaskRunner().run(config)
    dumped = [json.loads(line) for line in (tmp_path / "dump" / "1.jsonl").read_text().splitlines()]
    (row,) = metrics_rows(tmp_path / "run")
    assert row["critic/score/mean"] == pytest.approx(sum(r["score"] for r in dumped) / len(dumped), rel=1e-4)
    assert len({round(r["score"], 4) for r in dumped}) > len(dumped) / 2
    tokenizer = make_tokenizer()
    for sample in dumped:
        # the prompt is rendered already; the reward model's template adds the answer and its end
        text = f"{sample['input'].strip()} {sample['output']} <eos>"
        with torch.no_grad():
            expected = model(input_ids=torch.tensor([tokenizer(text)["input_ids"]])).logits[0, 0].item()
        assert sample["score"] == pytest.approx(expected, rel=1e-3, abs=1e-3)
    assert servers_running(tmp_path) == []


JUDGE = """
from aiohttp import ClientSession

async def compute_score(data_source, solution_str, ground_truth, extra_info, reward_router_address,
                        reward_model_tokenizer):
    prompt = reward_model_tokenizer(solution_str)["input_ids"] or [1]
    body = {"prompt": prompt, "max_tokens": 3, "temperature": 0.0, "ignore_eos": True, "return_token_ids": True}
    async with ClientSession() as session:
        async with session.post(f"http://{reward_router_address}/v1/completions", json=body) as reply:
            ids = (await reply.json())["choices"][0]["token_ids"]
    return {"score": float(ids[0]), "length": len(ids)}
"""


@pytest.mark.slow
def test_a_generative_model_judges_by_a_function_of_the_user(tiny_llama, tmp_path):
    judge = tmp_path / "judge.py"
    judge.write_text(JUDGE)
    config = compose_run(
        tmp_path / "run", tiny_llama, **SERVED, reward_model__model__path=tiny_llama, trainer__local="true",
        custom_reward_function__path=judge, trainer__rollout_data_dir=tmp_path / "dump",
    )  # fmt: skip
    TaskRunner().run(config)
    dumped = [json.loads(line) for line in (tmp_path / "dump" / "1.jsonl").read_text().splitlines()]
    assert len(dumped) == 32 and all(row["length"] == 3 for row in dumped)
    by_output = {row["output"]: row["score"] for row in dumped}
    assert len(by_output) > 8 and all(by_output[row["output"]] == row["score"] for row in dumped)
    assert len(set(by_output.values())) > 1
    assert (tmp_path / "run" / "out" / "servers" / "reward_model_0.log").stat().st_size > 0
    assert servers_running(tmp_path) == []


ASKING = """
async def compute_score(data_source, solution_str, ground_truth, extra_info, reward_router_address,
                        reward_model_tokenizer):
    return {"score": float(len(reward_model_tokenizer(solution_str)["input_ids"])), "asked": reward_router_address}
"""
BATCHES = """
from verl.reward.managers import AbstractRewardManager

class OfBatches(AbstractRewardManager):
    pass
"""


def test_the_configured_manager_passes_the_address_of_the_servers(tiny_llama, tmp_path):
    (tmp_path / "asking.py").write_text(ASKING)
    (tmp_path / "batches.py").write_text(BATCHES)
    settings = {"reward_model__model__path": tiny_llama, "custom_reward_function__path": tmp_path / "asking.py"}
    for name in ("naive", "dapo"):
        config = compose_run(tmp_path / name, tiny_llama, **SERVED, **settings, reward_manager__name=name)
        manager = load_served_reward(config, make_tokenizer(), "127.0.0.1:9")
        assert manager.concurrent and can_stream(manager) and manager.settings.enable
        result = manager(batch(("1 2", "7")), return_dict=True)
        assert result["reward_tensor"].sum(1).tolist() == [2.0, 1.0]
        assert all(address.startswith("127.0.0.1:") for address in result["reward_extra_info"]["asked"])
    module = {"reward_manager__source": "importlib", "reward_manager__module__path": tmp_path / "batches.py"}
    settings |= {**module, "reward_manager__name": "OfBatches"}
    config = compose_run(tmp_path / "batches", tiny_llama, **SERVED, **settings)
    with pytest.raises(ValueError, match="reward manager OfBatches cannot pass the address of the served reward model"):
        load_served_reward(config, make_tokenizer(), "127.0.0.1:9")
    config.custom_reward_function.path = None
    assert isinstance(load_served_reward(config, make_tokenizer(), "127.0.0.1:9"), ServedRewardManager)


def test_settings_of_the_server_are_options_of_vllm(tiny_llama, tmp_path, monkeypatch):
    given = []
    from vllm.entrypoints.launchers.cli_args import make_arg_parser
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    monkeypatch.setattr(LocalVllmServer, "__init__", lambda self, *arguments: given.extend(arguments))
    rollout = RewardModelRolloutConfig(
        name="vllm", cudagraph_capture_sizes=[1, 4], expert_parallel_size=2, tensor_model_parallel_size=2,
        limit_images=3, prompt_length=8, response_length=8,
    )  # fmt: skip
    config = RewardModelConfig(rollout=rollout, model=RewardModelModelConfig(path=tiny_llama))
    RewardModelServer(config, tmp_path / "log", discriminative=True, host="127.0.0.1", token="secret", gpus=["5"])
    assert given[5:] == ["secret", ["5"]] and "secret" not in given[3]
    options = make_arg_parser(FlexibleArgumentParser()).parse_args(given[3])
    assert options.compilation_config.cudagraph_capture_sizes == [1, 4] and options.enable_expert_parallel
    assert options.limit_mm_per_prompt == {"image": 3}
