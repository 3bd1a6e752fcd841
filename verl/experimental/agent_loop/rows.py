"""Rows of a batch from conversations that have ended."""

import math
from typing import Any

import numpy as np
import torch

from verl.experimental.agent_loop.base import AgentLoopOutput
from verl.protocol import DataProto
from verl.reward.rows import LOST, place_scores


def empty_output(end_reason: str | None = None) -> AgentLoopOutput:
    """A conversation of which nothing is known but why it ended."""
    fields = {} if end_reason is None else {"end_reason": end_reason}
    return AgentLoopOutput(prompt_ids=[], response_ids=[], response_mask=[], extra_fields=fields)


def is_lost(output: AgentLoopOutput | None) -> bool:
    """Whether a conversation broke off for a reason that the model has no part in."""
    return output is None or output.extra_fields.get("end_reason") in ("cancelled", "tool_failed")


def routed_experts(rows: list[AgentLoopOutput], p: int, r: int) -> torch.Tensor | None:
    """The experts of each token [B, P + R, layers, k], 0 where a row has none; None if no row has any."""
    given = [None if row.routed_experts is None else torch.as_tensor(row.routed_experts) for row in rows]
    known = next((experts for experts in given if experts is not None), None)
    if known is None:
        return None
    filled = torch.zeros(len(rows), p + r, *known.shape[1:], dtype=known.dtype)
    for i, (row, experts) in enumerate(zip(rows, given, strict=True)):
        if experts is not None:
            start = p - len(row.prompt_ids)
            filled[i, start : start + len(experts)] = experts[: p + r - start]
    return filled


def column_of(values: list[Any]) -> np.ndarray:
    """A column [B] of numbers, or of objects where not every value is one."""
    if all(isinstance(value, int | float) for value in values):
        return np.array(values)
    column = np.empty(len(values), dtype=object)
    column[:] = values
    return column


def joined(parts: list[DataProto]) -> DataProto:
    """All rows; a column that a part lacks is None there."""
    names = {name for part in parts for name in part.non_tensor_batch}
    for part in parts:
        part.meta_info = {}
        for name in names - set(part.non_tensor_batch):
            part.non_tensor_batch[name] = column_of([None] * len(part))
    return DataProto.concat(parts)


def with_own_scores(output: DataProto) -> DataProto:
    """With rm_scores [B, R] in place of the column reward_score, if every row has one, lost rows aside.

    Raises ValueError for a score that is NaN or infinite.
    """
    given = output.non_tensor_batch.pop("reward_score", column_of([None] * len(output)))
    lost = output.non_tensor_batch[LOST].astype(bool)
    if not lost.all() and all(score is not None for score in given[~lost]):
        scores = [0.0 if score is None else float(score) for score in given]
        if not all(map(math.isfinite, scores)):
            raise ValueError(f"AgentLoopOutput.reward_score must be finite; the scores are {scores}.")
        output.batch["rm_scores"] = place_scores(output, scores)
    return output
