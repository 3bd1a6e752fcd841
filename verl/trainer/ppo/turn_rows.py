"""The trainer's batch as rows that the ranks share evenly, one per turn with rollout.multi_turn.row_per_turn.

In the trainer's batch, a conversation is one row: rewards, groups, advantages and metrics belong to the conversation,
and columns [B, R] cover all of its response tokens. For a forward pass, each turn becomes a row that consists of the
prompt from which the turn was generated and the turn.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from verl.protocol import DataProto, pad_dataproto_to_divisor, unpad_dataproto
from verl.protocol.sampling_mask import SAMPLING_MASK, kept_ids, mask_column, mask_tensor
from verl.trainer.ppo.batching import fill_groups
from verl.training.actor.batch_cuts import ROWS_PER_SAMPLE
from verl.utils.metric import reduce_metrics

#: Column with the turns of each sample, a list of (start, end, prompt ids), where start and end are positions in the
#: response. None stands for a single turn: the whole response after the sample's prompt.
TURNS = "turn_prompts"

Turn = tuple[int, int, Sequence[int]]


def to_rows(samples: DataProto) -> DataProto:
    """Rows of single turns: [B * k, P' + R] for samples [B, P + R], where k is the largest number of turns of a sample.

    The result has tensors only. Columns [B, R] are sliced to the tokens of the turn, columns [B] are repeated. A sample
    with fewer than k turns is padded by rows with one prompt token, one response token and `response_mask` 0.
    meta_info[ROWS_PER_SAMPLE] is k: the ranks multiply their mini-batch sizes by it, so that mini-batches contain the
    same samples as without this conversion. Rows have the group_index of their sample, so that a forward may share the
    tokens they begin with; without that column each row is a group. Without the column TURNS, the samples are returned,
    with their sampling masks as a tensor.
    """
    masks, length = samples.non_tensor_batch.get(SAMPLING_MASK), samples.batch["responses"].shape[1]
    if TURNS not in samples.non_tensor_batch:
        rows = samples.select(non_tensor_batch_keys=[])
        if masks is not None:
            rows.batch[SAMPLING_MASK] = mask_tensor(masks, length)
        return rows
    turns = turns_of(samples)
    k = max(map(len, turns), default=1) or 1
    total = len(samples) * k
    width = max((len(prompt) for sample in turns for _, _, prompt in sample), default=1)  # of the longest prompt, P'
    per_token, columns = {}, {"group_index": torch.arange(total)}
    for name, column in samples.batch.items():
        if column.dim() == 1:
            columns[name] = column.repeat_interleave(k, 0)
        elif column.dim() == 2 and column.shape[1] == length and name != "prompts":
            per_token[name] = column
            columns[name] = column.new_zeros(total, length)
    prompts = torch.zeros(total, width, dtype=torch.int64)
    attention = torch.zeros(total, width + length, dtype=samples.batch["attention_mask"].dtype)
    for i, sample in enumerate(turns):
        for row, (start, end, prompt) in enumerate(sample, i * k):
            prompts[row, width - len(prompt) :] = torch.tensor(prompt, dtype=torch.int64)
            attention[row, width - len(prompt) : width + end - start] = 1
            for name, column in per_token.items():
                columns[name][row, : end - start] = column[i, start:end]
        attention[i * k + len(sample) : (i + 1) * k, width - 1 : width + 1] = 1  # rows without a turn
    if masks is not None:
        columns[SAMPLING_MASK] = mask_tensor(_masks_of_turns(masks, turns, k), length)
    columns |= {
        "prompts": prompts, "input_ids": torch.cat([prompts, columns["responses"]], 1), "attention_mask": attention,
        "position_ids": (attention.cumsum(1) - 1).clamp(min=0),
    }  # fmt: skip
    meta = {**samples.meta_info, ROWS_PER_SAMPLE: k, "global_token_num": attention.sum(-1).tolist()}
    return DataProto.from_dict(columns, meta_info=meta)


def _masks_of_turns(masks: np.ndarray, turns: list[list[Turn]], k: int) -> np.ndarray:
    """The column of kept tokens [B] as that of k turns of each sample, [B * k]."""
    kept: list[list[np.ndarray]] = []
    for mask, sample in zip(masks, turns, strict=True):
        ids = [] if mask is None else kept_ids(mask)
        kept += [ids[start:end] for start, end, _ in sample] + [[]] * (k - len(sample))
    return mask_column(kept)


def from_rows(output: DataProto, samples: DataProto) -> DataProto:
    """The inverse of `to_rows` for model outputs: columns [B * k, R] to [B, R], with 0 where no turn has a token."""
    if TURNS not in samples.non_tensor_batch:
        return output
    turns, k = turns_of(samples), len(output) // len(samples)
    columns = {}
    for name, values in output.batch.items():
        columns[name] = values.new_zeros(len(samples), values.shape[1])
        for i, sample in enumerate(turns):
            for row, (start, end, _) in enumerate(sample, i * k):
                columns[name][i, start:end] = values[row, : end - start]
    return DataProto.from_dict(columns, meta_info=output.meta_info)


def turns_of(samples: DataProto) -> list[list[Turn]]:
    """The turns of each sample, truncated to the response length R; turns without tokens are left out."""
    batch, result = samples.batch, []
    length = batch["responses"].shape[1]
    for i, turns in enumerate(samples.non_tensor_batch[TURNS]):
        if turns is None:
            mask = batch["attention_mask"][i].bool()
            prompt = batch["input_ids"][i, :-length][mask[:-length]].tolist()
            turns = [(0, int(mask[-length:].sum()), prompt)]
        result.append([(start, min(end, length), prompt) for start, end, prompt in turns if start < min(end, length)])
    return result


@dataclass(frozen=True)
class RankRows:
    """Sends batches of groups of `n` samples to the methods of worker groups with so many ranks.

    With `whole_groups` the rows of a group stay on one rank.
    """

    n: int
    ranks: int
    whole_groups: bool

    def forward(self, method: Callable[[DataProto], DataProto], batch: DataProto) -> DataProto:
        """The method's columns [B, R] for the samples [B]; they need not divide by the ranks."""
        filled, is_own = fill_groups(batch, self.n)
        divisor = self.ranks * (self.n if self.whole_groups else 1)  # one of DAPO's generations may not divide
        padded, pad = pad_dataproto_to_divisor(filled, divisor)
        output = unpad_dataproto(from_rows(method(to_rows(padded)), padded), pad_size=pad)
        return output if is_own.all() else output.select_idxs(is_own)

    def update(self, method: Callable[[DataProto], DataProto], batch: DataProto) -> dict[str, Any]:
        """The metrics of an update on the samples [B], whose groups the ranks share evenly."""
        rows = to_rows(fill_groups(batch, self.n)[0])
        return reduce_metrics(method(rows).meta_info["metrics"])
