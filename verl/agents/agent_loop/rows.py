"""Turns finished conversations into the rows of a batch."""

import math
from typing import Any

import numpy as np
import torch

from verl.agents.agent_loop.base import AgentLoopOutput
from verl.config.rollout import RolloutConfig
from verl.protocol import DataProto
from verl.protocol.sampling_mask import SAMPLING_MASK, mask_column
from verl.protocol.serialization import object_array
from verl.reward.rows import LOST, place_scores
from verl.rollout.sampling import right_padded


def empty_output(end_reason: str | None = None) -> AgentLoopOutput:
    """A conversation of which nothing is known but why it ended."""
    fields = {} if end_reason is None else {"end_reason": end_reason}
    return AgentLoopOutput(prompt_ids=[], response_ids=[], response_mask=[], extra_fields=fields)


def is_lost(output: AgentLoopOutput | None) -> bool:
    """Whether a conversation was cancelled, or its tool or program failed: the model did not cause its end."""
    return output is None or output.extra_fields.get("end_reason") in ("cancelled", "tool_failed", "program_failed")


def batch_of(outputs: list[AgentLoopOutput | None], rollout: RolloutConfig, pad_id: int) -> DataProto:
    """Rows of one shape: `prompts` [B, P], left-padded, `responses` [B, R], right-padded, and the other columns.

    Also response_mask [B, R], 1 = generated token; input_ids, attention_mask, position_ids [B, P + R]; with
    rollout.calculate_log_probs, rollout_log_probs [B, R]; sampling_mask if a row has kept tokens. Lost conversations
    are marked in the column __lost__; None is an empty row. meta_info["metrics"] has a dict for each row.
    """
    lost = np.array([is_lost(output) for output in outputs], dtype=bool)
    rows = [output or empty_output() for output in outputs]
    p, r = rollout.prompt_length, rollout.response_length
    response_ids = [row.response_ids[:r] for row in rows]
    reversed_prompts = right_padded([row.prompt_ids[::-1] for row in rows], p, pad_id, torch.int64)
    prompt_mask = right_padded([[1] * len(row.prompt_ids) for row in rows], p, 0, torch.int64).flip(1)
    responses = right_padded(response_ids, r, pad_id, torch.int64)
    response_attended = right_padded([[1] * len(ids) for ids in response_ids], r, 0, torch.int64)
    attention_mask = torch.cat([prompt_mask, response_attended], 1)
    tensors = {
        "prompts": reversed_prompts.flip(1),
        "responses": responses,
        "response_mask": right_padded([row.response_mask[:r] for row in rows], r, 0, torch.int64),
        "input_ids": torch.cat([reversed_prompts.flip(1), responses], 1),
        "attention_mask": attention_mask,
        "position_ids": (attention_mask.cumsum(1) - 1).clamp(min=0),
    }
    if rollout.calculate_log_probs:
        log_probs = [(row.response_logprobs or [])[:r] for row in rows]
        tensors["rollout_log_probs"] = right_padded(log_probs, r, 0.0, torch.float32)
    turns = np.array([row.num_turns for row in rows], dtype=np.int32)
    columns: dict[str, Any] = {"__num_turns__": turns, LOST: lost}
    for row in rows:
        if len(row.response_ids) > r:
            row.extra_fields["end_reason"] = "length"
    for name in sorted({name for row in rows for name in row.extra_fields}):
        columns[name] = column_of([row.extra_fields.get(name) for row in rows])
    if any(row.kept_tokens is not None for row in rows):
        columns[SAMPLING_MASK] = mask_column((row.kept_tokens or [])[:r] for row in rows)
    scores = [row.reward_score for row in rows]
    if any(score is not None for score in scores):
        columns["reward_score"] = column_of(scores)
    metrics = [row.metrics.model_dump() for row in rows]
    return DataProto.from_dict(tensors, columns, {"metrics": metrics})


def column_of(values: list[Any]) -> np.ndarray:
    """A column [B] of numbers, or of objects where not every value is one."""
    if all(isinstance(value, int | float) for value in values):
        return np.array(values)
    return object_array(values)


def concat_rows(parts: list[DataProto]) -> DataProto:
    """All rows, without meta_info; a column that a part lacks is None there."""
    names = {name for part in parts for name in part.non_tensor_batch}
    filled = []
    for part in parts:
        missing = {name: column_of([None] * len(part)) for name in names - set(part.non_tensor_batch)}
        filled.append(DataProto(part.batch, part.non_tensor_batch | missing, {}))
    return DataProto.concat(filled)


def use_loop_scores(output: DataProto) -> DataProto:
    """Replaces the column reward_score by rm_scores [B, R] if every row but the lost ones has a score.

    Raises ValueError for a score that is NaN or infinite.
    """
    given = output.non_tensor_batch.pop("reward_score", column_of([None] * len(output)))
    lost = output.non_tensor_batch[LOST].astype(bool)
    if not lost.all() and all(score is not None for score in given[~lost]):
        scores = [0.0 if score is None else float(score) for score in given]
        for row, score in enumerate(scores):
            if not math.isfinite(score):
                raise ValueError(f"AgentLoopOutput.reward_score={score} (row {row}) must be finite.")
        output.batch["rm_scores"] = place_scores(output, scores)
    return output
