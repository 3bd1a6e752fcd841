"""Tools, an interaction and loops for the tests, named in their config files."""

import asyncio
import contextlib
import json
import os
import signal
from pathlib import Path
from types import SimpleNamespace

import torch

from tests.agents.tools.helpers import schema
from verl.agents.agent_loop import AgentLoopBase, AgentLoopOutput, register
from verl.agents.interactions.base import BaseInteraction
from verl.agents.tools.base_tool import BaseTool
from verl.agents.tools.schemas import ToolResponse
from verl.protocol import DataProto
from verl.rollout.replica import ServerHandle

EVENTS: list[tuple] = []


def listed(folder: Path, kind: str, name: str, **config) -> str:
    """A file in `folder` with a class of this module as the only one of `kind`: tools or interaction."""
    path = folder / f"{kind}.yaml"
    path.write_text(json.dumps({kind: [{"class_name": f"{__name__}.{name}", "config": config}]}))
    return str(path)


def prompts_of(columns: dict, width: int, **meta) -> DataProto:
    """A batch for a manager: agent loops read its columns alone, not the tokens [rows, width]."""
    ids = torch.full((len(next(iter(columns.values()))), width), 5)
    tensors = {"input_ids": ids, "attention_mask": torch.ones_like(ids), "position_ids": ids}
    meta = {"n": 1, "eos_token_id": 2, "pad_token_id": 0, "global_steps": 1, **meta}
    return DataProto.from_dict(tensors, columns, meta)


def server_group(*handles: ServerHandle) -> SimpleNamespace:
    """What a manager needs of its worker group: rollout servers, by default one that does not answer."""
    handles = handles or (ServerHandle("127.0.0.1:1"),)
    return SimpleNamespace(world_size=len(handles), rollout_server=lambda: [*handles])


class AddTool(BaseTool):
    """a + b; the step reward is 0.25, the final reward the number of calls."""

    def get_openai_tool_schema(self):
        return schema("add", {"a": {"type": "integer"}, "b": {"type": "integer"}}, ["a", "b"])

    async def create(self, instance_id=None, **kwargs):
        instance_id, response = await super().create(instance_id)
        EVENTS.append(("create", instance_id, kwargs))
        self.calls = {**getattr(self, "calls", {}), instance_id: 0}
        return instance_id, response

    async def execute(self, instance_id, parameters, raises=False, hangs=False, **kwargs):
        EVENTS.append(("execute", instance_id, parameters))
        self.calls[instance_id] += 1
        if raises:
            raise ZeroDivisionError("no")
        if hangs:
            await asyncio.sleep(3600)
        return ToolResponse(text=str(parameters["a"] + parameters["b"])), 0.25, {}

    async def calc_reward(self, instance_id, **kwargs):
        return float(self.calls[instance_id])

    async def release(self, instance_id, **kwargs):
        EVENTS.append(("release", instance_id))


class PictureTool(AddTool):
    """a + b, with a picture."""

    async def execute(self, instance_id, parameters, **kwargs):
        return ToolResponse(text=str(parameters["a"] + parameters["b"]), image=[b"png"]), 0.25, {}


class SayTool(BaseTool):
    """Answers `texts[i]`."""

    def get_openai_tool_schema(self):
        return schema("say", {"i": {"type": "integer"}}, ["i"])

    async def execute(self, instance_id, parameters, texts=(), **kwargs):
        return ToolResponse(text=texts[parameters["i"] % len(texts)]), 0.0, {}


class LoggedTool(BaseTool):
    """a + b after 0.2 s; writes the begin and the end of each call to the file config["log"]. Keeps no state."""

    get_openai_tool_schema = AddTool.get_openai_tool_schema

    async def execute(self, instance_id, parameters, **kwargs):
        for word in ("begin", "end"):
            with open(self.config["log"], "a") as log:
                log.write(f"{word}\n")
            await asyncio.sleep(0.2 if word == "begin" else 0)
        return ToolResponse(text=str(parameters["a"] + parameters["b"])), 0.25, {}


class DeadlyTool(LoggedTool):
    """LoggedTool whose fourth call kills this process, once."""

    async def execute(self, instance_id, parameters, **kwargs):
        log, struck = Path(self.config["log"]), Path(self.config["log"] + ".struck")
        if log.exists() and log.read_text().count("begin") >= 4:
            with contextlib.suppress(FileExistsError):
                struck.touch(exist_ok=False)  # one of the workers that get here makes the file
                os.kill(os.getpid(), signal.SIGKILL)
        return await super().execute(instance_id, parameters, **kwargs)


class HeldTool(LoggedTool):
    """LoggedTool that does not answer until the file config["log"].go is there."""

    async def execute(self, instance_id, parameters, **kwargs):
        answer = await super().execute(instance_id, parameters, **kwargs)
        while not Path(self.config["log"] + ".go").exists():
            await asyncio.sleep(0.02)
        return answer


class UnevenTool(LoggedTool):
    """LoggedTool of whose calls the last four of every 16 take a minute more."""

    async def execute(self, instance_id, parameters, **kwargs):
        self.started = getattr(self, "started", -1) + 1
        await asyncio.sleep(60 if self.started % 16 >= 12 else 0)
        return await super().execute(instance_id, parameters, **kwargs)


class PatientInteraction(BaseInteraction):
    """Asks "?" again until `turns` answers are there."""

    async def start_interaction(self, instance_id=None, start=None, **kwargs):
        EVENTS.append(("started", instance_id))
        if start == "raises":
            raise ZeroDivisionError("no")
        await asyncio.sleep(3600 if start == "hangs" else 0)
        return f"{instance_id}_started"

    async def generate_response(
        self, instance_id, messages, turns=2, raises=False, hangs=False, extra=None, **kwargs
    ):  # fmt: skip
        if raises:
            raise ZeroDivisionError("no")
        await asyncio.sleep(3600 if hangs else 0)
        answers = sum(message["role"] == "assistant" for message in messages)
        EVENTS.append(("asked", instance_id, [message["role"] for message in messages]))
        return answers >= turns, "again ?", 0.5, {"asked": answers} if extra is None else extra

    async def finalize_interaction(self, instance_id, **kwargs):
        EVENTS.append(("finalized", instance_id))


@register("silent")
class SilentLoop(AgentLoopBase):
    """Generates nothing."""

    async def run(self, sampling_params, **kwargs):
        return AgentLoopOutput(prompt_ids=self.encoder.prompt(list(kwargs["raw_prompt"])), response_ids=[],
                               response_mask=[], num_turns=1)  # fmt: skip
