"""Agent loops: conversations with tools against turn-synchronous batches, the HTTP server's cost, rewards in between.

A model that writes by its last token alone follows plans: seeded numbers of calls, lengths of turns and latencies of
tools. Tokens are the same in every mode, which is checked.
"""

import asyncio
import dataclasses
import json
import random
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import ray
import torch
from hydra import compose, initialize_config_module
from omegaconf import DictConfig, OmegaConf

from benchmarks.harness import Row, alternate, ratios, row, say
from benchmarks.rl_rollout import engine_of, one_rank
from examples.demo_runner import ROOT
from tests.helpers.models import save_markov_llama
from verl.agents.agent_loop.manager import AgentLoopManager
from verl.agents.agent_loop.tool_parser import HermesToolParser
from verl.agents.conversation import Conversation
from verl.agents.message_encoder import MessageEncoder
from verl.agents.tools.base_tool import BaseTool
from verl.agents.tools.runner import ToolRunner
from verl.agents.tools.schemas import OpenAIFunctionToolSchema, ToolResponse
from verl.agents.tools.tool_registry import initialize_tools_from_config, tool_schemas
from verl.config.rollout import RolloutConfig
from verl.protocol import DataProto
from verl.reward.managers import NaiveRewardManager
from verl.reward.stream import RewardStream
from verl.rollout import get_rollout_class
from verl.rollout.replica import ServerClient
from verl.rollout.sampling import GenerationRequest, Sampling
from verl.utils.tokenizer import hf_tokenizer, stop_ids

CONVERSATIONS, GROUPS, SHARED, OWN = 64, 8, 128, 32  # words of a prompt: those of all, those of its group
CALLS_SHARE, MOST_CALLS, SHORTEST, LONGEST = 0.57, 6, 8, 48
REPETITIONS, SINGLE_REPETITIONS, SINGLE_TOKENS, REQUESTS = 3, 7, 128, 100
PROMPT, RESPONSE = 192, 512
SIZE = {"hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 4, "num_attention_heads": 4, "head_dim": 64,
        "max_position_embeddings": 1024}  # fmt: skip
CALL = '<tool_call> {"name": "wait", "arguments": {}} </tool_call>'.split()
TEMPLATE = (
    "{% for m in messages %}{% if m['role'] == 'assistant' %}{{ m['content'] }} <eos>{% else %}"
    " {{ m['role'] }} {{ m['content'] }} {% endif %}{% endfor %}"
)


class WaitTool(BaseTool):
    """Waits; the answer is the word with which the next turn begins. `answers` has (seconds, word) of each call."""

    def get_openai_tool_schema(self) -> OpenAIFunctionToolSchema:
        function = {"name": "wait", "description": "Waits.", "parameters": {
            "type": "object", "properties": {}, "required": []}}  # fmt: skip
        return OpenAIFunctionToolSchema(type="function", function=function)

    async def create(self, instance_id: str | None = None, answers: Any = (), **kw: Any) -> tuple[str, ToolResponse]:
        self.answers = {**getattr(self, "answers", {}), instance_id: list(answers)}
        return await super().create(instance_id)

    async def execute(self, instance_id: str, parameters: dict, **kwargs: Any) -> tuple[ToolResponse, float, dict]:
        seconds, word = self.answers[instance_id].pop(0)
        await asyncio.sleep(seconds)
        return ToolResponse(text=word), 0.0, {}


@dataclass
class Plan:
    """One conversation: its question's words, seconds and answer of each call."""

    words: list[str]
    answers: list[tuple[float, str]]

    @property
    def waits(self) -> float:
        """Seconds of all its calls."""
        return sum(seconds for seconds, _ in self.answers)


def plans(seed: int = 0) -> list[Plan]:
    """Geometric numbers of calls, latencies log-normal around 0.3 s within 0.1 to 2 s, even lengths of turns."""
    rng = random.Random(seed)
    made = []
    for i in range(CONVERSATIONS):
        calls = 0
        while calls < MOST_CALLS and rng.random() < CALLS_SHARE:
            calls += 1
        kinds = ["c"] * calls + ["a"]  # a turn that ends with a call, or with the answer
        starts = [f"{kind}{rng.randint(SHORTEST, LONGEST)}" for kind in kinds]
        waits = [min(2.0, max(0.1, rng.lognormvariate(np.log(0.3), 1.0))) for _ in range(calls)]
        group = i % GROUPS
        words = [f"w{(j * 7) % 40}" for j in range(SHARED)] + [f"w{(j * (group + 2)) % 40}" for j in range(OWN)]
        made.append(Plan([*words, starts[0]], list(zip(waits, starts[1:], strict=True))))
    return made


def save_model(folder: Path) -> str:
    """The model: c<n> and a<n> count down to a call or to the end."""
    after = {f"{kind}{n}": f"{kind}{n - 1}" for kind in "ca" for n in range(2, LONGEST + 1)}
    after |= {"c1": CALL[0], "a1": "<eos>"} | dict(zip(CALL, [*CALL[1:], "<eos>"], strict=True))
    words = [*CALL, "user", "tool", "Hello.", "Yes.", *(f"w{n}" for n in range(40))]
    return save_markov_llama(folder, [*after, *(word for word in words if word not in after)], after, TEMPLATE, **SIZE)


def config_of(folder: Path, model: str) -> DictConfig:
    """The trainer's config of the agent loops."""
    tools = folder / "tools.yaml"
    tools.write_text(json.dumps({"tools": [{"class_name": "benchmarks.agents.WaitTool", "config": {}}]}))
    settings = {"name": "vllm", "mode": "async", "prompt_length": PROMPT, "response_length": RESPONSE, "n": 1,
                "multi_turn": {"tool_config_path": str(tools), "journal_tool_calls": False},
                "agent": {"num_workers": 1}}  # fmt: skip
    with initialize_config_module("verl.trainer.config", version_base=None):
        config = compose("ppo_trainer")
    OmegaConf.update(config, "actor_rollout_ref.rollout", settings, force_add=True)
    OmegaConf.update(config, "actor_rollout_ref.model.path", model)
    OmegaConf.update(config, "trainer.default_local_dir", str(folder / "run"))
    return config


def batch(made: list[Plan], agent: str, n: int = 1) -> DataProto:
    """Prompts of the conversations."""
    columns = {
        "raw_prompt": [[{"role": "user", "content": " ".join(plan.words)}] for plan in made],
        "tools_kwargs": [{"wait": {"create_kwargs": {"answers": plan.answers}}} for plan in made],
        "agent_name": [agent] * len(made),
    }
    arrays = {name: np.empty(len(made), dtype=object) for name in columns}
    for name, values in columns.items():
        arrays[name][:] = values
    ids = torch.randint(5, 40, (len(made), PROMPT), generator=torch.Generator().manual_seed(0))
    mask = torch.ones_like(ids)
    tensors = {"input_ids": ids, "attention_mask": mask, "position_ids": mask.cumsum(1) - 1}
    meta = {"n": n, "eos_token_id": 2, "pad_token_id": 0, "global_steps": 1, "do_sample": False}
    return DataProto.from_dict(tensors, arrays, meta)


def greedy_params(rollout: Any, eos_ids: tuple[int, ...], limit: int) -> Any:
    """vLLM's sampling parameters of one greedy answer of at most `limit` tokens."""
    sampling = Sampling(greedy=True, temperature=0.0, top_k=-1, top_p=1.0)
    log_probs = rollout.config.calculate_log_probs
    return rollout._params(GenerationRequest([], 1, sampling, eos_ids, 0, [], limit, log_probs, 1.0), 0)


def turn_by_turn(made: list[Plan], rollout: Any, encoder: MessageEncoder, runner: ToolRunner) -> list[list[int]]:
    """The same conversations in batches: all turns are generated together, then all tools answer, and so on."""
    tokenizer, schemas = encoder.tokenizer, tool_schemas(runner.tools.values())
    parser = HermesToolParser(tokenizer)
    params = greedy_params(rollout, tuple(stop_ids(tokenizer)), rollout.config.response_length)
    held = [Conversation(encoder.prompt([{"role": "user", "content": " ".join(plan.words)}], schemas)) for plan in made]

    async def answer(conversation: Conversation, tools: Any, ids: list[int]) -> bool:
        conversation.add_generated(ids)
        _, calls = parser.parse(tokenizer.decode(ids))
        if calls:
            result = await tools.call(calls[0].name, calls[0].arguments)
            message = {"role": "tool", "content": result.response.text, "name": "wait"}
            conversation.add_given(encoder.encode_appended([message], schemas))
        return bool(calls)

    async def hold() -> None:
        tools = [runner.conversation({"wait": {"create_kwargs": {"answers": plan.answers}}}) for plan in made]
        active = list(range(len(made)))
        while active:
            prompts = [{"prompt_token_ids": held[i].ids} for i in active]
            outputs = rollout.server.call(rollout.llm.generate, prompts, params, use_tqdm=False)
            wrote = zip(active, [list(output.outputs[0].token_ids) for output in outputs], strict=True)
            called = await asyncio.gather(*(answer(held[i], tools[i], ids) for i, ids in wrote))
            active = [i for i, more in zip(active, called, strict=True) if more]
        for one in tools:
            await one.release()

    asyncio.run(hold())
    return [conversation.response_ids for conversation in held]


def tokens_of(output: DataProto) -> list[list[int]]:
    """The ids of each response."""
    lengths = output.batch["attention_mask"][:, PROMPT:].sum(1).tolist()
    return [row[:length].tolist() for row, length in zip(output.batch["responses"], lengths, strict=True)]


def conversations(manager: AgentLoopManager, rollout: Any, tokenizer: Any, folder: Path) -> list[Row]:
    """The plans in turn: agent loops, the same with graded samples, and batches; all must give the same tokens."""
    made = plans()
    asked, schedule = batch(made, "tool_agent"), random.Random(1)
    encoder = MessageEncoder(tokenizer, stop_ids(tokenizer))
    runner = ToolRunner(initialize_tools_from_config(str(folder / "tools.yaml")))
    seen: list[list[list[int]]] = []
    hits, exposed = [], []
    seconds_of = {f"{i}": schedule.uniform(0.05, 0.2) for i in range(len(made))}

    async def judge(data_source: str, solution_str: str, ground_truth: str, extra_info: Any) -> float:
        await asyncio.sleep(seconds_of[ground_truth])
        return 1.0

    def loops() -> None:
        output = manager.generate_sequences(asked)
        hits.append(output.meta_info["metrics"]["agent_loop/prefix_hit_rate"])
        seen.append(tokens_of(output))

    def graded() -> None:
        rewards = NaiveRewardManager(tokenizer, 0, judge)
        rewards.concurrent = True
        stream = RewardStream(rewards)

        def put(index: int, sample: DataProto) -> None:
            truth = {"data_source": "plan", "reward_model": {"ground_truth": f"{index}"}}
            columns = {name: np.array([value], dtype=object) for name, value in truth.items()}
            stream.put(index, DataProto(sample.batch, {**sample.non_tensor_batch, **columns}, {}))

        output = manager.generate_sequences(asked, on_finished=put)
        figures = stream.finish(output)
        exposed.append(figures["timing_s/agent_loop/reward/exposed"] / figures["timing_s/agent_loop/reward/busy"])
        seen.append(tokens_of(output))

    def batches() -> None:
        seen.append(turn_by_turn(made, rollout, encoder, runner))

    works: dict[str, Callable[[], object]] = {"async": loops, "graded": graded, "sync": batches}
    seconds = alternate(works, REPETITIONS, rest=lambda: rollout.server.call(rollout.llm.reset_prefix_cache))
    if any(tokens != seen[0] for tokens in seen):
        raise RuntimeError("the modes did not give the same tokens")
    chain, turns = max(plan.waits for plan in made), sum(len(plan.answers) + 1 for plan in made)
    what = f"{len(made)} conversations, {turns} turns, {sum(map(len, seen[0]))} tokens"
    return [
        row("async_speedup", ratios(seconds["sync"], seconds["async"]), f"times, {what}"),
        row("async_seconds", seconds["async"], "s"),
        row("async_over_longest_wait", [s / chain for s in seconds["async"]], f"times the waits, {chain:.1f} s"),
        row("prefix_hit_rate", hits[1:], "of the prompts' tokens"),
        row("reward_exposed_share", exposed[1:], "of the seconds of grading"),
    ]


def single_turns(manager: AgentLoopManager, rollout: Any) -> Row:
    """Single answers of the same length through agent loops, over the rank's own batch."""
    asked = batch([Plan(["w1"], []) for _ in range(GROUPS)], "single_turn_agent", CONVERSATIONS // GROUPS)
    asked.non_tensor_batch["raw_prompt_ids"] = np.empty(GROUPS, dtype=object)
    asked.non_tensor_batch["raw_prompt_ids"][:] = asked.batch["input_ids"].tolist()
    asked.meta_info["do_sample"] = True
    seen: list[list[list[int]]] = []
    works: dict[str, Callable[[], object]] = {
        "async": lambda: seen.append(tokens_of(manager.generate_sequences(asked))),
        "sync": lambda: seen.append(tokens_of(rollout.generate_sequences(asked))),
    }
    seconds = alternate(works, SINGLE_REPETITIONS, rest=lambda: rollout.server.call(rollout.llm.reset_prefix_cache))
    if any(tokens != seen[0] for tokens in seen) or {len(ids) for ids in seen[0]} != {SINGLE_TOKENS}:
        raise RuntimeError("rollout.mode=async did not give the tokens of rollout.mode=sync")
    what = f"async / sync, {CONVERSATIONS} answers of {SINGLE_TOKENS} tokens"
    return row("single_turn_async_ratio", ratios(seconds["async"], seconds["sync"]), what)


def http_overhead(rollout: Any) -> Row:
    """Requests of one token, one after the other: through the server, less straight to the engine."""
    ids, engine = list(range(5, 37)), rollout.llm.llm_engine
    params = greedy_params(rollout, (), limit=1)

    def direct() -> None:
        for i in range(REQUESTS):
            engine.add_request(f"direct{i}", {"prompt_token_ids": ids}, params)
            while engine.has_unfinished_requests():
                engine.step()

    async def through_http() -> float:
        client = ServerClient(rollout.server_handle)
        sampling = {"temperature": 0.0, "max_tokens": 1}
        await client.generate("first", ids, sampling, False)  # opens the connection
        started = time.perf_counter()
        for i in range(REQUESTS):
            await client.generate(f"http{i}", ids, sampling, False)
        seconds = time.perf_counter() - started
        await client.close()
        return seconds

    over_http: list[float] = []
    works: dict[str, Callable[[], object]] = {
        "http": lambda: over_http.append(asyncio.run(through_http())),
        "direct": lambda: rollout.server.call(direct),
    }
    straight = alternate(works, SINGLE_REPETITIONS)["direct"]
    more = [1000 * (a - b) / REQUESTS for a, b in zip(over_http[1:], straight, strict=True)]
    return row("http_overhead_ms", more, f"ms a request; {1000 * straight[0] / REQUESTS:.1f} ms without HTTP")


def gain() -> list[Row]:
    """What `make demo-tools` gained; no row without its result."""
    file = ROOT / "outputs" / "tools_arithmetic" / "result.json"
    if not file.exists():
        say("tools_gain_points is not measured: run make demo-tools first")
        return []
    points = json.loads(file.read_text())["tools_gain_points"]
    return [row("tools_gain_points", [points], "points of accuracy above GRPO without the tool")]


def served(model: str) -> Any:
    """A rollout with its server, on the weights of a model."""
    engine = engine_of(Path(model))
    config = RolloutConfig(
        name="vllm", mode="async", prompt_length=PROMPT, response_length=RESPONSE, dtype="float32",
        max_num_seqs=CONVERSATIONS,
    )  # fmt: skip
    rollout = get_rollout_class("vllm", "async")(config, engine.model_config, engine.mesh)
    rollout.resume(["weights"])
    rollout.update_weights(engine.get_per_tensor_param())
    rollout.resume(["kv_cache"])
    return rollout


def run() -> list[Row]:
    """All rows. The servers run in this process, the agent loops in one of their own."""
    torch.set_num_threads(1)
    rows = []
    with one_rank() as folder:
        model = save_model(folder / "model")
        starts_ray = not ray.is_initialized()  # the tests of a process share one cluster
        if starts_ray:
            ray.init(num_cpus=2, include_dashboard=False, log_to_driver=False)
        try:
            rollout = served(model)
            manager = manager_of(config_of(folder, model), rollout)
            rows += [*conversations(manager, rollout, hf_tokenizer(model), folder), http_overhead(rollout)]
            manager.close()
            rollout.config = dataclasses.replace(rollout.config, response_length=SINGLE_TOKENS, ignore_eos=True)
            config = config_of(folder, model)
            config.actor_rollout_ref.rollout.update(response_length=SINGLE_TOKENS, ignore_eos=True)
            manager = manager_of(config, rollout)
            rows.append(single_turns(manager, rollout))
            manager.close()
            rollout.close()
        finally:
            if starts_ray:
                ray.shutdown()
    return rows + gain()


def manager_of(config: DictConfig, rollout: Any) -> AgentLoopManager:
    """Agent loops against one server."""
    return AgentLoopManager(config, SimpleNamespace(world_size=1, rollout_server=lambda: [rollout.server_handle]))
