"""Checks of the rollout: tools, interactions, parser and template of agent loops; kernels, draft model, packages."""

import asyncio
import importlib.util
import os
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from itertools import islice
from pathlib import Path
from typing import Any

from verl.agents.agent_loop.registry import _agent_loop_registry, loops_in_file
from verl.agents.agent_loop.tool_parser import ToolParser
from verl.agents.gateway.program import missing_file
from verl.agents.interactions.interaction_registry import initialize_interactions_from_config
from verl.agents.message_encoder import ARGUMENT_FORMS, CALL_ID, TURN_WITH_CALLS, USER, MessageEncoder
from verl.agents.tools.base_tool import BaseTool
from verl.agents.tools.runner import ToolRunner
from verl.agents.tools.tool_registry import initialize_tools_from_config, tool_schemas
from verl.config.compose import select
from verl.config.ppo import PPOConfig
from verl.config.rollout import MultiTurnConfig
from verl.data.chat_template import ChatTemplateError
from verl.planning.checks import ROWS_AT_START, ROWS_CHECKED, ModelError, load_model_part
from verl.rollout.replica import RolloutReplicaRegistry
from verl.utils.problems import UNUSED, Problem, absent, one_line, wrong
from verl.utils.tokenizer import check_tokenizers, hf_tokenizer, stop_ids

ROLLOUT = "actor_rollout_ref.rollout"
MULTI_TURN = f"{ROLLOUT}.multi_turn"
# Widths of an attention head that vLLM's CPU kernels are built for; others fail at the first request, not at the start.
CPU_HEAD_DIMS = (32, 48, 64, 80, 96, 112, 128, 160, 192, 224, 256, 512)


def check_agent_loops(config: PPOConfig, findings: Any) -> Iterator[Problem]:
    """Files load, names are known, tools answer their example call, the template allows for added messages."""
    rollout = config.actor_rollout_ref.rollout
    loops = _AgentLoops(config, findings)
    if RolloutReplicaRegistry.serves(rollout):
        yield from loops.check_names()
        loops.load()
        yield from loops.check_template()
        yield from loops.check_rows()
        yield from loops.failures
        return
    needs = {
        "data.environment.max_turns": loops.turns,
        f"{MULTI_TURN}.enable": rollout.multi_turn.enable,
        f"{MULTI_TURN}.tool_config_path": rollout.multi_turn.tool_config_path,
        f"{MULTI_TURN}.function_tool_path": rollout.multi_turn.function_tool_path,
        f"{MULTI_TURN}.interaction_config_path": rollout.multi_turn.interaction_config_path,
        f"{ROLLOUT}.agent.command": rollout.agent.command,
    }
    for key, value in needs.items():
        if value:
            how = f"{ROLLOUT}.mode=async and {ROLLOUT}.name=vllm, or sglang"
            yield wrong(key, f"{key}={value} needs conversations with a server: set {how}.")


class _AgentLoops:
    """The parts of a run's agent loops. `failures` are those that raise; what needs them is not checked then."""

    def __init__(self, config: PPOConfig, findings: Any) -> None:
        self.config, self.findings = config, findings
        self.rollout = config.actor_rollout_ref.rollout
        self.settings = self.rollout.multi_turn
        environment = config.data.environment
        # Of an environment that has several turns, else None.
        self.turns = environment.max_turns if environment.name is not None and environment.max_turns > 1 else None
        self.failures: list[Problem] = []
        self.tools: list[BaseTool] = []

    def _try(self, key: str, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """The result of a call; None if it raises, which is a failure of `key`."""
        try:
            return function(*args, **kwargs)
        except Exception as error:  # the user's own classes may raise anything
            text = one_line(error)
            self.failures.append(wrong(key, f"{key}={one_line(select(self.config, key))}: {text}"))
            # The data sets read the tools, too: the same error under data.train_files says less.
            self.findings.problems[:] = [
                p for p in self.findings.problems if not (p.key.startswith("data.") and p.message.endswith(text))
            ]

    def check_names(self) -> Iterator[Problem]:
        """The server's class, the agent loop and the program exist."""
        agent = self.rollout.agent
        self._try(f"{ROLLOUT}.agent.custom_async_server", RolloutReplicaRegistry.of, self.rollout)
        names = set(_agent_loop_registry)
        if path := agent.agent_loop_config_path:
            names |= set(self._try(f"{ROLLOUT}.agent.agent_loop_config_path", loops_in_file, path) or ())
        self.names = names
        if agent.default_agent_loop not in names:
            key = f"{ROLLOUT}.agent.default_agent_loop"
            yield wrong(key, f"{key}={agent.default_agent_loop} is unknown. Known: {', '.join(sorted(names))}.")
        if agent.command and (missing := missing_file(agent.command)):
            key = f"{ROLLOUT}.agent.command"
            yield wrong(key, f"{key}={agent.command}: {missing} does not exist. Give a program in PATH, or a path.")

    def load(self) -> None:
        """Load tools, which answer their example calls, interactions, and the parser of calls."""
        for name in ("tool_config_path", "function_tool_path"):
            path = {name: self.settings[name]}
            answers = self._try(f"{MULTI_TURN}.{name}", _call_examples, self.settings, **path) or {}
            self.tools += answers
            self.findings.tools |= {tool.name: answer for tool, answer in answers.items()}
        key, path = f"{MULTI_TURN}.interaction_config_path", self.settings.interaction_config_path
        self.interactions = self._try(key, initialize_interactions_from_config, path) if path else None
        tokenizer = self.findings.tokenizer
        self.parser = self._try(f"{MULTI_TURN}.format", ToolParser.get_tool_parser, self.settings.format, tokenizer)

    def check_template(self) -> Iterator[Problem]:
        """The chat template renders the messages that are added, the tools, and calls as the parser reads them."""
        tokenizer, model = self.findings.tokenizer, self.config.actor_rollout_ref.model
        users = self.interactions or self.turns
        if tokenizer is None or not (self.tools or users):
            return
        stops = stop_ids(tokenizer, model.path, self.rollout.stop_token_ids)
        stops += self.parser.stop_token_ids if self.parser else []
        encoder = MessageEncoder(tokenizer, stops, **self.config.data.apply_chat_template_kwargs)
        roles = [role for role, used in (("tool", self.tools), ("user", users)) if used]
        schemas, at_once = tool_schemas(self.tools), self.settings.row_per_turn
        self._try("actor_rollout_ref.model.path", encoder.check, roles, schemas, at_once=at_once)
        if not self.tools or self.failures:
            return
        if encoder.prompt([USER], schemas) == encoder.prompt([USER]):
            name = "tool_config_path" if self.settings.tool_config_path else "function_tool_path"
            key = f"{MULTI_TURN}.{name}"
            what = f"{key}={self.settings[name]}: the chat template leaves out the schemas of the tools"
            how = "set actor_rollout_ref.model.custom_chat_template to one that renders `tools`"
            yield Problem(UNUSED, key, f"{what}. Unless the prompts describe the tools, {how}.")
        elif self.parser:
            key = f"{MULTI_TURN}.format"
            if text := self._try(key, _call_not_read, encoder, self.parser, schemas):
                what = f"{key}={self.settings.format} finds no call in what the chat template writes for one"
                how = "Unless the model calls tools in another format, set its parser."
                yield Problem(UNUSED, key, f"{what}, {one_line(text)!r}. {how}")

    def check_rows(self) -> Iterator[Problem]:
        """Rows have an agent loop that exists and uses the tools, and arguments that the tools take."""
        checked = ROWS_AT_START if self.findings.to_start else ROWS_CHECKED
        known = self.names | set(_agent_loop_registry)  # files of tools may register loops, too
        may_know_others = self.failures or self.rollout.agent.agent_loop_manager_class is not None
        for key, dataset in self.findings.datasets.items():
            for i, row in enumerate(islice(getattr(dataset, "rows", ()), checked)):
                name = str(row.get("agent_name") or self.rollout.agent.default_agent_loop)
                self.findings.agent_loops.add(name)
                if row.get("agent_name") and name not in known and not may_know_others:
                    text = f"agent_name={name!r} is unknown. Known: {', '.join(sorted(known))}"
                    yield wrong(key, f"{key}: {dataset.error(i, text)}.")
                    break
        rows = getattr(self.findings.datasets.get("data.train_files"), "rows", None)
        unnamed = rows and not any(row.get("agent_name") for row in rows)
        uses_none = self.rollout.agent.default_agent_loop == "single_turn_agent"
        if (self.tools or self.interactions) and unnamed and uses_none:
            key = f"{ROLLOUT}.agent.default_agent_loop"
            what = f"{key}=single_turn_agent, which uses neither tools nor interactions, and no row has a value in"
            yield wrong(key, f"{what} column agent_name. Set {key}=tool_agent.")
            return
        if not self.tools or self.failures:
            return
        runner = ToolRunner(self.tools)
        for key, dataset in self.findings.datasets.items():
            for i, row in enumerate(islice(getattr(dataset, "rows", ()), checked)):
                try:
                    extra = row.get("extra_info")
                    runner.conversation(extra.get("tools_kwargs") if isinstance(extra, Mapping) else None)
                except ValueError as error:
                    yield wrong(key, f"{key}: {dataset.error(i, str(error))}.")
                    break


def _call_not_read(encoder: MessageEncoder, parser: ToolParser, schemas: list[dict[str, Any]]) -> str:
    """A call of the first tool as the chat template writes it; empty if the parser reads it, or nothing is written."""
    name = schemas[0]["function"]["name"]
    calls = [{"id": CALL_ID % 0, "type": "function", "function": {"name": name, "arguments": ARGUMENT_FORMS[0]}}]
    begun = encoder.prompt([USER], schemas)
    try:
        ids = encoder.prompt([USER, {**TURN_WITH_CALLS, "tool_calls": calls}], schemas, add_generation_prompt=False)
    except ChatTemplateError:
        return ""
    written = ids[len(os.path.commonprefix([begun, ids])) :]  # which compares lists item by item
    text = encoder.tokenizer.decode(written)
    _, read = asyncio.run(parser.extract_tool_calls(written))
    return text if name in text and name not in [call.name for call in read] else ""


def _call_examples(
    settings: MultiTurnConfig, tool_config_path: str | None = None, function_tool_path: str | None = None
) -> dict[BaseTool, str]:
    """The tools of a file, with the answer of each to config.example_arguments, or that it has none.

    config.example_kwargs are the call's extra_info.tools_kwargs; `settings` (multi_turn) has the limits. After the call
    `calc_reward` and `release` are called, too. Raises ValueError for a call or a method that fails.
    """
    tools = initialize_tools_from_config(tool_config_path, function_tool_path)
    runner = ToolRunner(
        tools, max_tool_response_length=settings.max_tool_response_length, timeout=settings.tool_timeout,
        tool_response_truncate_side=settings.tool_response_truncate_side,
    )  # fmt: skip
    configs = {tool.name: dict(tool.config or {}) for tool in tools}
    kwargs = {name: config.get("example_kwargs") for name, config in configs.items()}
    answers = dict.fromkeys(tools, "not called, it has no example_arguments")

    async def call_examples() -> None:
        async with runner.conversation(kwargs) as conversation:
            for tool in tools:
                if (example := configs[tool.name].get("example_arguments")) is not None:
                    result = await conversation.call(tool.name, dict(example))
                    if result.failure is not None:
                        raise ValueError(f"the call of example_arguments failed: {result.response.text}")
                    answers[tool] = f"answers {one_line(result.response.text)!r} to its example_arguments"
            await conversation.calc_rewards()
        for kind, method in {"reward_failed": "calc_reward", "release_failed": "release"}.items():
            if runner.counts[kind]:
                raise ValueError(f"{method} failed after the call of example_arguments: see the log")

    asyncio.run(call_examples())
    return answers


def check_cpu_heads(config: PPOConfig, findings: Any) -> Iterator[Problem]:
    """A model whose attention no CPU kernel of vLLM knows."""
    if config.actor_rollout_ref.rollout.name != "vllm" or config.trainer.device != "cpu" or findings.hf_config is None:
        return
    model = findings.hf_config.get_text_config().to_dict()
    if "num_attention_heads" not in model or "hidden_size" not in model:
        return
    width = model.get("head_dim") or model["hidden_size"] // model["num_attention_heads"]
    if width not in CPU_HEAD_DIMS:
        key = "actor_rollout_ref.model.path"
        rule = f"{key}={config.actor_rollout_ref.model.path} has attention heads of dimension {width}"
        known = ", ".join(map(str, CPU_HEAD_DIMS))
        remedy = f"Take another model, or {ROLLOUT}.name=hf."
        yield wrong(key, f"{rule}, which vLLM on a CPU (trainer.device=cpu) cannot run: it has {known}. {remedy}")


def check_drafter(config: PPOConfig, findings: Any) -> Iterator[Problem]:
    """A draft model that cannot be read, or whose tokenizer is not the model's."""
    rollout, key = config.actor_rollout_ref.rollout, f"{ROLLOUT}.speculative.draft_path"
    path = rollout.speculative.draft_path
    if rollout.name != "vllm" or path is None:
        return
    if refreshed := rollout.speculative.refresh_every:
        every = f"{ROLLOUT}.speculative.refresh_every"
        if rollout.mode != "sync":
            rule = f"{every}={refreshed} needs {ROLLOUT}.mode=sync, not {rollout.mode}"
            yield wrong(every, f"{rule}: the draft model is trained on the batches that its own rank generates.")
        if config.actor_rollout_ref.actor.ulysses_sequence_parallel_size > 1:
            sharing = "actor_rollout_ref.actor.ulysses_sequence_parallel_size"
            rule = f"{every} does not work with {sharing} above 1: each rank trains the draft model on its own samples."
            yield wrong(every, f"{rule} Set one of them to its default.")
    from transformers import AutoConfig

    try:
        draft = AutoConfig.from_pretrained(path, local_files_only=not findings.to_start).get_text_config()
    except (OSError, ValueError) as error:
        yield absent(key, f"{key}={path} has no config.json that can be read: {one_line(error)}")
        return
    size = findings.hf_config and findings.hf_config.get_text_config().vocab_size
    own = (Path(path).expanduser() / "tokenizer_config.json").is_file()
    if findings.tokenizer is None or not (own or draft.vocab_size != size):
        return  # vLLM reads the draft model's tokenizer only where the sizes differ
    try:
        check_tokenizers(findings.tokenizer, load_model_part(key, path, hf_tokenizer), f"{key}={path}")
    except ModelError as error:
        rule = f"{error} Its vocabulary has {draft.vocab_size} entries and the model's {size}: padding is recognised by"
        yield replace(error.problem, message=f"{rule} the tokenizer. Copy the tokenizer's files into its folder.")
    except ValueError as error:
        yield wrong(key, f"{error} Or set {ROLLOUT}.speculative.method=ngram, without draft_path.")


def check_sglang(config: PPOConfig, findings: Any) -> Iterator[Problem]:
    """SGLang, or the kernels that it imports, are not installed."""
    if config.actor_rollout_ref.rollout.name != "sglang":
        return
    on_cpu = config.trainer.device == "cpu"
    missing = [name for name in ("sglang", "sgl_kernel") if importlib.util.find_spec(name) is None]
    if missing:
        how = "make sglang-env, then .venv-sglang/bin/python" if on_cpu else "pip install -e .[sglang]"
        what = f"{ROLLOUT}.name=sglang: the package {missing[0]} is not installed here"
        yield absent(f"{ROLLOUT}.name", f"{what}. Set up an environment with it: {how}. Or set {ROLLOUT}.name=vllm.")
