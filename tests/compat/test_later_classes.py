"""Classes and signatures that verl has since 0.7.1."""

import asyncio
from types import SimpleNamespace

import pytest
import torch
from omegaconf import OmegaConf

from verl import DataProto
from verl.experimental.agent_loop.agent_loop import AgentLoopBase
from verl.workers.rollout.agent_loop import registry


class Loop09(AgentLoopBase):
    def __init__(
        self, trainer_config, server_manager, tokenizer, processor, dataset_cls, data_config, tools, hf_model_type
    ):
        super().__init__(
            trainer_config, server_manager, tokenizer, processor, dataset_cls, data_config=data_config, tools=tools,
            hf_model_type=hf_model_type,
        )  # fmt: skip

    async def run(self, sampling_params, priority=0, **kwargs):
        return None


class Loop07(AgentLoopBase):
    def __init__(self, trainer_config, server_manager, tokenizer, processor, dataset_cls, dataset_config):
        super().__init__(trainer_config, server_manager, tokenizer, processor, dataset_cls, dataset_config)

    async def run(self, sampling_params, **kwargs):
        return None


class Plain(AgentLoopBase):
    async def run(self, sampling_params, **kwargs):
        return None


def test_a_reward_manager_gets_the_function_as_third_argument():
    from verl.experimental.reward_loop.reward_manager.base import RewardManagerBase

    class Constant(RewardManagerBase):
        async def run_single(self, data):
            assert self.loop is asyncio.get_running_loop()
            return {"reward_score": self.compute_score(), "reward_extra_info": {}}

    manager = Constant(OmegaConf.create({}), None, lambda: 3.0)
    assert asyncio.run(manager.run_single(None))["reward_score"] == 3.0
    assert Constant(OmegaConf.create({}), None, compute_score=None, reward_router_address="a:1").reward_router_address


def test_scores_are_placed_at_the_last_token():
    from verl.experimental.reward_loop.reward_manager.base import RewardManagerBase

    mask = torch.tensor([[1, 1, 1, 0], [1, 1, 1, 1], [1, 1, 0, 0]])
    data = DataProto.from_dict({"responses": torch.zeros(3, 2, dtype=torch.long), "attention_mask": mask})
    scores = RewardManagerBase.assemble_rm_scores(data, [1.0, 2.0, 3.0])
    assert scores.tolist() == [[1, 0], [0, 2], [3, 0]] and scores.dtype == torch.float32


def test_functions_become_tools():
    from verl.tools.function_tool import FunctionTool, function_tool, get_function_tool
    from verl.tools.schemas import ToolResponse

    @function_tool
    def plus(a: int, b: int = 1) -> int:
        """Add two numbers."""
        return a + b

    @function_tool("lookup", schema=None)
    async def find(word: str):
        """Look a word up."""
        return {"word": word}, 0.5, {"hits": 1}

    assert plus(2) == 3 and asyncio.run(find("x"))[1] == 0.5
    tool = get_function_tool("plus")
    assert isinstance(tool, FunctionTool) and tool.fn is plus and not tool.is_async
    assert tool.tool_schema.function.parameters.required == ["a"]
    response, reward, metrics = asyncio.run(tool.execute("i", {"a": "2"}))
    assert isinstance(response, ToolResponse) and (response.text, reward, metrics) == ("3", 0.0, {})
    response, reward, metrics = asyncio.run(get_function_tool("lookup").execute("i", {"word": "x"}))
    assert (response.text, reward, metrics) == ('{"word": "x"}', 0.5, {"hits": 1})
    with pytest.raises(KeyError, match="no @function_tool .* Registered: .*plus"):
        get_function_tool("nobody")
    with pytest.raises(ValueError, match="lookup"):
        function_tool("lookup")(plus)


def test_a_file_offers_its_decorated_functions_alone(tmp_path):
    from verl.tools.function_tool import load_function_tools_from_path
    from verl.tools.tool_registry import load_all_tools

    file = tmp_path / "tools.py"
    file.write_text(
        "from verl.tools.function_tool import function_tool\n\n"
        "def helper(x: int) -> int:\n    \"\"\"No tool.\"\"\"\n    return x\n\n"
        "@function_tool(name='twice')\ndef double(x: int) -> int:\n    \"\"\"Double.\"\"\"\n    return 2 * helper(x)\n"
    )
    (tool,) = load_function_tools_from_path(str(file))
    assert tool.name == "twice" and asyncio.run(tool.call({"x": 2})) == 4
    assert [tool.name for tool in load_all_tools(None, str(file))] == ["twice"]


def test_an_agent_loop_gets_its_data_section_tools_and_model_type(tiny_llama):
    from transformers import AutoTokenizer

    from verl.experimental.agent_loop.agent_loop import DictConfigWrap, ToolListWrap

    class Loop(AgentLoopBase):
        async def run(self, sampling_params, priority=0, **kwargs):
            return None

    config = OmegaConf.create({"data": {"prompt_key": "p"}, "actor_rollout_ref": {"model": {"path": tiny_llama}}})
    manager = SimpleNamespace(rollout_config=SimpleNamespace(stop_token_ids=None))
    loop = Loop(
        DictConfigWrap(config), manager, AutoTokenizer.from_pretrained(tiny_llama), None, dataset_cls=None,
        data_config=DictConfigWrap(config.data), tools=ToolListWrap([1]), hf_model_type="llama",
    )  # fmt: skip
    assert loop.data_config.prompt_key == "p" and loop.tools.tools == [1] and loop.hf_model_type == "llama"
    assert loop.rollout_config is manager.rollout_config


def test_a_worker_constructs_loops_for_every_version(tiny_llama, tmp_path, monkeypatch):
    """Constructors with exactly the arguments of verl 0.9 and of 0.7.0, and one with none of its own."""
    from tests.helpers.configs import compose_ppo
    from verl.experimental.agent_loop.agent_loop import AgentLoopWorker

    module = "tests.compat.test_later_classes"
    functions = tmp_path / "tools.py"
    functions.write_text('def add(a: int, b: int) -> int:\n    """Add."""\n    return a + b\n')
    config = compose_ppo(
        "actor_rollout_ref.rollout.name=vllm", "actor_rollout_ref.rollout.mode=async", "trainer.local=true",
        f"actor_rollout_ref.model.path={tiny_llama}",
        f"actor_rollout_ref.rollout.multi_turn.function_tool_path={functions}",
    )  # fmt: skip
    worker = AgentLoopWorker(config, [])
    names = ("Loop09", "Loop07", "Plain")
    monkeypatch.setattr(registry, "_agent_loop_registry", {name: {"_target_": f"{module}.{name}"} for name in names})
    arguments = {"server_manager": worker.server_manager, **worker.loop_arguments}
    loops = [registry.make_agent_loop(name, **arguments) for name in names]
    assert all(isinstance(loop, AgentLoopBase) and loop.data_config is config.data for loop in loops)
    assert [tool.name for tool in loops[0].tools.tools] == ["add"] and loops[0].hf_model_type == "llama"
    assert loops[2].tools is loops[0].tools and loops[1].tools is None


def test_answers_have_the_fields_of_later_versions():
    from verl.workers.rollout.replica import TokenOutput

    answer = TokenOutput(token_ids=[1], num_preempted=2, extra_fields={"global_steps": 3})
    assert answer.num_preempted == 2 and answer.extra_fields == {"global_steps": 3}
    assert TokenOutput(token_ids=[]).extra_fields == {}


def test_a_manager_of_agent_loops_is_made_from_a_client(monkeypatch):
    from verl.experimental.agent_loop import agent_loop

    made = []
    monkeypatch.setattr(agent_loop.AgentLoopManager, "__init__", lambda self, *args: made.append(args))
    client = SimpleNamespace(worker_group="ranks")
    assert isinstance(agent_loop.AgentLoopManager.create("config", client), agent_loop.AgentLoopManager)

    async def inside():
        return await agent_loop.AgentLoopManager.create(config="config", llm_client=client, teacher_client=None)

    assert isinstance(asyncio.run(inside()), agent_loop.AgentLoopManager)
    assert made == [("config", "ranks")] * 2


def test_requests_take_what_later_versions_pass(monkeypatch):
    from tests.helpers.configs import compose_ppo
    from verl.workers.rollout.llm_server import LLMServerClient
    from verl.workers.rollout.replica import TokenOutput

    config = compose_ppo("actor_rollout_ref.rollout.name=vllm", "actor_rollout_ref.rollout.mode=async")
    client = LLMServerClient(config, load_balancer_handle=None, server_handles=[])

    class Server:
        async def generate(self, rid, prompt_ids, sampling, log_probs):
            return TokenOutput(token_ids=[7])

    client.clients = [Server()]
    request = {"prompt_ids": [1], "sampling_params": {}, "priority": 5, "mm_processor_kwargs": {}, "tag": "x"}
    assert asyncio.run(client.generate("r", **request)).token_ids == [7]
    with pytest.raises(ValueError, match="audio_data"):
        asyncio.run(client.generate("r", prompt_ids=[1], sampling_params={}, audio_data=["a"]))


def test_a_server_manager_knows_all_servers_of_its_ranks(monkeypatch):
    from tests.helpers.configs import compose_ppo
    from verl.compat import agent_loop
    from verl.rollout.replica import ServerHandle
    from verl.workers.rollout.llm_server import LLMServerClient, LLMServerManager

    replicas = [SimpleNamespace(server_handle=ServerHandle(f"h:{i}"), server_address=f"h:{i}") for i in (1, 2)]
    monkeypatch.setattr(agent_loop, "one_replica_per_engine", lambda rollout, model, worker_group: replicas)
    config = compose_ppo("actor_rollout_ref.rollout.name=vllm", "actor_rollout_ref.rollout.mode=async")
    servers = LLMServerManager.create(config, worker_group="ranks")
    assert servers.get_addresses() == ["h:1", "h:2"] and servers.get_replicas() == replicas
    client = servers.get_client()
    assert type(client) is LLMServerClient and client.worker_group == "ranks"
    assert [server.handle.address for server in client.clients] == ["h:1", "h:2"]


def test_workers_and_runner_have_their_later_paths():
    from verl.trainer import main_ppo, main_ppo_v0
    from verl.workers.engine_workers import ActorRolloutRefWorker
    from verl.workers.fsdp_workers import ActorRolloutRefWorker as Earlier

    assert issubclass(ActorRolloutRefWorker, Earlier) or issubclass(Earlier, ActorRolloutRefWorker)
    assert main_ppo_v0.run_ppo is main_ppo.run_ppo and issubclass(main_ppo_v0.BaseTaskRunner, main_ppo.TaskRunner)
