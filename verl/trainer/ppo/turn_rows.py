"""Conversations whose turns are rows of their own in the models' passes (rollout.multi_turn.row_per_turn).

A sample stays one row of the trainer's batch: rewards, groups, advantages and metrics belong to the conversation, its
columns [B, R] to all its response tokens. Only the models see rows of one turn each, after the prompt from which the
turn was generated.
"""

from collections.abc import Sequence

import torch

from verl.protocol import DataProto
from verl.workers.actor.batch_cuts import ROWS_PER_SAMPLE

#: Column: of each sample the list of (start, end, prompt ids) of its turns in the response; None for the response as a
#: whole after the sample's own prompt.
TURNS = "turn_prompts"

Turn = tuple[int, int, Sequence[int]]


def to_rows(samples: DataProto) -> DataProto:
    """k rows for each sample [B, P + R], of its k or fewer turns, in order: [B * k, P' + R]; without TURNS the samples.

    Tensors alone. Columns [B, R] are cut to the turn's tokens, columns [B] repeated. A row that fills up a sample of
    fewer turns has one prompt token, one response token and `response_mask` 0. meta_info[ROWS_PER_SAMPLE] is k, by
    which the ranks multiply their mini-batches, so that these hold the same samples as without rows for turns.
    group_index [B * k] numbers the rows: they do not share prompts.
    """
    if TURNS not in samples.non_tensor_batch:
        return samples.select(non_tensor_batch_keys=[])
    turns = turns_of(samples)
    most = max((len(own) for own in turns), default=1) or 1
    source, length = samples.batch, samples.batch["responses"].shape[1]
    given = {name: column for name, column in source.items() if name not in ("prompts", "input_ids", "position_ids")}
    own = {name: column for name, column in given.items() if column.dim() == 2 and column.shape[1] == length}
    width = max((len(prompt) for turn in turns for _, _, prompt in turn), default=1)
    total = len(samples) * most
    prompts = torch.zeros(total, width, dtype=torch.int64)
    attention = torch.zeros(total, width + length, dtype=source["attention_mask"].dtype)
    rows = {name: column.new_zeros(total, length) for name, column in own.items()}
    for i, sample in enumerate(turns):
        for row, (start, end, prompt) in enumerate(sample, i * most):
            prompts[row, width - len(prompt) :] = torch.tensor(prompt, dtype=torch.int64)
            attention[row, width - len(prompt) : width + end - start] = 1
            for name, column in own.items():
                rows[name][row, : end - start] = column[i, start:end]
        attention[i * most + len(sample) : (i + 1) * most, width - 1 : width + 1] = 1
    rows |= {name: column.repeat_interleave(most, 0) for name, column in given.items() if column.dim() == 1}
    rows |= {
        "prompts": prompts, "input_ids": torch.cat([prompts, rows["responses"]], 1), "attention_mask": attention,
        "position_ids": (attention.cumsum(1) - 1).clamp(min=0), "group_index": torch.arange(total),
    }  # fmt: skip
    meta = {**samples.meta_info, ROWS_PER_SAMPLE: most, "global_token_num": attention.sum(-1).tolist()}
    return DataProto.from_dict(rows, meta_info=meta)


def from_rows(output: DataProto, samples: DataProto) -> DataProto:
    """The columns [B * k, R] that a pass over `to_rows(samples)` gave, at the samples' tokens [B, R]; 0 elsewhere."""
    if TURNS not in samples.non_tensor_batch:
        return output
    turns, most = turns_of(samples), len(output) // len(samples)
    columns = {}
    for name, values in output.batch.items():
        columns[name] = values.new_zeros(len(samples), values.shape[1])
        for i, sample in enumerate(turns):
            for row, (start, end, _) in enumerate(sample, i * most):
                columns[name][i, start:end] = values[row, : end - start]
    return DataProto.from_dict(columns, meta_info=output.meta_info)


def turns_of(samples: DataProto) -> list[list[Turn]]:
    """The turns of each sample that have a token within the response's R, cut to it."""
    batch, found = samples.batch, []
    length = batch["responses"].shape[1]
    for i, given in enumerate(samples.non_tensor_batch[TURNS]):
        if given is None:
            mask = batch["attention_mask"][i].bool()
            prompt = batch["input_ids"][i, :-length][mask[:-length]].tolist()
            given = [(0, int(mask[-length:].sum()), prompt)]
        found.append([(start, min(end, length), prompt) for start, end, prompt in given if start < min(end, length)])
    return found

