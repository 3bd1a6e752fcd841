"""Requests through the gateway of programs, against the same requests straight to the rollout server."""

import asyncio
import statistics
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import torch
from omegaconf import DictConfig

from benchmarks.agents import config_of, save_model, served
from benchmarks.harness import Row, row, say
from benchmarks.rl_rollout import one_rank
from verl.agents.agent_loop.server_manager import AsyncLLMServerManager
from verl.agents.gateway.server import Gateway
from verl.agents.gateway.session import Session, SessionSettings
from verl.agents.message_encoder import MessageEncoder
from verl.rollout.replica import ServerClient
from verl.utils.http_json import HttpClient
from verl.utils.tokenizer import hf_tokenizer, stop_ids

REQUESTS, REPETITIONS, AGENTS, TURNS = 100, 7, 64, 4
GREEDY = {"temperature": 0.0}
MESSAGES = [{"role": "user", "content": " ".join(f"w{i % 40}" for i in range(31)) + " a1"}]


@asynccontextmanager
async def client_of(settings: SessionSettings, gateway: Gateway) -> AsyncIterator[tuple[Session, HttpClient, str]]:
    """(a new session, a client with its token, the URL of chat completions)."""
    session = Session(settings, GREEDY, f"session {time.perf_counter()}", max_requests=10**6)
    async with gateway.serve(session) as (url, token), HttpClient(token) as client:
        yield session, client, f"{url}/chat/completions"


async def single_requests(settings: SessionSettings, server: ServerClient) -> list[Row]:
    """Requests of one token, one after the other: through the gateway and straight to the server, in turn."""
    prompt, more, straight, gateway = settings.encoder.prompt(MESSAGES), [], [], Gateway()
    body = {"model": "m", "messages": MESSAGES, "max_tokens": 1}
    for repetition in range(REPETITIONS + 1):
        differences, own = [], []
        async with client_of(settings, gateway) as (_, client, url):
            await client.post_json(url, body)  # opens the connection
            for i in range(REQUESTS):
                started = time.perf_counter()
                await server.generate(f"{repetition}/{i}", prompt, {**GREEDY, "max_tokens": 1}, False)
                between = time.perf_counter()
                await client.post_json(url, body)
                own.append(1000 * (between - started))
                differences.append(1000 * (time.perf_counter() - between) - own[-1])
        if repetition:
            more.append(statistics.median(differences))
            straight.append(statistics.median(own))
    return [row("gateway_overhead_ms", more, f"ms a request; {statistics.median(straight):.1f} ms without the gateway")]


async def many_agents(settings: SessionSettings, server: ServerClient) -> list[Row]:
    """64 agents at once, each of which continues its conversation for some turns."""
    gateway, seconds, own, exact = Gateway(), [], [], []
    encoder = settings.encoder
    prompt = encoder.prompt(MESSAGES)

    async def agent(number: int) -> None:
        async with client_of(settings, gateway) as (session, client, url):
            messages = [{"role": "user", "content": f"{MESSAGES[0]['content']} w{number % 40} a4"}]
            for _ in range(TURNS):
                started = time.perf_counter()
                reply = await client.post_json(url, {"messages": messages, "max_tokens": 8})
                seconds.append(1000 * (time.perf_counter() - started))
                messages += [reply["choices"][0]["message"], {"role": "user", "content": "a4"}]
        (only,) = session.tree.rows()
        expected = encoder.prompt(messages[:-1], add_generation_prompt=False)
        exact.append(float(session.tree.turns == TURNS and only.ids == encoder.without_separator(expected)))

    async def direct(number: int) -> None:
        for turn in range(TURNS):
            started = time.perf_counter()
            ids, sampling = [*prompt, 5 + number % 40], {**GREEDY, "max_tokens": 4}
            await server.generate(f"direct {number} {turn}", ids, sampling, False)
            own.append(1000 * (time.perf_counter() - started))

    for _ in range(3):
        await asyncio.gather(*map(agent, range(AGENTS)))
        await asyncio.gather(*map(direct, range(AGENTS)))
    p95, below = (statistics.quantiles(values, n=20)[-1] for values in (seconds, own))
    return [
        row("gateway_p95_ms_64", [p95], f"ms, 95 % of requests of 64 at once; {below:.0f} ms without the gateway"),
        row("gateway_exact_64", [sum(exact) / len(exact)], "of conversations of 64 agents at once have each turn once"),
    ]


async def requests(config: DictConfig, rollout: Any, tokenizer: Any) -> list[Row]:
    """The rows of one server."""
    manager = AsyncLLMServerManager(config, [rollout.server_handle])
    settings = SessionSettings(manager, MessageEncoder(tokenizer, stop_ids(tokenizer)), "hermes")
    try:
        async with ServerClient(rollout.server_handle) as server:
            say(f"{REPETITIONS + 1} times {REQUESTS} requests")
            rows = await single_requests(settings, server)
            say(f"{AGENTS} agents at once")
            return rows + await many_agents(settings, server)
    finally:
        await manager.close()


def run() -> list[Row]:
    """All rows; the server runs in this process."""
    torch.set_num_threads(1)
    with one_rank() as folder:
        model = save_model(folder / "model")
        rollout = served(model)
        rows = asyncio.run(requests(config_of(folder, model), rollout, hf_tokenizer(model)))
        rollout.close()
    return rows
