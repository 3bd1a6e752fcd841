"""The agent loop of programs that call the model through the gateway."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import json
import os
import shlex
from pathlib import Path
from typing import Any
from uuid import uuid4

import numpy as np
from loguru import logger

from verl.agents.agent_loop.base import AgentLoopBase, AgentLoopMetrics, AgentLoopOutput, output_of
from verl.agents.agent_loop.registry import register
from verl.agents.agent_loop.rows import empty_output, is_lost
from verl.agents.agent_loop.tool_parser import ToolParser
from verl.agents.conversation import Conversation
from verl.agents.gateway.messages import is_finite_number
from verl.agents.gateway.program import OUTPUT_BYTES, Ending, Limits, Program, search_path
from verl.agents.gateway.server import Gateway
from verl.agents.gateway.session import Session, SessionSettings
from verl.agents.rollout_trace import rollout_trace_op
from verl.agents.tools.journal import CallJournal
from verl.config.rollout import AgentLoopConfig
from verl.utils.threads import in_thread


class Programs:
    """The gateway of one worker, the number of its programs that run at once, and the conversations that ended."""

    def __init__(self, agent: AgentLoopConfig, run_folder: str) -> None:
        self.gateway, self.slots = Gateway(), asyncio.Semaphore(agent.command_concurrency)
        digest = hashlib.blake2b(agent.command.encode(), digest_size=16)
        for word in shlex.split(agent.command)[1:]:
            with contextlib.suppress(OSError, ValueError):  # most arguments are no files
                digest.update(Path(word).read_bytes())
        self.journal = CallJournal(run_folder, digest.hexdigest()) if agent.command_journal else None


@register("program_agent")
class ProgramAgentLoop(AgentLoopBase):
    """Runs rollout.agent.command for a row: a program that calls the model through the gateway.

    It gets the row as a JSON object on standard input, and OPENAI_BASE_URL and OPENAI_API_KEY of its session in its
    environment. Its reward is the last one that it sent to POST /reward, or else {"reward": number} in the last line of
    its standard output. The conversation of a program that fails is lost (end reason "program_failed"). A conversation
    that ended before its run was killed is taken from the journal when the run has started again.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.agent = self.rollout_config.agent
        if not self.agent.command:
            raise ValueError("program_agent needs actor_rollout_ref.rollout.agent.command, a command line")
        shared = self.trainer_config.shared
        if "programs" not in shared:
            shared["programs"] = Programs(self.agent, self.config.trainer.default_local_dir)
        self.programs: Programs = shared["programs"]
        name = self.rollout_config.multi_turn.format
        self.encoder.stop_ids |= set(ToolParser.get_tool_parser(name, self.tokenizer).stop_token_ids)
        self.settings = SessionSettings(self.server_manager, self.encoder, name)

    @rollout_trace_op
    async def run(self, sampling_params: dict[str, Any], **kwargs: Any) -> AgentLoopOutput:
        row, name = row_of(kwargs), kwargs.get("request_id") or uuid4().hex
        journal = self.programs.journal
        if journal is None:
            return await self._run_program(sampling_params, row, name)
        trajectory = {"step": -1, "validate": False, **kwargs.get("trajectory", {})}
        key = journal.key_of(trajectory["step"], trajectory["validate"], sampling_params, row)
        entry = journal.find(key)
        if entry is not None:
            return AgentLoopOutput(**entry["output"])
        output = await self._run_program(sampling_params, row, name)
        if not is_lost(output):
            journal.write(key, {"output": output.model_dump()})
        return output

    async def _run_program(self, sampling_params: dict[str, Any], row: dict[str, Any], name: str) -> AgentLoopOutput:
        agent = self.agent
        session = Session(self.settings, dict(sampling_params), name, agent.command_requests)
        limits = Limits(agent.command_timeout, agent.command_memory_mb << 20, agent.command_processes)
        async with self.programs.slots, self.programs.gateway.serve(session) as (url, token):
            program = Program(shlex.split(agent.command), environment_of(url, token), limits)
            call = asyncio.ensure_future(in_thread(program.run, json.dumps(row).encode()))
            session.on_failure = program.end
            try:
                ending = await asyncio.shield(call)
            except asyncio.CancelledError:
                program.end()
                await asyncio.gather(call, return_exceptions=True)
                raise
        failure = session.failure or self._failure_of(ending, session)
        if session.is_aborted:
            return empty_output("cancelled")
        if failure is not None:
            said = " ".join(ending.stderr[-600:].split())
            wrote = f"; it wrote: {said}" if said else ""
            logger.warning(f"conversation {name}: the program {failure}{wrote}")
            return empty_output("program_failed")
        return self._output(session, ending)

    def _failure_of(self, ending: Ending, session: Session) -> str | None:
        """What the program did, if the conversation cannot be used, or None."""
        agent = self.agent
        if ending.stopped is not None:
            return {
                "time": f"ran longer than rollout.agent.command_timeout={agent.command_timeout:g} s",
                "memory": f"used more than rollout.agent.command_memory_mb={agent.command_memory_mb}",
                "processes": f"started more than rollout.agent.command_processes={agent.command_processes} processes",
                "output": f"wrote more than {OUTPUT_BYTES >> 20} MiB to its standard output and error",
                "supervisor": "killed the process that supervises it",
            }[ending.stopped]
        if session.is_full:  # many programs end with an error then
            return None if session.tree.turns else "sent no prompt that fits into rollout.prompt_length"
        if ending.exit_code != 0:
            return f"ended with exit code {ending.exit_code}"
        if not session.tree.turns:
            return "ended without a request to the model"
        if agent.command_reward == "program" and _reward_of(ending, session) is None:
            how = 'send it to POST /reward, print {"reward": number} last, or set rollout.agent.command_reward=function'
            return f"ended without a reward: {how}"
        return None

    def _output(self, session: Session, ending: Ending) -> AgentLoopOutput:
        reward = None
        if self.agent.command_reward == "program":
            reward = _reward_of(ending, session) or 0.0  # none from a program that had no room left
        outside = max(0.0, ending.seconds - session.seconds)
        metrics = AgentLoopMetrics(generate_sequences=session.seconds, tool_calls=outside)
        end_reason = "length" if session.is_full or session.is_cut else "stop"
        output = output_of_rows(session.tree.rows(), 2 * session.tree.turns, metrics, {"end_reason": end_reason})
        output.reward_score = reward
        self.check_prompt(output.prompt_ids)  # before the journal calls it good
        return output


def output_of_rows(
    rows: list[Conversation], num_turns: int, metrics: AgentLoopMetrics, fields: dict[str, Any]
) -> AgentLoopOutput:
    """The output of a program's conversation, with the responses of all rows one after the other.

    With several rows, the column turn_prompts has (start, end, prompt ids) of each (see verl.trainer.ppo.turn_rows).
    """
    whole, turn_prompts = Conversation(rows[0].prompt_ids), []
    for row in rows:
        start = len(whole.response_ids)
        whole.response_ids += row.response_ids
        whole.response_mask += row.response_mask
        whole.versions += row.versions
        turn_prompts.append((start, len(whole.response_ids), row.prompt_ids))
    if rows[0].response_logprobs is not None:
        whole.response_logprobs = [value for row in rows for value in row.response_logprobs]
    if rows[0].kept_tokens is not None:
        whole.kept_tokens = [ids for row in rows for ids in row.kept_tokens]
    if len(rows) > 1:
        fields = {**fields, "turn_prompts": turn_prompts}
    return output_of(whole, num_turns, metrics, **fields)


def _reward_of(ending: Ending, session: Session) -> float | None:
    """The reward that a program sent, or printed last."""
    if session.reward is not None:
        return session.reward
    lines = ending.stdout.strip().splitlines()
    try:
        said = json.loads(lines[-1])["reward"] if lines else None
    except (ValueError, KeyError, TypeError, RecursionError):
        return None
    return float(said) if is_finite_number(said) else None


def environment_of(url: str, token: str) -> dict[str, str]:
    """The variables of a program; requests to the gateway use no proxy."""
    direct = ",".join(filter(None, [os.environ.get("NO_PROXY"), os.environ.get("no_proxy"), "127.0.0.1"]))
    return {"OPENAI_BASE_URL": url, "OPENAI_API_KEY": token, "NO_PROXY": direct, "no_proxy": direct,
            "PATH": search_path(), "OPENAI_AGENTS_DISABLE_TRACING": "1"}  # fmt: skip


def row_of(columns: dict[str, Any]) -> dict[str, Any]:
    """What a program gets of a row: its messages as `prompt`, and its other columns as far as JSON has them.

    TypeError for messages that JSON does not have.
    """
    row = {"prompt": json.loads(json.dumps(columns.get("raw_prompt"), default=_of_numpy))}
    for name, value in columns.items():
        if name not in ("raw_prompt", "raw_prompt_ids", "request_id", "trajectory", "agent_name"):
            with contextlib.suppress(TypeError, ValueError):
                row[name] = json.loads(json.dumps(value, default=_of_numpy))
    return row


def _of_numpy(value: Any) -> Any:
    """Lists and numbers of Python in place of NumPy's; TypeError for what JSON does not have."""
    if isinstance(value, np.ndarray | np.generic):
        return value.tolist()
    raise TypeError(f"JSON has no {type(value).__name__}")
