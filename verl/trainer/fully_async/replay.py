"""The record of a run's batches, and a run that trains them again."""

import asyncio
import json
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import zip_longest
from pathlib import Path
from typing import Any

import ray
from loguru import logger

from verl.agents.agent_loop.interruptible import rest_of
from verl.agents.agent_loop.server_manager import turn_seed
from verl.config.asynchronous import AsyncPPOConfig
from verl.trainer.fully_async import journal
from verl.trainer.fully_async.phase import AsyncPhase, SeparateRolloutPhase
from verl.trainer.fully_async.samples import Group

RECORD_FILE = "async_record.jsonl"


class ReplayError(ValueError):
    """A record that does not belong to this run's settings or data."""


def read_record(path: Path, step: int) -> Iterator[dict[str, Any]]:
    """The rows {step, synced, groups} of a record from `step` on."""
    with open(path, encoding="utf-8") as lines:
        for number, line in enumerate(lines, 1):
            try:
                row = json.loads(line)
            except json.JSONDecodeError as error:
                raise ReplayError(f"{path}, line {number} is not complete ({error.msg}): remove it") from error
            if row["step"] >= step:
                yield row


@dataclass(frozen=True)
class Part:
    """What one request generated: `tokens` after the ids of `prefix`, from token `start` of the response on."""

    name: str
    prefix: list[int]
    start: int
    tokens: list[int]
    sampling: dict[str, Any]


def parts_by_version(path: Path) -> dict[int, list[Part]]:
    """The requests of a record, by the weights version that answered them."""
    parts: dict[int, list[Part]] = {}
    for row in read_record(path, 0):
        for group in row["groups"]:
            for sample in group["samples"]:
                if sample["output"] is not None:
                    for version, part in _parts_of(group, sample):
                        parts.setdefault(version, []).append(part)
    return parts


def _parts_of(group: dict[str, Any], sample: dict[str, Any]) -> Iterator[tuple[int, Part]]:
    output = sample["output"]
    mask, ids = output["response_mask"], output["response_ids"]
    sampling = {name: value for name, value in group["params"].items() if name not in ("logprobs", "kept_tokens")}
    turn, place, done = 0, 0, 0  # the turn, the next token of the response, tokens of the turn so far
    for version, count in sample["spans"]:
        while place < len(mask) and not mask[place]:  # tokens of tools and users end a turn
            place, turn, done = place + 1, turn + (1 if done else 0), 0
        tokens = ids[place : place + count]
        limit = {"max_tokens": done + len(tokens), "seed": turn_seed(sample["seed"], turn)}
        if tokens:
            prefix = output["prompt_ids"] + ids[:place]
            yield version, Part(sample["id"], prefix, place, tokens, rest_of(sampling | limit, done))
        place, done = place + count, done + count


class ReplayPhase(AsyncPhase):
    """Returns the batches of async_training.replay, with their tokens, log-probs and rewards.

    `restore(saved)` gives the groups of saved ones, with the columns of their prompts. `servers` generate the tokens
    again (async_training.replay_mode=regenerate), None where they do not.
    """

    def __init__(
        self, config: AsyncPPOConfig, tokenizer: Any, restore: Callable[[list[dict[str, Any]]], list[Group]],
        servers: SeparateRolloutPhase | None = None,
    ) -> None:  # fmt: skip
        super().__init__(config, tokenizer)
        self.servers, self.parts = servers, {}
        self.compared: Counter[str] = Counter()
        self.path, self.restore_groups = Path(config.async_training.replay).expanduser(), restore
        if not self.path.is_file():
            raise ReplayError(f"async_training.replay={self.path} does not exist; it is the {RECORD_FILE} of a run.")
        if servers is not None:
            self.server_names = servers.server_names
            self.parts = parts_by_version(self.path)
        self.rows: Iterator[dict[str, Any]] | None = None

    def close(self) -> None:
        if self.servers is not None:
            self.servers.close()
        super().close()

    def send_weights(self, version: int, parts: list[ray.ObjectRef], interrupt: bool) -> None:
        """Give the servers the weights of `version`, and compare what they generate with what was recorded."""
        self.servers.send_weights(version, parts, interrupt)
        self.servers.rollouter.call(self._regenerate(version))

    async def _regenerate(self, version: int) -> None:
        manager = self.servers.rollouter.worker.server_manager

        async def compare(part: "Part") -> str | None:
            output = await manager.send_turn(part.name, part.prefix, part.sampling, log_probs=False)
            pairs = zip_longest(part.tokens, output.token_ids)
            different = next((i for i, (one, other) in enumerate(pairs) if one != other), None)
            if different is None:
                return None
            one, other = ([*ids, *[None] * len(part.tokens)][different] for ids in (part.tokens, output.token_ids))
            place = part.start + different
            return f"sample {part.name}, token {place} of weights version {version}: {one} recorded, {other} generated"

        parts = self.parts.pop(version, [])
        results = await asyncio.gather(*(compare(part) for part in parts))
        differences = [text for text in results if text is not None]
        self.compared["parts"] += len(parts)
        self.compared["differing"] += len(differences)
        if differences:
            logger.warning(f"{len(differences)} of {len(parts)} generations differ from the record: {differences[0]}")

    def take(self, step: int) -> list[Group]:
        if self.rows is None:
            self.rows = read_record(self.path, step)
        row = next(self.rows, None)
        if row is None or row["step"] != step:
            raise ReplayError(f"async_training.replay={self.path} has no batch of step {step}.")
        self.synced, n, limit = row["synced"], self.rollout_config.n, self.bound.batch
        groups = self.restore_groups(row["groups"])
        if len(groups) != limit or any(len(group.samples) != n for group in groups):
            raise ReplayError(
                f"{self.path}, step {step} has {len(groups)} prompts of {len(groups[0].samples)} samples; this run's "
                f"settings give {limit} of {n}. Use the settings of the recorded run."
            )
        for group in groups:
            ids = list(group.row.non_tensor_batch.get("raw_prompt_ids", [None])[0] or ())
            if self.rollout_config.agent.command is not None:  # a program chooses its messages
                ids = []
            for sample in group.samples:
                if ids and sample.output is not None and sample.output.prompt_ids[: len(ids)] != ids:
                    raise ReplayError(f"{self.path}, step {step}: sample {sample.id} has another prompt than this data")
                for state in (journal.DRAWN, journal.RUNNING):
                    self.journal.record(sample.id, state, group.started_at)
                states = (journal.FINISHED, journal.GRADED, journal.QUEUED)
                for state in states if sample.state == journal.QUEUED else (journal.FAILED,):
                    self.journal.record(sample.id, state, group.started_at)
        return groups

    def metrics(self) -> dict[str, float]:
        """How many generations were compared so far, and how many differ from the record."""
        if self.servers is None:
            return {}
        prefix = "fully_async/replay"
        return {f"{prefix}/compared": self.compared["parts"], f"{prefix}/differing": self.compared["differing"]}

    def hold(self) -> dict[str, Any]:
        return {"groups": [], "journal": self.journal.state(), "dropped": 0}

    def take_counts(self) -> tuple[Counter[str], list[float]]:
        return Counter(), []
