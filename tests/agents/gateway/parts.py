"""A worker and sessions in front of an engine that answers what a test wants and notes what it was given."""

import asyncio
import contextlib
from dataclasses import dataclass, field
from typing import Any

from omegaconf import OmegaConf
from openai import AsyncOpenAI

from tests.helpers.chat_templates import FORMATS, byte_tokenizer
from tests.helpers.configs import SOUND, compose_ppo
from verl.agents.agent_loop.worker import AgentLoopWorkerBase
from verl.agents.gateway.server import Gateway
from verl.agents.gateway.session import Session, SessionSettings
from verl.agents.message_encoder import MessageEncoder
from verl.config.compose import to_settings
from verl.config.rollout import RolloutConfig
from verl.rollout.replica import ServerHandle, TokenOutput

LOOKUP = {"type": "function", "function": {
    "name": "lookup", "description": "Looks a value up.",
    "parameters": {"type": "object", "properties": {"key": {"type": "string", "description": "Its name."}},
                   "required": ["key"]}}}  # fmt: skip
CALL = '<tool_call>\n{"name": "lookup", "arguments": {"key": "sky"}}\n</tool_call><|im_end|>'
USER = {"role": "user", "content": "?"}


@dataclass
class Engine:
    """Stands in for AsyncLLMServerManager; `answer(prompt_ids)` is the text, the ids or the TokenOutput of a reply.

    `asked` has (prompt ids, generated ids, log-probs, sampling parameters) of each request that ended; no two log-probs
    are equal.
    """

    rollout_config: RolloutConfig
    tokenizer: Any
    answer: Any
    seconds: float = 0.0
    asked: list[tuple[list[int], list[int], list[float], dict[str, Any]]] = field(default_factory=list)
    running: int = 0
    most: int = 0
    prompt_tokens = cached_tokens = 0
    versions = frozenset()

    async def generate(self, request_id, *, prompt_ids, sampling_params, turn=None):
        self.running += 1
        self.most = max(self.most, self.running)
        try:
            await asyncio.sleep(self.seconds)
        finally:
            self.running -= 1
        ids = self.answer(prompt_ids)
        if isinstance(ids, TokenOutput):
            return ids
        if isinstance(ids, str):
            ids = self.tokenizer(ids, add_special_tokens=False)["input_ids"]
        limit = sampling_params["max_tokens"]
        log_probs = [-(1000.0 * len(self.asked) + i) - 1 for i in range(len(ids[:limit]))]
        self.asked.append((list(prompt_ids), list(ids[:limit]), log_probs, sampling_params))
        return TokenOutput(token_ids=ids[:limit], log_probs=log_probs, weights_version=3,
                           stop_reason="length" if len(ids) > limit else "completed")  # fmt: skip

    async def close(self):
        pass


def session_of(answer, tokenizer=None, stops=("<|im_end|>",), parser="hermes", seconds=0.0, **rollout) -> Session:
    """A session of the rollout's settings, with a template of Qwen's format unless a tokenizer is given."""
    tokenizer = tokenizer or byte_tokenizer(FORMATS["qwen2.5"])
    settings = {"name": "vllm", "mode": "async", "prompt_length": 3000, "response_length": 400,
                "calculate_log_probs": True} | rollout  # fmt: skip
    settings = to_settings(OmegaConf.create(settings), RolloutConfig)
    encoder = MessageEncoder(tokenizer, tokenizer.convert_tokens_to_ids(list(stops)))
    engine = Engine(settings, tokenizer, answer, seconds)
    return Session(SessionSettings(engine, encoder, parser), {"logprobs": True, "seed": 5}, "a", 64)


@contextlib.asynccontextmanager
async def client_of(session, gateway=None, **settings):
    """The real client of the openai package for a session."""
    async with (
        (gateway or Gateway()).serve(session) as (url, token),
        AsyncOpenAI(base_url=url, api_key=token, **{"max_retries": 0, **settings}) as client,
    ):
        yield client


def worker_of(folder, answer, prompt_length=3000, response_length=400, **agent) -> AgentLoopWorkerBase:
    """A worker whose engine answers `answer(prompt_ids)`; `agent` are keys of rollout.agent."""
    tokenizer = byte_tokenizer(FORMATS["qwen2.5"])
    tokenizer.save_pretrained(folder)
    config = compose_ppo(*SOUND)
    rollout = {"prompt_length": prompt_length, "response_length": response_length, "calculate_log_probs": True,
               "stop_token_ids": tokenizer.convert_tokens_to_ids(["<|im_end|>"]),
               "agent": {"default_agent_loop": "program_agent", **agent}}  # fmt: skip
    OmegaConf.update(config, "actor_rollout_ref.rollout", rollout)
    config.actor_rollout_ref.model.path = str(folder)
    config.trainer.default_local_dir = str(folder / "run")
    worker = AgentLoopWorkerBase(config, [ServerHandle("127.0.0.1:1")])
    worker.tokenizer.pad_token = worker.tokenizer.eos_token
    worker.server_manager = Engine(worker.rollout_config, worker.tokenizer, answer)
    return worker


async def run_program(worker, **row):
    """The output of one row."""
    trajectory = {"step": 1, "sample_index": 0, "rollout_n": 0, "validate": False}
    return await worker._run_agent_loop({"logprobs": True}, trajectory, **{"raw_prompt": [USER], **row})
