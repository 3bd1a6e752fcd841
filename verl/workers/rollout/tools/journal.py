"""Results of tool calls on disk, so that a killed run that starts again does not repeat the calls."""

import hashlib
import inspect
import json
import time
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any
from uuid import uuid4

from loguru import logger

from verl.checkpoint.publish import TRACKER
from verl.utils.jsonl import read_objects
from verl.workers.rollout.tools.base_tool import BaseTool
from verl.workers.rollout.tools.schemas import ToolResponse


class ToolJournal:
    """The calls of one training step after another, as `step_<n>-<writer>.jsonl` in a folder.

    A call is known by the tokens of its conversation up to it, so that a result is only given to the conversation that
    asked, and by the tools' code and settings: calls of a tool that was changed since are made again. Steps that a
    checkpoint has made final are removed when the next step begins.

    Args:
        run: the run's folder (trainer.default_local_dir).
        tools: the tools.
    """

    def __init__(self, run: str | Path, tools: Iterable[BaseTool]) -> None:
        self.run = Path(run).expanduser()
        self.folder = self.run / "tool_journal"
        self.writer, self.begun = uuid4().hex[:12], time.time()
        digest = hashlib.blake2b(digest_size=16)
        for tool in tools:
            file = inspect.getsourcefile(inspect.unwrap(tool.source))
            code = Path(file).read_bytes() if file else b""
            schema = tool.tool_schema.model_dump_json()
            digest.update(json.dumps([tool.config, schema], sort_keys=True, default=str).encode() + code)
        self.tools = digest.hexdigest()
        self.step: int | None = None
        self.results: dict[str, dict[str, Any]] = {}
        self.replayed = 0

    def key(self, step: int, seed: int | None, ids: Sequence[int], call: int) -> str:
        """The key of call number `call` of a conversation with tokens `ids`; reads a new step's recorded calls."""
        if step != self.step:
            self._read(step)
        text = json.dumps([self.tools, seed, list(ids), call])
        return hashlib.blake2b(text.encode(), digest_size=16).hexdigest()

    def _read(self, step: int) -> None:
        self.step, self.results = step, {}
        tracker = self.run / TRACKER
        final = int(tracker.read_text()) if tracker.is_file() else -1
        for file in sorted(self.folder.glob("step_*-*.jsonl")):
            number = int(file.name.removeprefix("step_").split("-")[0])
            if number == step and file.stat().st_mtime <= self.begun:  # else another worker of this run writes to it
                for _, entry in read_objects(file, growing=True):
                    self.results[entry["key"]] = entry
            elif number < step and number <= final:
                file.unlink(missing_ok=True)  # another worker may have been faster
        if self.results:
            logger.info(f"step {step}: {len(self.results)} tool calls were made before the run was started again")

    def find(self, key: str) -> dict[str, Any] | None:
        """The entry of a call that was made before: response, reward, metrics, failure."""
        entry = self.results.get(key)
        self.replayed += entry is not None
        return entry

    def add(self, key: str, response: ToolResponse, reward: Any, metrics: dict[str, Any], failure: Any) -> None:
        """Write the result of a call, which then survives the death of the process; only for text responses."""
        if response.image or response.video:
            return
        entry = {"key": key, "response": response.model_dump(exclude_none=True)}
        entry |= {"reward": reward, "metrics": metrics, "failure": failure}
        self.folder.mkdir(parents=True, exist_ok=True)
        with open(self.folder / f"step_{self.step}-{self.writer}.jsonl", "a") as file:
            file.write(json.dumps(entry, default=str) + "\n")
