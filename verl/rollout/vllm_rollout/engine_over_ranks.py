"""One vLLM engine over several ranks with one server: the first rank sends its engine's requests to the others.

Every rank has an engine with the same requests in the same order, so that all schedule alike and meet in the
collectives of a step. Messages come before each step, and before what all ranks do between two steps.
"""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future, wait
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from loguru import logger

WAIT = timedelta(days=30)  # for the next message: a server may have nothing to do
COLLECTIVE = ("wake", "free", "forget_prefixes", "load_from_disk")  # the methods that a server calls
JOIN_TIMEOUT_S = 60.0


class LeadingEngine:
    """The engine of the first rank, as a server uses it."""

    def __init__(self, engine: Any, group: dist.ProcessGroup) -> None:
        self._engine, self._group = engine, group
        self._unsent: list[tuple[str, tuple, dict[str, Any]]] = []

    def add_request(self, request_id: str, prompt: Any, params: Any, lora_request: Any = None) -> None:
        """Enter a request, here and, before the next step, on the other ranks."""
        order = {"arrival_time": time.time(), "lora_request": lora_request}
        self._engine.add_request(request_id, prompt, params, **order)
        self._unsent.append(("add_request", (request_id, prompt, params), order))

    def abort_request(self, request_ids: list[str], internal: bool = False) -> None:
        """Take requests out, here and, before the next step, on the other ranks."""
        if request_ids:
            self._engine.abort_request(request_ids, internal=internal)
            self._unsent.append(("abort_request", (request_ids,), {"internal": internal}))

    def step(self) -> list[Any]:
        """One step of all ranks; the outputs."""
        self.send("step")
        return self._engine.step()

    def send(self, kind: str, *args: Any) -> None:
        """Send the others a message: step, run (a call that all ranks make), refuse, rollout (a method), close."""
        message = [(self._unsent, kind, args)]
        self._unsent = []
        dist.broadcast_object_list(message, src=dist.get_global_rank(self._group, 0), group=self._group)


class CollectiveRollout:
    """The rollout of the first rank for its server: the methods in COLLECTIVE run on all ranks."""

    def __init__(self, rollout: Any, engine: LeadingEngine) -> None:
        self._rollout, self._engine = rollout, engine

    def __getattr__(self, name: str) -> Any:
        value = getattr(self._rollout, name)
        if name not in COLLECTIVE:
            return value

        def on_all_ranks(*args: Any) -> Any:
            self._engine.send("rollout", name, *args)
            return value(*args)

        return on_all_ranks


class FollowingEngine:
    """The engine of another rank: a thread that does what the first rank sends."""

    def __init__(self, engine: Any, rollout: Any, group: dist.ProcessGroup, device: int | None) -> None:
        self._engine, self._rollout, self._group = engine, rollout, group
        self._calls: queue.SimpleQueue[tuple[Future, Callable[..., Any], tuple]] = queue.SimpleQueue()
        self._error: Exception | None = None  # the engine's state is unknown, or nobody sends messages any more
        stream = None if device is None else torch.cuda.current_stream(device)
        self._thread = threading.Thread(target=self._run, args=(stream,), daemon=True, name="vllm-engine")
        self._thread.start()

    def call(self, function: Callable[..., Any], *args: Any) -> Any:
        """The result of a call that every rank of the engine makes, in the engine's thread."""
        done: Future = Future()
        self._calls.put((done, function, args))
        while self._thread.is_alive() and not wait([done], timeout=1.0).done:
            pass
        if not done.done():
            raise RuntimeError(f"the first rank of this engine is gone: {self._error or 'it was closed'}")
        return done.result()

    def close(self) -> None:
        """Wait for the end of the thread, which the first rank announces."""
        self._thread.join(JOIN_TIMEOUT_S)

    def _run(self, stream: torch.cuda.Stream | None) -> None:
        if stream is not None:
            torch.cuda.set_device(stream.device)
            torch.cuda.set_stream(stream)
        message: list[Any] = [None]
        with torch.no_grad():
            while True:
                try:
                    dist.broadcast_object_list(message, src=dist.get_global_rank(self._group, 0), group=self._group)
                except Exception as error:
                    self._error = error
                    return
                requests, kind, args = message[0]
                if kind == "close":
                    return
                self._apply(requests, kind, args)
                if kind in ("run", "refuse"):
                    self._answer(kind, args)

    def _apply(self, requests: list[tuple[str, tuple, dict[str, Any]]], kind: str, args: tuple) -> None:
        try:
            for name, given, named in requests:
                getattr(self._engine, name)(*given, **named)
            if kind == "step":
                self._engine.step()
            elif kind == "rollout":
                getattr(self._rollout, args[0])(*args[1:])
        except Exception as error:  # the first rank's engine has the same error, and answers its requests with it
            logger.opt(exception=error).error("vLLM's engine failed")
            self._error = error

    def _answer(self, kind: str, args: tuple) -> None:
        done, function, given = self._calls.get()
        try:
            if kind == "refuse":
                raise RuntimeError(args[0])
            if self._error is not None:
                raise RuntimeError(f"the engine failed before: {self._error}")
            done.set_result(function(*given))
        except BaseException as error:
            done.set_exception(error)
