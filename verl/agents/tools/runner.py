"""Runs the tool calls of conversations: instances, limits, and error texts for the model."""

import asyncio
import math
from collections import Counter
from collections.abc import Awaitable, Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any
from uuid import uuid4

from jsonschema import Draft202012Validator
from jsonschema.exceptions import SchemaError, best_match
from loguru import logger
from referencing.jsonschema import EMPTY_REGISTRY

from verl.agents.tools.base_tool import BaseTool
from verl.agents.tools.journal import CallKey, ToolJournal
from verl.agents.tools.schemas import ToolResponse, ToolResult, decode_arguments
from verl.reward.pool import FatalGradingError
from verl.utils.user_code import defined_at, full_traceback

#: What may go wrong, as counted in `ToolRunner.counts`. The first five are answered to the model.
FAILURES = (
    "unknown_tool", "malformed_arguments", "invalid_arguments", "timeout", "exception", "reward_failed",
    "release_failed",
)  # fmt: skip
KWARGS = ("create_kwargs", "execute_kwargs", "calc_reward_kwargs", "release_kwargs")
_GRACE_S = 1.0  # for a cancelled call to clean up
_SHOWN = 100  # characters of a tool's name as the model wrote it


def truncate(text: str, length: int, side: str) -> str:
    """At most `length` characters of a text, with a mark where the rest was cut.

    left: cut on the left, the end is kept: "(truncated)..." + the last `length` characters.
    right: cut on the right, the start is kept: the first `length` characters + "...(truncated)".
    middle: length // 2 characters of either end, with "...(truncated)..." between them.
    """
    if len(text) <= length:
        return text
    if side == "left":
        return "(truncated)..." + text[len(text) - length :]
    if side == "right":
        return text[:length] + "...(truncated)"
    half = length // 2
    return text[:half] + "...(truncated)..." + text[len(text) - half :]


class ToolRunner:
    """The tools of one worker, for all its conversations.

    A call that fails is answered to the model with an error text and counted: it never raises, except for
    FatalGradingError (no call can succeed on this machine). `counts` has "calls" and each of FAILURES that occurred.

    Args:
        tools: the tools, whose names differ.
        max_tool_response_length: characters of a response that are kept, error texts included; see `truncate`.
        tool_response_truncate_side: left, right or middle.
        timeout: seconds for each of create, execute, calc_reward and release. Waiting for other calls does not count.
        max_concurrent: calls that run at the same time, in all conversations together.
    """

    def __init__(
        self, tools: Iterable[BaseTool], *, max_tool_response_length: int = 256,
        tool_response_truncate_side: str = "middle", timeout: float = 60.0, max_concurrent: int = 64,
    ) -> None:  # fmt: skip
        self.tools: dict[str, BaseTool] = {tool.name: tool for tool in tools}
        self._validators = {name: _validator(tool) for name, tool in self.tools.items()}
        self.max_length, self.side, self.timeout = max_tool_response_length, tool_response_truncate_side, timeout
        self.counts: Counter[str] = Counter()
        self._slots = asyncio.Semaphore(max_concurrent)
        self._logged: set[tuple[str, str]] = set()

    def conversation(
        self, tools_kwargs: Mapping[str, Any] | None = None, journal: ToolJournal | None = None
    ) -> "ToolConversation":
        """The tools of one conversation, to be used as `async with`; ValueError for kwargs of unknown names.

        Args:
            tools_kwargs: the row's `extra_info.tools_kwargs`: {tool: {create_kwargs, execute_kwargs,
                calc_reward_kwargs, release_kwargs}}. None, which parquet writes for absent keys, counts as absent.
            journal: has the results of calls before the run was started again, and gets those of new ones.
        """
        tools_kwargs = tools_kwargs or {}
        if not isinstance(tools_kwargs, Mapping):
            raise ValueError(f"extra_info.tools_kwargs is {tools_kwargs!r:.80}, not a dict")
        kwargs = {name: given for name, given in tools_kwargs.items() if given is not None}
        for name, given in kwargs.items():
            if name not in self.tools:
                raise ValueError(f"extra_info.tools_kwargs names the tool {name!r}; loaded are: {self._names()}")
            if not isinstance(given, Mapping):
                raise ValueError(f"extra_info.tools_kwargs.{name} is {given!r:.80}, not a dict of {', '.join(KWARGS)}")
            if unknown := [key for key in given if key not in KWARGS]:
                raise ValueError(f"extra_info.tools_kwargs.{name} has {unknown[0]!r}; known are: {', '.join(KWARGS)}")
        return ToolConversation(self, kwargs, journal)

    def check(self, name: str, arguments: str | dict[str, Any]) -> dict[str, Any] | ToolResult:
        """The arguments of a call, decoded and valid for the tool's schema, or the failure."""
        if name not in self.tools:
            text = f"there is no tool {name[:_SHOWN]!r}. Tools: {self._names()}."
            return self.record_failure("unknown_tool", name, text)
        try:
            decoded = decode_arguments(arguments) if isinstance(arguments, str) else arguments
        except ValueError as error:
            text = f"the arguments of {name!r} are not a JSON object: {error}."
            return self.record_failure("malformed_arguments", name, text)
        try:
            wrong = best_match(self._validators[name].iter_errors(decoded))
            if wrong is None:
                return decoded
            reason = f"{'.'.join(map(str, wrong.absolute_path)) or 'arguments'}: {wrong.message}"
        except Exception as error:  # a reference without target in the schema, arguments nested too deeply
            reason = f"{type(error).__name__}: {error}"
        text = f"the arguments of {name!r} do not fit its schema: {reason}."
        return self.record_failure("invalid_arguments", name, text)

    def record_failure(self, kind: str, name: str, text: str, error: BaseException | None = None) -> ToolResult:
        """Count a failure; returns what the model reads. The first of each kind and tool is logged."""
        self.counts[kind] += 1
        logged_as = name if name in self.tools or error is not None else ""  # models invent names without end
        if (kind, logged_as) not in self._logged:
            self._logged.add((kind, logged_as))
            trace = "" if error is None else f"\n{full_traceback(error)}"
            logger.warning(f"tool {name[:_SHOWN]!r}: {text} Further failures of this kind are not logged.{trace}")
        return ToolResult(response=ToolResponse(text=self.cut(f"Error: {text}")), failure=kind)

    def cut(self, text: str) -> str:
        """The text within its length, and encodable: half surrogate pairs are replaced."""
        return truncate(text, self.max_length, self.side).encode("utf-8", "replace").decode()

    def _names(self) -> str:
        return ", ".join(self.tools) or "none"

    async def run_with_timeout(self, call: Awaitable[Any]) -> Any:
        """The result of a coroutine; raises TimeoutError after the limit, even if it ignores its cancellation."""
        task = asyncio.ensure_future(_contained(call))
        task.add_done_callback(lambda t: t.cancelled() or t.exception())  # retrieved, also where nobody waits
        try:
            await asyncio.wait({task}, timeout=self.timeout)
            if not task.done():
                task.cancel()
                await asyncio.wait({task}, timeout=_GRACE_S)
                raise TimeoutError(f"took longer than {self.timeout:g} s")
        except asyncio.CancelledError:
            task.cancel()
            raise
        if task.cancelled():
            raise RuntimeError("the tool cancelled itself")
        return task.result()


async def _contained(call: Awaitable[Any]) -> Any:
    """Await a call; sys.exit() in a tool would end the event loop."""
    try:
        return await call
    except SystemExit as error:
        raise RuntimeError(f"SystemExit: {error}") from error


def _validator(tool: BaseTool) -> Draft202012Validator:
    schema = tool.tool_schema.function.parameters.model_dump(exclude_none=True)
    try:
        Draft202012Validator.check_schema(schema)
    except SchemaError as error:
        where = ".".join(map(str, error.absolute_path))
        raise ValueError(f"tool {tool.name!r}: its parameters are no JSON schema: {where}: {error.message}") from error
    return Draft202012Validator(schema, registry=EMPTY_REGISTRY)  # references are not fetched from the network


@dataclass
class _Instance:
    lock: asyncio.Lock = field(default_factory=asyncio.Lock)
    id: str | None = None
    started: list[str] = field(default_factory=list)  # ids to release, those of a `create` that failed too


class ToolConversation:
    """The tools of one conversation: an instance of each that is called, kept over all turns.

        async with runner.conversation(tools_kwargs) as tools:
            result = await tools.call("calculator", '{"expression": "6 * 7"}')
            rewards = await tools.calc_rewards()

    At the end all instances are released, also after an exception or a cancellation.
    """

    def __init__(
        self, runner: ToolRunner, kwargs: dict[str, Mapping[str, Any]], journal: ToolJournal | None = None
    ) -> None:
        self._runner, self._kwargs, self._journal = runner, kwargs, journal
        self._instances: dict[str, _Instance] = {}
        self._closed = False

    async def __aenter__(self) -> "ToolConversation":
        return self

    async def __aexit__(self, *raised: Any) -> None:
        await self.release()

    async def call(self, name: str, arguments: str | dict[str, Any], key: CallKey | None = None) -> ToolResult:
        """Run one call as the model wrote it: the tool's name and its arguments, as text or decoded.

        `key` names the call in the journal; without it the call is made in any case.
        """
        if self._closed:
            raise RuntimeError(f"call of {name!r} in a conversation whose tools are released")
        runner = self._runner
        runner.counts["calls"] += 1
        parameters = runner.check(name, arguments)
        if isinstance(parameters, ToolResult):
            return parameters
        tool = runner.tools[name]
        instance = self._instances.setdefault(name, _Instance())
        journal = self._journal if key is not None and tool.replayable else None
        earlier = None if journal is None else journal.result(key)
        result = await self._result(tool, instance, parameters, earlier)
        if journal is not None and earlier is None:
            journal.add(key, result)
        return result

    async def _result(
        self, tool: BaseTool, instance: _Instance, parameters: dict[str, Any], earlier: ToolResult | None
    ) -> ToolResult:
        """The outcome of a call with valid parameters, or of the `earlier` one; either creates the instance."""
        runner, name = self._runner, tool.name
        try:
            async with instance.lock:
                if instance.id is None:
                    async with runner._slots:
                        await self._create(tool, instance)
                if earlier is not None:
                    return earlier
                if not tool.parallel_calls:
                    return await self._execute(tool, instance, parameters)
            return await self._execute(tool, instance, parameters)
        except FatalGradingError:
            raise
        except TimeoutError as error:
            return runner.record_failure("timeout", name, f"{name!r} gave no answer in time ({error}).", error)
        except Exception as error:
            return runner.record_failure("exception", name, f"{name!r} raised {type(error).__name__}: {error}.", error)

    def _kwargs_of(self, name: str, method: str) -> dict[str, Any]:
        return dict(self._kwargs.get(name, {}).get(f"{method}_kwargs") or {})

    async def _create(self, tool: BaseTool, instance: _Instance) -> None:
        given = str(uuid4())
        instance.started.append(given)
        made = await self._runner.run_with_timeout(tool.create(given, **self._kwargs_of(tool.name, "create")))
        if not isinstance(made, tuple) or len(made) != 2:
            raise _wrong_type(tool.create, made, "(instance id, ToolResponse)")
        instance.id = made[0]
        instance.started[-1] = made[0]  # the id that the tool chose

    async def _execute(self, tool: BaseTool, instance: _Instance, parameters: dict[str, Any]) -> ToolResult:
        runner, kwargs = self._runner, self._kwargs_of(tool.name, "execute")
        async with runner._slots:
            answer = await runner.run_with_timeout(tool.execute(instance.id, parameters, **kwargs))
        if not isinstance(answer, tuple) or len(answer) != 3 or not isinstance(answer[0], ToolResponse):
            raise _wrong_type(tool.execute, answer, "(ToolResponse, reward, metrics)")
        response, reward, metrics = answer
        if response.text is not None:
            response = response.model_copy(update={"text": runner.cut(response.text)})
        reward = None if reward is None else _finite(reward)
        return ToolResult(response=response, reward=reward, metrics=dict(metrics or {}))

    async def calc_rewards(self) -> dict[str, float | None]:
        """The reward of each tool that was called; None where `calc_reward` failed, which is counted."""
        rewards: dict[str, float | None] = {}
        for name, instance in list(self._instances.items()):
            if instance.id is None:
                continue
            try:
                call = self._runner.tools[name].calc_reward(instance.id, **self._kwargs_of(name, "calc_reward"))
                rewards[name] = _finite(await self._runner.run_with_timeout(call))
            except FatalGradingError:
                raise
            except Exception as error:
                text = f"calc_reward raised {type(error).__name__}: {error}."
                self._runner.record_failure("reward_failed", name, text, error)
                rewards[name] = None
        return rewards

    async def release(self) -> None:
        """Release every instance, each within the time limit; failures are counted. A second call does nothing."""
        self._closed = True
        instances, self._instances = self._instances, {}
        # Shielded: a conversation that is cancelled a second time leaves no instance running either.
        await asyncio.shield(asyncio.gather(*(self._release(*item) for item in instances.items())))

    async def _release(self, name: str, instance: _Instance) -> None:
        for id in instance.started:
            try:
                call = self._runner.tools[name].release(id, **self._kwargs_of(name, "release"))
                await self._runner.run_with_timeout(call)
            except Exception as error:
                if id == instance.id:  # a tool whose `create` failed need not know the id
                    text = f"release raised {type(error).__name__}: {error}."
                    self._runner.record_failure("release_failed", name, text, error)


def _wrong_type(method: Callable[..., Any], returned: Any, expected: str) -> TypeError:
    error = TypeError(f"{method.__name__} returned {returned!r:.100}, not {expected}")
    error.add_note(f"It is defined as {defined_at(method)}.")  # in the log; the model reads the message only
    return error


def _finite(reward: Any) -> float:
    number = float(reward)
    if not math.isfinite(number):
        raise ValueError(f"the reward is {number}")
    return number
