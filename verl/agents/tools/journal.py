"""Results of calls on disk, so that a killed run that starts again does not repeat them: of tools and programs."""

import hashlib
import inspect
import json
import time
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any
from uuid import uuid4

from loguru import logger

from verl.agents.tools.base_tool import BaseTool
from verl.agents.tools.schemas import ToolResult
from verl.training.checkpoint.publish import read_tracker
from verl.utils.jsonl import read_objects

TOOL_JOURNAL = "tool_journal"
CallKey = tuple[int, str]  # the step, and the digest of what describes the call


class CallJournal:
    """The calls of training steps, several of which may be generated at a time, as `step_<n>-<writer>.jsonl`.

    Steps that a checkpoint has made final are removed when a later step begins.

    Args:
        run: the run's folder (trainer.default_local_dir).
        identity: of what is called; a result is found again under the same identity only.
    """

    def __init__(self, run: str | Path, identity: str) -> None:
        self.run, self.identity = Path(run).expanduser(), identity
        self.folder = self.run / TOOL_JOURNAL
        self.writer, self.begun = uuid4().hex[:12], time.time()
        self.results: dict[int, dict[str, dict[str, Any]]] = {}  # of steps that have begun, by their calls' digests

    def key_of(self, step: int, *parts: Any) -> CallKey:
        """The key of the call that `parts`, which JSON has, describe; reads a new step's recorded calls."""
        if step not in self.results:
            self._read(step)
        return step, hashlib.blake2b(json.dumps([self.identity, *parts]).encode(), digest_size=16).hexdigest()

    def _read(self, step: int) -> None:
        newest = read_tracker(self.run)
        final = -1 if newest is None else newest
        for number in list(self.results):
            if number <= min(final, step):
                del self.results[number]
        recorded = self.results[step] = {}
        for file in sorted(self.folder.glob("step_*-*.jsonl")):
            number = int(file.name.removeprefix("step_").split("-")[0])
            if number == step and file.stat().st_mtime <= self.begun:  # else another worker of this run writes to it
                for _, entry in read_objects(file, growing=True):
                    recorded[entry["key"]] = entry
            elif number < step and number <= final:
                file.unlink(missing_ok=True)  # another worker may have been faster
        if recorded:
            logger.info(f"step {step}: {len(recorded)} calls were made before the run was started again")

    def find(self, key: CallKey) -> dict[str, Any] | None:
        """The entry of a call that was made before."""
        step, digest = key
        return self.results.get(step, {}).get(digest)

    def write(self, key: CallKey, entry: dict[str, Any]) -> None:
        """Write the result of a call, which then survives the death of the process."""
        step, digest = key
        self.folder.mkdir(parents=True, exist_ok=True)
        with open(self.folder / f"step_{step}-{self.writer}.jsonl", "a") as file:
            file.write(json.dumps({"key": digest, **entry}, default=str) + "\n")


class ToolJournal(CallJournal):
    """Calls of tools.

    A call is known by the tokens of its conversation up to it, so that a result is only given to the conversation that
    asked, and by the tools' code and settings: calls of a tool that was changed since are made again.

    Args:
        run: the run's folder (trainer.default_local_dir).
        tools: the tools.
    """

    def __init__(self, run: str | Path, tools: Iterable[BaseTool]) -> None:
        digest = hashlib.blake2b(digest_size=16)
        for tool in tools:
            file = inspect.getsourcefile(inspect.unwrap(tool.source))
            code = Path(file).read_bytes() if file else b""
            schema = tool.tool_schema.model_dump_json()
            digest.update(json.dumps([tool.config, schema], sort_keys=True, default=str).encode() + code)
        super().__init__(run, digest.hexdigest())

    def key(self, step: int, seed: int | None, ids: Sequence[int], call: int) -> CallKey:
        """The key of call number `call` of a conversation with tokens `ids`."""
        return self.key_of(step, seed, list(ids), call)

    def result(self, key: CallKey) -> ToolResult | None:
        """The result of a call that was made before."""
        entry = self.find(key)
        return None if entry is None else ToolResult(**entry)

    def add(self, key: CallKey, result: ToolResult) -> None:
        """Write the result of a call; only for text responses."""
        if not (result.response.image or result.response.video):
            self.write(key, result.model_dump(exclude_none=True))
