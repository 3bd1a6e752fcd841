"""The processes of environments, on this side of their connections."""

import asyncio
import contextlib
import functools
import itertools
import json
import threading
from collections.abc import AsyncIterator, Callable, Mapping
from typing import Any

from loguru import logger

from verl.agents.environments.hosting import EnvironmentFailed, call_host, describe, serve_conversations
from verl.config.environment import EnvironmentConfig
from verl.reward.pool import FatalGradingError
from verl.utils.children import ChildDied, SpawnedChild, serve

START_S = 300.0  # limit for the import of a library and the start of its environment
ROWS_S = 3600.0  # limit for the rows of both splits


def _start(target: Callable, *arguments: Any) -> SpawnedChild:
    """A process for an environment; what it starts ends with it."""
    # A fork server preloads once, when it starts; this one also starts the grading processes.
    return SpawnedChild(target, *arguments, preload=["verl.reward.pool"], leads_group=True)


class EnvironmentCalls:
    """Calls methods of `verl.agents.environments.hosting.ScoringHost` in a process of its own; use it as `with`."""

    def __init__(self, settings: EnvironmentConfig) -> None:
        self.name = settings.name
        self._child = _start(serve, functools.partial(call_host, json.dumps(dict(settings))))

    def __enter__(self) -> "EnvironmentCalls":
        return self

    def __exit__(self, *error: Any) -> None:
        self._child.end()

    def call(self, seconds: float, method: str, *arguments: Any) -> Any:
        """The result; EnvironmentFailed with the reason if it raises, ends its process or takes too long."""
        try:
            return self._child.call(seconds, method, *arguments)
        except TimeoutError:
            to = "lower data.environment.size" if method == "rows" else "raise data.environment.timeout"
            raise EnvironmentFailed(f"environment {self.name}: {method} took longer than {seconds:g} s: {to}") from None
        except ChildDied as error:
            code = error.exit_code
            raise EnvironmentFailed(f"environment {self.name} ended its process with exit code {code}.") from error


def environment_rows(settings: EnvironmentConfig, files: Mapping[str, list[str]]) -> dict[str, list[dict[str, Any]]]:
    """The rows of both splits, from a process that is started for them; the result is kept for this process.

    Raises EnvironmentFailed.
    """
    return _rows(json.dumps(dict(settings)), json.dumps(dict(files)))


@functools.lru_cache(2)
def _rows(settings: str, files: str) -> dict[str, list[dict[str, Any]]]:
    with EnvironmentCalls(EnvironmentConfig(**json.loads(settings))) as calls:
        return calls.call(ROWS_S, "rows", json.loads(files))


class EnvironmentPool:
    """Processes that hold conversations: data.environment.num_workers, each with at most `concurrency` at a time.

    They are started when they are needed, and replaced when they end. Belongs to one event loop.
    """

    def __init__(self, settings: EnvironmentConfig) -> None:
        self.settings = settings
        self._slots = asyncio.Semaphore(settings.num_workers * settings.concurrency)
        self._processes: list[_ConversationProcess] = []
        self._starts = asyncio.Lock()

    @contextlib.asynccontextmanager
    async def conversation(self, item: dict[str, Any]) -> AsyncIterator["EnvironmentConversation"]:
        """A new conversation about an item, once one of the places is free. FatalGradingError if no process starts."""
        async with self._slots:
            conversation = (await self._process()).open(item)
            try:
                yield conversation
            finally:
                conversation.close()

    async def _process(self) -> "_ConversationProcess":
        """The process with the fewest conversations, or a new one if each has some and another is allowed."""
        async with self._starts:
            self._processes = [process for process in self._processes if process.alive]
            process = min(self._processes, key=lambda process: len(process.conversations), default=None)
            if process is None or (process.conversations and len(self._processes) < self.settings.num_workers):
                process = _ConversationProcess(self.settings, asyncio.get_running_loop())
                self._processes.append(process)  # also if this conversation is cancelled before it is ready
            await process.wait_ready()
            return process

    def close(self) -> None:
        """End all processes."""
        for process in self._processes:
            process.fail("the run has ended")


class _ConversationProcess:
    """A process that runs `serve_conversations`, which describes the messages of both sides."""

    def __init__(self, settings: EnvironmentConfig, loop: asyncio.AbstractEventLoop) -> None:
        self.name, self.child = settings.name, _start(serve_conversations, dict(settings))
        self.loop, self.timeout, self.alive = loop, settings.timeout, True
        self.conversations: dict[int, EnvironmentConversation] = {}
        self._numbers = itertools.count()
        self._ready: asyncio.Future[str | None] = loop.create_future()  # None, or why it cannot start
        threading.Thread(target=self._receive, daemon=True, name="environment").start()

    async def wait_ready(self) -> None:
        """Return once the environment has started; FatalGradingError if it cannot."""
        await asyncio.wait({self._ready}, timeout=START_S)
        problem = self._ready.result() if self._ready.done() else f"did not start within {START_S:g} s"
        if problem is not None:
            self.fail(problem)
            raise FatalGradingError(f"environment {self.name}: {problem}")

    def open(self, item: dict[str, Any]) -> "EnvironmentConversation":
        conversation = EnvironmentConversation(self, next(self._numbers), item)
        self.conversations[conversation.number] = conversation
        self.send("start", conversation.number, item)
        return conversation

    def send(self, kind: str, number: int, content: Any = None) -> None:
        with contextlib.suppress(OSError):  # it ended; `_receive` notices
            self.child.connection.send((kind, number, content))

    def fail(self, reason: str) -> None:
        """End the process; its conversations fail for this reason."""
        if not self.alive:
            return
        self.alive = False
        if not self._ready.done():
            self._ready.set_result(reason)
        for conversation in self.conversations.values():
            conversation.events.put_nowait(("failed", f"{conversation.name}: {reason}"))
        self.child.end()

    def _receive(self) -> None:
        try:
            while True:
                self.loop.call_soon_threadsafe(self._take, *self.child.connection.recv())
        except (EOFError, OSError, TypeError):  # TypeError: the connection was closed while it was read
            with contextlib.suppress(RuntimeError):  # the loop has ended
                self.loop.call_soon_threadsafe(self.fail, "its process ended, for example because of its memory limit")

    def _take(self, kind: str, number: int | None, content: Any) -> None:
        if number is None:  # about the process, not a conversation
            if not self._ready.done():
                self._ready.set_result(None if kind == "ready" else content)
        elif conversation := self.conversations.get(number):
            conversation.events.put_nowait((kind, content))


class EnvironmentConversation:
    """One conversation in a process of an environment, which asks for the model's turns and gives the scores."""

    def __init__(self, process: _ConversationProcess, number: int, item: dict[str, Any]) -> None:
        self.process, self.number = process, number
        self.name = f"environment {process.name} ({describe(item)})"
        self.events: asyncio.Queue[tuple[str, Any]] = asyncio.Queue()

    def reply(self, message: dict[str, Any]) -> None:
        """Give the turn that was asked for: the model's message."""
        self.process.send("reply", self.number, message)

    def end(self, reason: str) -> None:
        """Give no turn, for this reason: the environment scores what it has."""
        self.process.send("over", self.number, reason)

    async def next(self) -> tuple[str, Any]:
        """("ask", (messages, tools)) or ("done", scores).

        Raises EnvironmentFailed if the environment failed, or took longer than data.environment.timeout: then its
        process is killed, and the other conversations of the process fail too.
        """
        try:
            kind, content = await asyncio.wait_for(self.events.get(), self.process.timeout)
        except TimeoutError:
            reason = f"{self.name} took longer than data.environment.timeout={self.process.timeout:g} s: raise it"
            logger.warning("{}; its process is killed", reason)
            self.process.fail(f"its process is killed, since in it {reason}")
            raise EnvironmentFailed(reason) from None
        if kind == "failed":
            raise EnvironmentFailed(content)
        return kind, content

    def close(self) -> None:
        """Forget the conversation; one that has not ended is cancelled."""
        if self.process.conversations.pop(self.number, None) and self.process.alive:
            self.process.send("cancel", self.number)
