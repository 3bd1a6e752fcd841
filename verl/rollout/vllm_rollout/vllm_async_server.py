"""vLLM in the rank's process, served over HTTP for conversations that other processes drive."""

from __future__ import annotations

import asyncio
import functools
import hmac
import queue
import secrets
import threading
import time
from collections.abc import Callable, Iterable
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

import torch
from aiohttp import HttpVersion11, web
from aiohttp.web_protocol import RequestHandler
from loguru import logger

from verl.rollout.replica import RolloutReplica, TokenOutput, check_token_ids, token_output
from verl.rollout.vllm_rollout.request_checks import checked_body, sampling_arguments
from verl.rollout.vllm_rollout.vllm_rollout import kept_tokens, sampled_log_probs

START_TIMEOUT_S = 60.0


@dataclass
class _Request:
    """A request in the engine, and what it has generated."""

    rid: str
    input_ids: list[int]
    params: Any
    finish: Callable[[dict[str, Any] | BaseException], None]
    started: float = field(default_factory=time.monotonic)
    output_ids: list[int] = field(default_factory=list)
    log_probs: list[float] = field(default_factory=list)
    kept: list[list[int]] | None = None  # ids that top-k and top-p left at each position; None: not requested
    cached: int = 0


class vLLMHttpServer:  # noqa: N801 (the name that users of verl know)
    """Serves an engine of this process: token ids in, token ids and log-probs out.

    The requests are those of SGLang's native API, so that one client serves both engines; sampling parameters have
    vLLM's names (SGLang's are accepted too: request_checks.SamplingFields).

    POST /generate {rid, input_ids, sampling_params, return_logprob} answers {output_ids, meta_info}; with
    return_kept_tokens, which needs a top_k above 0, meta_info.output_kept_tokens has the ids that top-k and top-p left
    at each position. POST /abort_request {rid} or {abort_all: true}; /pause_generation {mode: abort, retract or
    in_place}, /continue_generation, /flush_cache, /release_memory_occupation {tags}, /resume_memory_occupation {tags},
    /update_weights_from_disk {model_path, weight_version}; GET /health, /model_info, /metrics (vLLM's, for Prometheus).
    Every request but GET /health needs the header `Authorization: Bearer <token>`; with `open_metrics`, GET /metrics
    does not either. A client that closes its connection aborts its request.

    One thread steps the engine and runs what comes through `call` between two steps; another runs the HTTP server.

    Requests wait while `rollout.is_awake` or `rollout.has_weights` is false. Ids from 0 to vocab_size - 1 are accepted;
    others would crash the engine. `device`: the CUDA device of the engine, or None.
    """

    def __init__(
        self, engine: Any, rollout: Any, *, vocab_size: int, max_model_len: int, host: str = "127.0.0.1",
        device: int | None = None, open_metrics: bool = False,
    ) -> None:  # fmt: skip
        self.engine, self.rollout = engine, rollout
        self.open = {"/health", "/metrics"} if open_metrics else {"/health"}
        self.vocab_size, self.max_model_len = vocab_size, max_model_len
        self.weight_version = "default"
        self.token = secrets.token_urlsafe(16)
        self.requests: dict[str, _Request] = {}
        self.error: RuntimeError | None = None  # what requests get once the engine has failed or the server is closed
        self.is_paused = False
        self._held: dict[str, _Request] = {}  # arrived while generation is paused or the engine sleeps
        self._inbox: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._closing = False
        stream = None if device is None else torch.cuda.current_stream(device)
        self._engine_thread = threading.Thread(target=self._run_engine, args=(stream,), daemon=True, name="vllm-engine")
        self._engine_thread.start()
        self._loop = asyncio.new_event_loop()
        self._http_thread = threading.Thread(target=self._loop.run_forever, daemon=True, name="vllm-http")
        self._http_thread.start()
        started = asyncio.run_coroutine_threadsafe(self._listen(host), self._loop)
        self.address = f"{host}:{started.result(START_TIMEOUT_S)}"

    # The engine's thread.

    def call(self, function: Callable[..., Any], *args: Any, idle: bool = False, **kwargs: Any) -> Any:
        """Run a function between two steps of the engine; its result. With `idle`, RuntimeError while requests run."""
        done: Future = Future()

        def work() -> None:
            try:
                if idle:
                    self.check_idle(function.__name__)
                done.set_result(function(*args, **kwargs))
            except BaseException as error:
                done.set_exception(error)

        self._inbox.put(work)
        return done.result()

    def check_idle(self, name: str) -> None:
        """RuntimeError while requests run; in the engine's thread."""
        if self.requests:
            raise RuntimeError(
                f"{name} while {len(self.requests)} requests run; wait for them, or abort them (POST /abort_request "
                "with abort_all=true)."
            )

    def _run_engine(self, stream: torch.cuda.Stream | None) -> None:
        if stream is not None:
            torch.cuda.set_device(stream.device)
            torch.cuda.set_stream(stream)  # vLLM copies results after the work of the stream that it started on
        with torch.no_grad():
            while not self._closing:
                try:
                    if not self.requests or self.is_paused:
                        self._inbox.get()()
                    while not self._inbox.empty():
                        self._inbox.get()()
                    if self.requests and not self.is_paused:
                        self._step()
                except Exception as error:
                    self._fail(error)

    def _fail(self, error: Exception) -> None:
        """Answer all requests with an error, and refuse later ones: the engine's state is unknown."""
        logger.opt(exception=error).error("vLLM's engine failed")
        self.error = RuntimeError(f"the engine failed before: {error}")
        unfinished = [*self.requests.values(), *self._held.values()]
        self._held = {}
        for request in unfinished:
            self._finish(request, error)

    def _step(self) -> None:
        for output in self.engine.step():
            request, answer = self.requests.get(output.request_id), output.outputs[0]
            if request is None:
                continue
            request.output_ids += answer.token_ids
            if answer.logprobs is not None:
                request.log_probs += sampled_log_probs(answer.logprobs)
                if request.kept is not None:
                    request.kept += [ids.tolist() for ids in kept_tokens(answer.logprobs)]
            request.cached = output.num_cached_tokens or request.cached
            if output.finished:
                self._finish(request, self._reply(request, {"type": answer.finish_reason or "stop"}))

    def _reply(self, request: _Request, reason: dict[str, Any]) -> dict[str, Any]:
        meta = {
            "id": request.rid, "finish_reason": reason, "prompt_tokens": len(request.input_ids),
            "completion_tokens": len(request.output_ids), "cached_tokens": request.cached,
            "weight_version": self.weight_version, "e2e_latency": time.monotonic() - request.started,
        }  # fmt: skip
        if request.params.logprobs is not None:
            pairs = zip(request.log_probs, request.output_ids, strict=True)
            meta["output_token_logprobs"] = [[value, token, None] for value, token in pairs]
        if request.kept is not None:
            meta["output_kept_tokens"] = request.kept
        return {"output_ids": request.output_ids, "meta_info": meta}

    def _finish(self, request: _Request, result: dict[str, Any] | BaseException) -> None:
        self.requests.pop(request.rid, None)
        request.finish(result)

    def _add(self, request: _Request) -> None:
        if self.error is not None:
            return request.finish(self.error)
        if request.rid in self.requests or request.rid in self._held:
            return request.finish(ValueError(f"rid={request.rid!r} is taken by a request that runs or waits"))
        if not self._serves():
            if not self._held and not self.is_paused:
                logger.warning(f"{self.address}: requests wait until the engine is awake and has its weights")
            self._held[request.rid] = request
            return None
        try:
            prompt, adapter = {"prompt_token_ids": request.input_ids}, self.rollout.adapter
            self.engine.add_request(request.rid, prompt, request.params, lora_request=adapter)
        except Exception as error:
            return request.finish(ValueError(str(error)))
        self.requests[request.rid] = request

    def _abort(self, rids: Iterable[str]) -> list[str]:
        """Finish requests, running or held, with what they have generated; their ids."""
        rids = set(rids)
        held = [self._held.pop(rid) for rid in rids & self._held.keys()]
        running = [self.requests[rid] for rid in rids & self.requests.keys()]
        self.engine.abort_request([request.rid for request in running], internal=False)
        for request in held + running:
            self._finish(request, self._reply(request, {"type": "abort", "message": "aborted"}))
        return [request.rid for request in held + running]

    def _abort_all(self) -> list[str]:
        return self._abort([*self.requests, *self._held])

    def _abort_abandoned(self, request: _Request) -> None:
        """The client of a request is gone; a request of the same id that was accepted before it goes on."""
        if request in (self.requests.get(request.rid), self._held.get(request.rid)):
            self._abort([request.rid])

    def _pause(self, mode: str) -> None:
        self.is_paused = True
        if mode == "abort":
            self._abort(list(self.requests))

    def _continue(self) -> None:
        self.is_paused = False
        self._add_held()

    def _serves(self) -> bool:
        return not self.is_paused and self.rollout.is_awake and self.rollout.has_weights

    def _add_held(self) -> None:
        if self._serves():
            held, self._held = self._held, {}
            for request in held.values():
                self._add(request)

    def abort_all_requests(self, reset_prefix_cache: bool = True) -> dict[str, Any]:
        """Finish all requests with what they have generated."""
        aborted = self.call(self._abort_all)
        if reset_prefix_cache:
            self.call(self.rollout.forget_prefixes)
        return {"aborted_count": len(aborted), "request_ids": aborted}

    def abort_request(self, request_id: str, reset_prefix_cache: bool = True) -> dict[str, Any]:
        """Finish one request with what it has generated."""
        if not self.call(self._abort, [request_id]):
            return {"aborted": False, "error": f"request {request_id!r} is not running"}
        return {"aborted": True, "request_id": request_id}

    # For callers in this process, from any event loop.

    def get_server_address(self) -> tuple[str, int]:
        """Host and port."""
        host, _, port = self.address.rpartition(":")
        return host, int(port)

    async def generate(
        self, prompt_ids: list[int], sampling_params: dict[str, Any], request_id: str,
        image_data: list[Any] | None = None, video_data: list[Any] | None = None,
    ) -> TokenOutput:  # fmt: skip
        """The answer to one prompt. `sampling_params`: those of POST /generate, logprobs and kept_tokens (bool)."""
        if image_data or video_data:
            raise ValueError("leave image_data and video_data out: rollout servers take token ids only")
        sampling = dict(sampling_params)
        log_probs = bool(sampling.pop("logprobs", False))
        masks = bool(sampling.pop("kept_tokens", False))
        params = self._params(prompt_ids, sampling, log_probs, masks)
        return token_output(await self._submit(request_id, prompt_ids, params, masks), log_probs, self.address)

    async def wake_up(self) -> None:
        """Bring the engine's weights and cache back into memory; it does not keep weights on a GPU."""
        await asyncio.to_thread(self.call, self.rollout.wake, ["weights", "kv_cache"])

    async def sleep(self) -> None:
        """Free the memory of the engine's weights and cache. RuntimeError while requests run."""
        await asyncio.to_thread(self.call, self.rollout.free, idle=True)

    async def clear_kv_cache(self) -> None:
        """Forget cached prefixes. RuntimeError while requests run."""
        await asyncio.to_thread(self.call, self.rollout.forget_prefixes, idle=True)

    async def wait_for_requests_to_drain(self) -> None:
        """Wait until no request runs."""
        while self.requests:
            await asyncio.sleep(0.02)

    # The HTTP thread.

    async def _listen(self, host: str) -> int:
        app = web.Application(middlewares=[self._authorize], client_max_size=1 << 28)
        app.router.add_get("/health", self._health)
        app.router.add_get("/metrics", self._metrics)
        app.router.add_get("/model_info", self._model_info)
        app.router.add_post("/generate", self._generate)
        posts = {
            "abort_request": lambda b: self._abort_all() if b.get("abort_all") else self._abort([b.get("rid")]),
            "pause_generation": lambda b: self._pause(b.get("mode", "abort")),
            "continue_generation": lambda b: self._continue(),
            "flush_cache": lambda b: self._idle(self.rollout.forget_prefixes),
            "release_memory_occupation": lambda b: self._idle(self.rollout.free),
            "resume_memory_occupation": lambda b: self.rollout.wake(b.get("tags") or ["weights", "kv_cache"]),
            "update_weights_from_disk": self._update_from_disk,
        }
        for name, function in posts.items():
            app.router.add_post(f"/{name}", self._post_handler(function))
        self._runner = web.AppRunner(app, handler_cancellation=True, access_log=None)
        await self._runner.setup()
        connect = functools.partial(_Connection, self._runner.server, loop=self._loop, access_log=None)
        self._listener = await self._loop.create_server(connect, host, 0, backlog=128)
        return self._listener.sockets[0].getsockname()[1]

    @web.middleware
    async def _authorize(self, request: web.Request, handler: Callable) -> web.StreamResponse:
        given = request.headers.get("Authorization", "").encode("utf-8", "surrogateescape")
        wanted = f"Bearer {self.token}".encode()
        if request.path not in self.open and not hmac.compare_digest(given, wanted):
            return _error(401, "the header Authorization: Bearer <token> of this run is missing or wrong")
        try:
            return await handler(request)
        except ValueError as error:
            return _error(400, str(error))
        except web.HTTPException:
            raise
        except Exception as error:
            return _error(500, f"{type(error).__name__}: {error}")

    async def _health(self, request: web.Request) -> web.Response:
        return web.Response(status=200 if self.error is None and self._engine_thread.is_alive() else 503)

    async def _metrics(self, request: web.Request) -> web.Response:
        from prometheus_client import CONTENT_TYPE_LATEST, generate_latest

        return web.Response(body=generate_latest(), headers={"Content-Type": CONTENT_TYPE_LATEST})

    async def _model_info(self, request: web.Request) -> web.Response:
        info = {"vocab_size": self.vocab_size, "max_model_len": self.max_model_len, "engine": "vllm"}
        return web.json_response(info | {"weight_version": self.weight_version, "running": len(self.requests)})

    def _post_handler(self, function: Callable[[dict[str, Any]], Any]) -> Callable:
        async def handler(request: web.Request) -> web.Response:
            body = checked_body(await request.read())
            result = await asyncio.to_thread(self.call, function, body)
            return web.json_response(result if isinstance(result, dict | list) else None)

        return handler

    def _idle(self, function: Callable[[], Any]) -> None:
        if self.requests:
            raise ValueError(f"{len(self.requests)} requests run; abort them first")
        function()

    def _update_from_disk(self, body: dict[str, Any]) -> dict[str, Any]:
        if (running := len(self.requests)) and not body.get("abort_all_requests"):
            return {"success": False, "message": f"{running} requests run", "num_paused_requests": 0}
        if "model_path" not in body:
            raise ValueError("model_path is missing: the folder of the weights")
        self.rollout.weights_on_disk(body["model_path"])  # before anything is changed
        if body.get("abort_all_requests"):
            self._abort_all()
        self.rollout.load_from_disk(body["model_path"])
        self.weight_version = body.get("weight_version") or self.weight_version
        self._add_held()
        return {"success": True, "message": "", "num_paused_requests": 0}

    async def _generate(self, http: web.Request) -> web.Response:
        body = checked_body(await http.read())
        ids, rid = body.get("input_ids"), body.get("rid") or secrets.token_hex(16)
        masks = body.get("return_kept_tokens", False)
        params = self._params(ids, body.get("sampling_params", {}), body.get("return_logprob", False), masks)
        return web.json_response(await self._submit(rid, ids, params, masks))

    async def _submit(self, rid: str, ids: list[int], params: Any, masks: bool = False) -> dict[str, Any]:
        """The reply to a request; raises what the engine raised. A request whose task is cancelled is aborted."""
        loop = asyncio.get_running_loop()
        reply: asyncio.Future = loop.create_future()

        def finish(result: dict[str, Any] | BaseException) -> None:
            with suppress(RuntimeError):  # the caller's loop is closed: nobody waits for this request
                loop.call_soon_threadsafe(_resolve, reply, result)

        request = _Request(rid, ids, params, finish, kept=[] if masks else None)
        self._inbox.put(lambda: self._add(request))
        try:
            result = await reply
        except asyncio.CancelledError:  # the client is gone
            self._inbox.put(lambda: self._abort_abandoned(request))
            raise
        if isinstance(result, BaseException):
            raise result
        return result

    def _params(self, ids: Any, sampling: dict[str, Any], log_probs: bool, masks: bool = False) -> Any:
        """vLLM's parameters of a request; ValueError for what the engine cannot take."""
        from vllm import SamplingParams
        from vllm.sampling_params import RequestOutputKind

        check_token_ids(ids, self.vocab_size)
        room = self.max_model_len - len(ids)
        if room < 1:
            limit = f"rollout.max_model_len={self.max_model_len}"
            raise ValueError(f"input_ids has {len(ids)} tokens; {limit} leaves no room for an answer")
        arguments = sampling_arguments(sampling, room, self.vocab_size)
        top_k = arguments.get("top_k", -1)
        if masks and top_k < 1:
            raise ValueError(f"return_kept_tokens=true needs sampling_params.top_k above 0, not {top_k}")
        try:
            return SamplingParams(
                detokenize=False, output_kind=RequestOutputKind.DELTA, flat_logprobs=True,
                logprobs=min(top_k, self.vocab_size) if masks else 0 if log_probs else None, **arguments,
            )  # fmt: skip
        except Exception as error:  # vLLM's own validation
            raise ValueError(f"sampling_params: {error}") from error

    def close(self) -> None:
        """Abort what runs and end both threads; the engine itself stays as it is."""
        self.error = RuntimeError("the server is closed")  # for requests that come from now on
        self.call(self._abort_all)
        self._loop.call_soon_threadsafe(self._listener.close)
        asyncio.run_coroutine_threadsafe(self._runner.cleanup(), self._loop).result(START_TIMEOUT_S)
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._inbox.put(lambda: setattr(self, "_closing", True))
        for thread in (self._engine_thread, self._http_thread):
            thread.join(START_TIMEOUT_S)


class _Connection(RequestHandler):
    """A client that closes only its sending side gets its reply.

    A client that is gone looks the same until something is written to it. So interim replies (100 Continue), which
    clients skip, are sent while it waits.
    """

    __slots__ = ()

    def eof_received(self) -> bool:
        self.close()  # after the reply, if a request waits for one
        self._loop.call_later(0.05, self._reply_or_close, 0.05)  # its handler may not have started yet
        return True

    def _reply_or_close(self, seconds: float) -> None:
        request = self._current_request
        if request is None or not request.content.is_eof() or request.version < HttpVersion11:
            self.force_close()
        elif self.transport is not None and not request.writer.output_size:
            self.transport.write(b"HTTP/1.1 100 Continue\r\n\r\n")
            self._loop.call_later(seconds, self._reply_or_close, min(2 * seconds, 5.0))  # until it is noticed


vLLMHttpServerBase = vLLMHttpServer  # noqa: N816 (upstream's name of the class that has these methods)


def _resolve(future: asyncio.Future, result: Any) -> None:
    if not future.done():
        future.set_result(result)


def _error(status: int, message: str) -> web.Response:
    return web.json_response({"error": {"message": message}}, status=status)


class vLLMReplica(RolloutReplica):  # noqa: N801
    """One vLLM server, in a rank of the actor or in one of its own."""
