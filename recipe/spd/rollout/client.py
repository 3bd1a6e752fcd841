"""Client of vLLM servers: greedy completions of token ids, each requested once."""

import asyncio
import itertools
import json
import os
import random
from collections.abc import Callable, Coroutine, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import aiohttp
from loguru import logger
from tqdm import tqdm

from recipe.spd.rollout.store import Completion, CompletionStore
from recipe.spd.settings import SPDRolloutSettings
from verl.data.fingerprint import model_dir_fingerprint
from verl.utils.http_json import HttpClient, ServiceError
from verl.utils.request_router import RequestRouter

URLS_VARIABLE = "SPD_VLLM_URLS"
_LONGEST_BACKOFF_S = 10.0
_FAILED = (aiohttp.ClientError, TimeoutError, ServiceError)  # a request that another attempt may answer
# Stated in every request: a server takes what is missing from the model's generation_config.json, where chat models
# have penalties that change greedy text.
SAMPLING = {
    "temperature": 0.0, "top_p": 1.0, "top_k": -1, "min_p": 0.0, "repetition_penalty": 1.0, "presence_penalty": 0.0,
    "frequency_penalty": 0.0,
}  # fmt: skip


class Request(NamedTuple):
    """Ids that the target completes, and the most tokens that it may add."""

    ids: tuple[int, ...]
    max_tokens: int


class WrongModelError(RuntimeError):
    """A server serves another model than the target; the message names both."""


class RequestRefused(RuntimeError):
    """A server refused a request as invalid: a retry would not help."""


def server_urls(configured: Sequence[str] | str | None) -> list[str]:
    """SPD_VLLM_URLS (comma separated), else the configured servers; [] means that a local one is started."""
    value = os.environ.get(URLS_VARIABLE) or configured or []
    parts = value.split(",") if isinstance(value, str) else value
    urls = [part.strip().rstrip("/").removesuffix("/v1") for part in parts if part.strip()]
    for url in urls:
        if not url.startswith(("http://", "https://")):
            raise ValueError(
                f"server URL {url!r} in {URLS_VARIABLE} or spd.rollout.servers must start with http:// or https://."
            )
    return urls


def preferred_first(urls: Sequence[str], rank: int) -> list[str]:
    """The servers, first the one whose number matches CUDA_VISIBLE_DEVICES (else the rank), then the others."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",")[0].strip()
    first = (int(visible) if visible.isdecimal() else rank) % len(urls)
    return [*urls[first:], *urls[:first]]


class CompletionClient:
    """Client of one or several servers of the same model.

    A request goes to the server that RequestRouter chooses and, if that fails or is too slow, to another one.
    `backoff_s`: limit of the first random wait between attempts, which doubles with each.
    """

    def __init__(
        self, urls: Sequence[str], model_path: str, *, eos_token_ids: Sequence[int], settings: SPDRolloutSettings,
        backoff_s: float = 0.5,
    ) -> None:  # fmt: skip
        self.urls = list(urls)
        self.model_path = model_path
        self.eos = frozenset(eos_token_ids)
        self.settings = settings
        self.backoff_s = backoff_s
        self.router = RequestRouter(len(self.urls), backoff_s=settings.timeout_s)
        self.last_error = ""
        self._names: dict[str, str] = {}

    def complete(
        self, requests: Sequence[Request], on_chunk: Callable[[list[int], list[Completion]], None] | None = None
    ) -> list[Completion | None]:
        """The greedy completion of each request, None where all attempts failed.

        `on_chunk(positions, completions)` is called as soon as a part is answered. Raises RequestRefused, and
        WrongModelError for a server of another model.
        """
        # Small chunks when there is little to do, so that all servers get work; like limits together, since a chunk is
        # generated up to its largest one.
        size = max(1, min(self.settings.prompts_per_request, -(-len(requests) // self.settings.concurrency)))
        numbers = sorted(range(len(requests)), key=lambda i: requests[i][1])
        gate = asyncio.Semaphore(self.settings.concurrency)
        done: list[Completion | None] = [None] * len(requests)

        async def ask(positions: list[int]) -> None:
            async with gate:
                try:
                    answers = await self._ask_with_retry([requests[i] for i in positions])
                except _FAILED as error:
                    self.last_error = f"{type(error).__name__}: {error}"
                    logger.warning("{} completions are lost: {}", len(positions), self.last_error)
                    return
            for i, answer in zip(positions, answers, strict=True):
                done[i] = answer
            if on_chunk is not None:
                on_chunk(positions, answers)

        async def ask_all() -> None:
            await asyncio.gather(*(ask(numbers[i : i + size]) for i in range(0, len(requests), size)))

        self._run(ask_all())
        return done

    def check_model(self) -> None:
        """Raise WrongModelError if a server that answers serves another model, ConnectionError if none answers."""
        answering = 0
        for server, url in enumerate(self.urls):
            try:
                self._run(self._model_name(url))
                answering += 1
            except _FAILED as error:
                logger.warning("SPD server {} does not answer: {}: {}", url, type(error).__name__, error)
                self.router.release(server, lost=True, weight=0)
                self.last_error = f"{type(error).__name__}: {error}"
        if not answering:
            raise ConnectionError(
                f"none of the SPD servers {', '.join(self.urls)} answers ({self.last_error}). Start them, or unset "
                f"{URLS_VARIABLE} and spd.rollout.servers to have a local one started."
            )

    def _run(self, work: Coroutine[Any, Any, Any]) -> Any:
        """The result of `work`, whose requests share a pool of connections."""

        async def run() -> Any:
            async with HttpClient(max_connections=self.settings.concurrency) as http:
                self._http = http
                return await work

        try:
            asyncio.get_running_loop()
        except RuntimeError:
            return asyncio.run(run())
        with ThreadPoolExecutor(1) as thread:  # this one runs an event loop, as in a notebook
            return thread.submit(asyncio.run, run()).result()

    async def _ask_with_retry(self, requests: list[Request]) -> list[Completion]:
        """One request, on another server after each failure; raises the last failure, or RequestRefused at once."""
        attempts, tried = self.settings.attempts, set()
        for attempt in itertools.count(1):
            if len(tried) == len(self.urls):
                tried = set()
            server = self.router.acquire(exclude=tried, weight=len(requests))
            tried.add(server)
            url, lost = self.urls[server], False
            try:
                answers = await self._ask(url, requests)
            except _FAILED as error:
                lost = True
                logger.warning("SPD server {}: attempt {} of {} failed: {}: {}", url, attempt, attempts,
                               type(error).__name__, error)  # fmt: skip
                if attempt == attempts:
                    raise
            else:
                if self.router.failures[server]:
                    logger.info("SPD server {} answers again", url)
                return answers
            finally:
                self.router.release(server, lost=lost, weight=len(requests))
            await asyncio.sleep(random.uniform(0, min(_LONGEST_BACKOFF_S, self.backoff_s * 2 ** (attempt - 1))))

    async def _ask(self, url: str, requests: list[Request]) -> list[Completion]:
        """One request to a server; raises RequestRefused if it refuses it, or lacks ids or context length."""
        prompts, limits = zip(*requests, strict=True)
        body = {
            "model": await self._model_name(url), "prompt": [list(ids) for ids in prompts], "max_tokens": max(limits),
            "stop_token_ids": sorted(self.eos), "return_token_ids": True, **SAMPLING,
        }  # fmt: skip
        try:
            answer = await self._http.post_json(f"{url}/v1/completions", body, self.settings.timeout_s, max_bytes=None)
        except ServiceError as error:
            if error.status is None or error.status >= 500 or error.status in (408, 429):
                raise
            raise RequestRefused(
                f"SPD server {url} refused a request of {len(prompts)} prompts (longest {max(map(len, prompts))} "
                f"tokens, max_tokens {max(limits)}): {error}"
            ) from error
        choices = sorted(answer["choices"], key=lambda choice: choice["index"])
        if [choice["index"] for choice in choices] != list(range(len(prompts))):
            raise ServiceError(f"{url} returned {len(choices)} choices for {len(prompts)} prompts")
        return [self._completion(url, choice, limit) for choice, limit in zip(choices, limits, strict=True)]

    def _completion(self, url: str, choice: dict[str, Any], limit: int) -> Completion:
        """A choice of a server's answer, cut at its own limit: the request had the largest one of its prompts."""
        ids, hit_limit = choice.get("token_ids"), choice["finish_reason"] == "length"
        if ids is None:
            raise RequestRefused(f"SPD server {url} sends no token_ids; a vLLM that knows return_token_ids is needed.")
        if hit_limit and len(ids) < limit:
            raise RequestRefused(
                f"SPD server {url} ended a completion at {len(ids)} tokens because its context is full, before the "
                f"{limit} that spd.rollout.max_tokens leaves: raise its --max-model-len (of a local server: "
                "spd.rollout.max_model_len), and start it with --generation-config vllm."
            )
        hit_limit, ids = hit_limit or len(ids) > limit, ids[:limit]
        while ids and ids[-1] in self.eos:
            ids = ids[:-1]
        return Completion(tuple(ids), hit_limit)

    async def _model_name(self, url: str) -> str:
        """The name under which a server serves our model, requested once."""
        if url in self._names:
            return self._names[url]
        reply = await self._http.send("GET", f"{url}/v1/models", timeout=self.settings.timeout_s)
        if reply.status >= 400:
            raise ServiceError(f"{url}/v1/models answered {reply.status}: {reply.text[:200]}", reply.status)
        ours = self.settings.served_model
        try:
            roots = {model["id"]: model.get("root") for model in json.loads(reply.content)["data"]}
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise RequestRefused(
                f"{url}/v1/models answers {reply.text[:120]!r}, which lists no models: is it a vLLM server? Correct "
                f"{URLS_VARIABLE} or spd.rollout.servers."
            ) from error
        for name, root in roots.items():
            if name == ours or (ours is None and same_model(root or name, self.model_path)):
                self._names[url] = name
                return name
        served = ", ".join(f"{name} ({root})" for name, root in roots.items())
        raise WrongModelError(
            f"SPD server {url} serves {served}, but the target is {ours or self.model_path!r}. Start it "
            "with that model, or set spd.rollout.served_model to the name under which it serves it."
        )


def same_model(served: str, ours: str) -> bool:
    """Whether a server's model is ours: the same path, equal files, or the same name if it is not on this disk."""
    if served == ours:
        return True
    served_dir, our_dir = Path(served).expanduser(), Path(ours).expanduser()
    if served_dir.is_dir() and our_dir.is_dir():
        same_path = served_dir.resolve() == our_dir.resolve()
        return same_path or model_dir_fingerprint(served_dir) == model_dir_fingerprint(our_dir)
    return served_dir.name == our_dir.name


@dataclass
class CompletionCounts:
    """Distinct completions of one batch: requested = stored + asked; `failed` ones were requested without success."""

    requested: int = 0
    stored: int = 0
    asked: int = 0
    failed: int = 0


@dataclass
class Completer:
    """Completions from the store, else from the servers; each is committed to the store before it is used.

    `before_asking` waits for a server that may still be loading; stored completions need no server.
    """

    store: CompletionStore
    client: CompletionClient
    before_asking: Callable[[], object] | None = None

    def complete(
        self, requests: Sequence[Request], title: str | None = None
    ) -> tuple[dict[Request, Completion], CompletionCounts]:
        """Request -> completion, without those that failed; and the counts. Each distinct one is asked for once; a
        progress bar with the `title`, if there is one, counts the answers of the servers.
        """
        distinct = list(dict.fromkeys(requests))
        done = {distinct[i]: held for i, held in self.store.get_many([_stored_as(r) for r in distinct]).items()}
        missing = [request for request in distinct if request not in done]
        counts = CompletionCounts(len(distinct), len(done), len(missing))

        def commit(positions: list[int], completions: list[Completion]) -> None:
            for i, completion in zip(positions, completions, strict=True):
                stored = self.store.put_many([_stored_as(missing[i])], [completion])  # a transaction each
                done[missing[i]] = stored[0]
            bar.update(len(positions))

        if missing:
            if self.before_asking is not None:
                self.before_asking()
            with tqdm(desc=title, total=len(missing), unit="completion", disable=title is None) as bar:
                self.client.complete(missing, on_chunk=commit)
        counts.failed = len(distinct) - len(done)
        return done, counts


def _stored_as(request: Request) -> tuple[int, ...]:
    """The key of a completion: its context, then its limit as a negative number, which no token id is."""
    ids, max_tokens = request
    return (*ids, -max_tokens)
