"""What the processes of environments run: rows, scores of finished answers, conversations."""

import asyncio
import contextlib
import functools
import json
import math
import threading
from collections.abc import Coroutine
from multiprocessing.connection import Connection
from typing import Any

from verl.agents.environments.base import SPLITS, Ask, Environment, Message, NoMoreTurns, digest, load_environment
from verl.reward.pool import Failure
from verl.utils.threads import in_thread
from verl.utils.user_code import full_traceback, user_frame


class EnvironmentFailed(RuntimeError):
    """An environment raised, returned no score, took too long or ended its process: the model did not cause it."""


def describe(item: dict[str, Any]) -> str:
    """An item as messages name it."""
    shown = {name: value for name, value in item.items() if isinstance(value, str | int | float) and name != "prompt"}
    return ", ".join(f"{name} {value}" for name, value in shown.items())


async def converse(environment: Environment, item: dict[str, Any], ask: Ask) -> dict[str, Any]:
    """The scores of one conversation; EnvironmentFailed, with the environment and the item, if there is none."""
    name = f"environment {environment.settings.name} ({describe(item)})"
    try:
        result = await environment.converse(item, ask)
    except EnvironmentFailed as error:
        raise EnvironmentFailed(f"{name}: {error}") from error
    except Exception as error:
        raise EnvironmentFailed(f"{name} {Failure.of(error).text}") from error
    score = result.get("score")
    if not isinstance(score, int | float) or not math.isfinite(score):
        raise EnvironmentFailed(f"{name} gave the score {score!r}; a finite number is needed")
    return result


def answer_with(item: dict[str, Any], text: str, turns: int, strict: bool = True) -> Ask:
    """A model that gives the same answer in each of `turns` turns.

    If `strict`, the first prompt must be that of the row, without tools, else EnvironmentFailed.
    """
    answers = 0

    async def ask(messages: list[Message], tools: list[dict[str, Any]] | None) -> Message:
        nonlocal answers
        if answers == turns:
            raise NoMoreTurns(f"the conversation has had data.environment.max_turns={turns} answers")
        if strict and tools:
            raise EnvironmentFailed("the environment has tools: set data.environment.max_turns to 2 or more")
        if strict and answers == 0 and digest(messages) != item["prompt"]:
            raise EnvironmentFailed(
                "the environment asks something else than the row of the data set, as it does where a reset with the "
                "same seed is random: set data.environment.max_turns to 2 or more, or take another task if the "
                "environment has a single turn (reasoning_gym)"
            )
        answers += 1
        return {"role": "assistant", "content": text, "finish_reason": "stop"}

    return ask


class ScoringHost:
    """An environment of this process, whose event loop runs in a thread of its own."""

    def __init__(self, settings: dict[str, Any]) -> None:
        self._loop = asyncio.new_event_loop()
        threading.Thread(target=self._loop.run_forever, daemon=True, name="environment").start()
        self.environment = load_environment(settings)
        self.run(self.environment.__aenter__())

    def run(self, call: Coroutine[Any, Any, Any]) -> Any:
        """The result of a coroutine of the environment."""
        return asyncio.run_coroutine_threadsafe(call, self._loop).result()

    def score(self, item: dict[str, Any], answer: str, strict: bool = True) -> dict[str, Any]:
        """The scores of an answer, which is given in every turn."""
        ask = answer_with(item, answer, self.environment.settings.max_turns, strict)
        return self.run(converse(self.environment, item, ask))

    def rows(self, files: dict[str, list[str]]) -> dict[str, list[dict[str, Any]]]:
        """The rows of both splits."""
        return {split: self.run(self.environment.rows(split, files[split])) for split in SPLITS}


@functools.cache
def _host(settings: str) -> ScoringHost:
    return ScoringHost(json.loads(settings))


def compute_score(
    data_source: str, solution_str: str, ground_truth: Any, extra_info: dict[str, Any], environment: str
) -> dict[str, Any]:
    """The reward function of rows of an environment: what it gives for the answer, or gave for the conversation.

    `environment` is data.environment as JSON. Runs in the reward processes. Raises EnvironmentFailed.
    """
    known = extra_info.get("rollout_reward_scores")
    if known:
        return dict(known)
    return _host(environment).score(extra_info["environment"], solution_str)


def call_host(settings: str, method: str, *arguments: Any) -> Any:
    """The result of a method of the ScoringHost for these settings, as JSON; EnvironmentFailed if it raises."""
    try:
        return getattr(_host(settings), method)(*arguments)
    except EnvironmentFailed:
        raise
    except Exception as error:
        frame = user_frame(full_traceback(error))
        place = f" (at {frame})" if frame else ""
        raise EnvironmentFailed(f"environment {json.loads(settings)['name']}: {error}{place}") from None


def serve_conversations(connection: Connection, settings: dict[str, Any]) -> None:
    """A process that holds conversations.

    Receives ("start", number, item), ("reply", number, message), ("over", number, text), ("cancel", number, None);
    sends ("ready", None, None), then for each conversation ("ask", number, (messages, tools)) any number of times, and
    at its end ("done", number, scores) or ("failed", number, text).
    """
    asyncio.run(_Conversations(connection, settings).serve())


class _Conversations:
    """The conversations of this process by their numbers: their tasks, and the replies for which they wait."""

    def __init__(self, connection: Connection, settings: dict[str, Any]) -> None:
        self.connection, self.settings = connection, settings
        self.tasks: dict[int, asyncio.Task] = {}
        self.replies: dict[int, asyncio.Future] = {}

    async def serve(self) -> None:
        async with contextlib.AsyncExitStack() as stack:
            try:
                self.environment = load_environment(self.settings)
                await stack.enter_async_context(self.environment)
            except Exception as error:
                self.connection.send(("failed", None, f"{type(error).__name__}: {error}"))
                return
            self.connection.send(("ready", None, None))
            await in_thread(self._receive, asyncio.get_running_loop())

    def _receive(self, loop: asyncio.AbstractEventLoop) -> None:
        """Have messages handled by the event loop until the connection is closed."""
        with contextlib.suppress(EOFError, OSError):
            while True:
                loop.call_soon_threadsafe(self._handle, *self.connection.recv())

    def _handle(self, kind: str, number: int, content: Any) -> None:
        if kind == "start":
            self.tasks[number] = asyncio.create_task(self._run(number, content))
        elif kind == "cancel":
            if task := self.tasks.pop(number, None):
                task.cancel()
        elif (waiting := self.replies.pop(number, None)) and not waiting.done():
            if kind == "over":
                waiting.set_exception(NoMoreTurns(content))
            else:
                waiting.set_result(content)

    async def _run(self, number: int, item: dict[str, Any]) -> None:
        async def ask(messages: list[Message], tools: list[dict[str, Any]] | None) -> Message:
            if number in self.replies:
                raise EnvironmentFailed("two turns of a conversation were asked for at the same time; await each `ask`")
            self.replies[number] = asyncio.get_running_loop().create_future()
            self.connection.send(("ask", number, (messages, tools)))
            return await self.replies[number]

        try:
            answer = ("done", number, await converse(self.environment, item, ask))
        except EnvironmentFailed as error:
            answer = ("failed", number, str(error))
        finally:
            self.replies.pop(number, None)
        if self.tasks.pop(number, None) is not None:
            self.connection.send(answer)
