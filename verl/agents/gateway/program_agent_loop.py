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

from verl.agents.agent_loop.base import AgentLoopBase, AgentLoopMetrics, AgentLoopOutput
from verl.agents.agent_loop.registry import register
from verl.agents.agent_loop.rows import empty_output, is_lost
from verl.agents.agent_loop.tool_parser import ToolParser
from verl.agents.conversation import Conversation
from verl.agents.gateway.program import Ending, Limits, Program, search_path
from verl.agents.gateway.server import Gateway
from verl.agents.gateway.session import Session, SessionSettings
from verl.agents.rollout_trace import rollout_trace_op
from verl.agents.tools.journal import CallJournal
from verl.config.rollout import AgentLoopConfig
from verl.utils.threads import in_thread

STOPPED = {
    "time": "ran longer than rollout.agent.command_timeout={0.command_timeout:g} s",
    "memory": "used more than rollout.agent.command_memory_mb={0.command_memory_mb}",
    "processes": "started more than rollout.agent.command_processes={0.command_processes} processes",
    "output": "wrote more than 64 MiB to its standard output and error",
    "supervisor": "killed the process that supervises it",
}


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
        trajectory = kwargs.get("trajectory", {})
        key = journal.key_of(trajectory.get("step", -1), trajectory.get("validate", False), sampling_params, row)
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
            logger.warning(f"conversation {name}: the program {failure.removeprefix('the program ')}{wrote}")
            return empty_output("program_failed")
        return self._output(session, ending)

    def _failure_of(self, ending: Ending, session: Session) -> str | None:
        """Why the conversation cannot be used, or None."""
        if ending.stopped is not None:
            return STOPPED.get(ending.stopped, ending.stopped).format(self.agent)
        if session.is_full:  # many programs end with an error then
            return None if session.tree.turns else "sent no prompt that fits into rollout.prompt_length"
        if ending.exit_code != 0:
            return f"ended with exit code {ending.exit_code}"
        if not session.tree.turns:
            return "ended without a request to the model"
        if self.agent.command_reward == "program" and _reward_of(ending, session) is None:
            how = 'send it to POST /reward, print {"reward": number} last, or set rollout.agent.command_reward=function'
            return f"ended without a reward: {how}"
        return None

    def _output(self, session: Session, ending: Ending) -> AgentLoopOutput:
        reward = None
        if self.agent.command_reward == "program":
            reward = _reward_of(ending, session) or 0.0  # none from a program that had no room left
        columns = columns_of(session.tree.rows())
        self.check_prompt(columns["prompt_ids"])  # before the journal calls it good
        columns["extra_fields"]["end_reason"] = "length" if session.is_full or session.is_cut else "stop"
        outside = max(0.0, ending.seconds - session.seconds)
        metrics = AgentLoopMetrics(generate_sequences=session.seconds, tool_calls=outside)
        return AgentLoopOutput(reward_score=reward, num_turns=2 * session.tree.turns, metrics=metrics, **columns)


def columns_of(rows: list[Conversation]) -> dict[str, Any]:
    """Arguments of AgentLoopOutput: the responses of all rows one after the other.

    With several rows, the column turn_prompts has (start, end, prompt ids) of each (see verl.trainer.ppo.turn_rows).
    """
    prompts, ids = [], []
    mask: list[int] = []
    log_probs: list[float] = []
    kept: list[list[int]] = []
    for row in rows:
        prompts.append((len(ids), len(ids) + len(row.response_ids), row.prompt_ids))
        ids += row.response_ids
        mask += row.response_mask
        log_probs += row.response_logprobs or ()
        kept += row.kept_tokens or ()
    fields: dict[str, Any] = {"weights_versions": [version for row in rows for version, _, _ in row.versions]}
    if len(rows) > 1:
        fields["turn_prompts"] = prompts
    return {
        "prompt_ids": rows[0].prompt_ids, "response_ids": ids, "response_mask": mask,
        "response_logprobs": log_probs or None, "kept_tokens": kept or None, "extra_fields": fields,
    }  # fmt: skip


def _reward_of(ending: Ending, session: Session) -> float | None:
    """The reward that a program sent, or printed last."""
    if session.reward is not None:
        return session.reward
    lines = ending.stdout.strip().splitlines()
    try:
        said = json.loads(lines[-1])["reward"] if lines else None
    except (ValueError, KeyError, TypeError, RecursionError):
        return None
    is_number = isinstance(said, int | float) and not isinstance(said, bool) and abs(said) < float("inf")
    return float(said) if is_number else None


def environment_of(url: str, token: str) -> dict[str, str]:
    """The variables of a program; requests to the gateway use no proxy."""
    direct = ",".join(filter(None, [os.environ.get("NO_PROXY"), os.environ.get("no_proxy"), "127.0.0.1"]))
    return {"OPENAI_BASE_URL": url, "OPENAI_API_KEY": token, "NO_PROXY": direct, "no_proxy": direct,
            "PATH": search_path(), "OPENAI_AGENTS_DISABLE_TRACING": "1"}  # fmt: skip


def row_of(columns: dict[str, Any]) -> dict[str, Any]:
    """What a program gets of a row: its messages as `prompt`, and its other columns as far as JSON has them."""
    row = {"prompt": _plain(columns.get("raw_prompt"))}
    for name, value in columns.items():
        if name not in ("raw_prompt", "raw_prompt_ids", "request_id", "trajectory", "agent_name"):
            plain = _plain(value)
            try:
                json.dumps(plain)
            except (TypeError, ValueError):
                continue
            row[name] = plain
    return row


def _plain(value: Any) -> Any:
    """The value with lists and numbers of Python in place of NumPy's."""
    if isinstance(value, np.ndarray | np.generic):
        return _plain(value.tolist())
    if isinstance(value, dict):
        return {str(key): _plain(item) for key, item in value.items()}
    return [_plain(item) for item in value] if isinstance(value, list | tuple) else value
