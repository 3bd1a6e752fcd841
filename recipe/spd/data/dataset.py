"""The data set of drafted blocks: prepared rows become [Context] SEP [Draft] SEP [Target] SEP with its offsets."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import torch
from loguru import logger
from omegaconf import DictConfig

from recipe.spd.data.blocks import (
    IDS,
    OPTIONAL,
    build_spd_input,
    left_padded_layout,
    validate_block,
    validate_column_names,
    validate_ground_truth,
)
from recipe.spd.data.columns import ROWS_AT_A_TIME, Lists, TableRows, read_table_rows
from recipe.spd.data.repeated_rows import batch_without_copies, row_without_copies
from verl.data.rl_dataset import FileRows, left_pad
from verl.utils.problems import one_line


def _integers(column: pa.Array) -> np.ndarray:
    """A column of integers, [N] int64; ValueError for a null or another type."""
    if column.null_count or not pa.types.is_integer(column.type):
        raise ValueError(f"a column of {column.type} with {column.null_count} nulls")
    return column.to_numpy().astype(np.int64)


class SPDRLHFDataset(FileRows):
    """One sample per drafted block: input_ids, attention_mask, position_ids [P] int64 (left-padded to
    data.max_prompt_length), spd_layout [5] int64, sample_index, and every other column of the row.

    `extra_info` and `rollout_info` get the offsets of the parts in the padded input_ids. An over-long block keeps its
    last data.max_prompt_length tokens: only context is cut. The ids in `extra_info` are not cut. Raises DatasetError,
    which names file and row, for a row that does not fit.
    """

    def __init__(
        self, data_files: str | list[str], tokenizer: Any, config: DictConfig, processor: Any = None,
        max_samples: int = -1,
    ) -> None:  # fmt: skip
        super().__init__(data_files)
        self.tokenizer = tokenizer
        self.vocabulary = len(tokenizer)
        self.max_prompt_length = config.max_prompt_length
        self.gamma = config.max_response_length
        if tokenizer.pad_token_id is None:
            raise ValueError("the tokenizer has no pad token; set one (tokenizer.pad_token = tokenizer.eos_token).")
        self.draw(max_samples, config)
        self.separators = np.empty(len(self.rows), dtype=np.int64)  # of each block
        self.largest_ids, self.lengths = (np.empty_like(self.separators) for _ in range(2))
        cut = 0
        for first in range(0, len(self.rows), ROWS_AT_A_TIME):
            numbers = range(first, min(first + ROWS_AT_A_TIME, len(self.rows)))
            over_long = self._check_columns(numbers) if isinstance(self.rows, TableRows) else None
            cut += sum(self._check(i) for i in numbers) if over_long is None else over_long
        if cut:
            logger.info(
                "{} of {} blocks exceed data.max_prompt_length={} and lose the start of their context",
                cut, len(self.rows), self.max_prompt_length,
            )  # fmt: skip

    @staticmethod
    def read(path: str | Path) -> Sequence[dict[str, Any]]:
        rows = read_table_rows(path, batch_without_copies)
        if isinstance(rows, TableRows):
            return rows
        return [row_without_copies(row, f"{path}, row {number}") for number, row in enumerate(rows)]

    def _keep(self, numbers: list[int]) -> None:
        rows = self.rows
        super()._keep(numbers)
        if isinstance(rows, TableRows):
            self.rows = rows.take(numbers)

    def _check_columns(self, numbers: range) -> int | None:
        """`_check` of several rows: how many will be cut, None where one of them must be looked at by itself."""
        (batch,) = self.rows.table.slice(numbers.start, len(numbers)).combine_chunks().to_batches()
        try:
            structs = extra, reward = [batch.column(name) for name in ("extra_info", "reward_model")]
            context, draft, target = parts = [Lists.of(extra.field(name)) for name in IDS]
            separators = _integers(batch.column("sep_token_id"))
            known = [extra.field(name) for name in OPTIONAL if extra.type.get_field_index(name) >= 0]
            facts = [_integers(column.drop_null()) for column in known if not pa.types.is_null(column.type)]
            right, truths = _integers(extra.field("is_correct_baseline")), reward.field("ground_truth")
            is_blank = pc.any(pc.equal(pc.utf8_trim_whitespace(truths), "")).as_py()
        except (AttributeError, KeyError, ValueError, TypeError, IndexError, pa.ArrowException):
            return None
        lengths = context.lengths + draft.lengths + target.lengths + 3  # with the separators
        if not (
            all(part.within(self.vocabulary) for part in parts) and 0 <= separators.min()
            and separators.max() < self.vocabulary
            and not any(column.null_count for column in (*structs, truths)) and not is_blank
            and np.array_equal(target.lengths, draft.lengths + 1)
            and all(((0 <= column) & (column < 2**31)).all() for column in facts) and right.max() <= 1
            and draft.lengths.max() <= self.gamma
            and (lengths - context.lengths + 1).max() <= self.max_prompt_length
            and not validate_column_names(tuple(field.name for field in extra.type))
        ):  # fmt: skip
            return None
        where = slice(numbers.start, numbers.stop)
        largest = [np.maximum.reduceat(part.values, part.starts) for part in parts]
        self.separators[where], self.lengths[where] = separators, lengths
        self.largest_ids[where] = np.maximum.reduce([separators, *largest])
        return int((lengths > self.max_prompt_length).sum())

    def _check(self, item: int) -> bool:
        """Raise DatasetError for wrong ids, optional columns or lengths; True if the context will be cut."""
        row = self.rows[item]
        for column in ("extra_info", "reward_model"):
            if not isinstance(row.get(column), Mapping):
                raise self.error(item, f"column '{column}' is missing or not a mapping; columns: {', '.join(row)}.")
        extra = row["extra_info"]
        if missing := [name for name in (*IDS, "is_correct_baseline") if extra.get(name) is None]:
            raise self.error(item, f"extra_info lacks {', '.join(missing)}; make the file with train_spd_scorer.py.")
        if "ground_truth" not in row["reward_model"]:
            raise self.error(item, f"reward_model has no 'ground_truth'; it has {sorted(row['reward_model'])}.")
        if row.get("sep_token_id") is None:
            raise self.error(item, "column 'sep_token_id' is missing; make the file with train_spd_scorer.py.")
        error = validate_block(extra, self.vocabulary) or validate_ground_truth(row["reward_model"]["ground_truth"])
        sep = row["sep_token_id"]
        if not error and (type(sep) is not int or not 0 <= sep < self.vocabulary):
            error = f"sep_token_id must be a token id from 0 to {self.vocabulary - 1}, not {one_line(sep)}."
        if error:
            raise self.error(item, error)
        context, draft, target = (extra[name] for name in IDS)
        if len(draft) > self.gamma:
            excess = f"the draft has {len(draft)} tokens, data.max_response_length={self.gamma}"
            raise self.error(item, f"{excess}. Raise it to {len(draft)}.")
        length = len(context) + len(draft) + len(target) + 3
        self.separators[item], self.lengths[item] = sep, length
        self.largest_ids[item] = max(sep, *context, *draft, *target)
        needed = length - len(context) + 1  # one context token must stay: it predicts t_1
        if needed > self.max_prompt_length:
            limit = f"data.max_prompt_length={self.max_prompt_length} would cut the draft. Raise it."
            parts = "draft and target with their separators and one context token"
            raise self.error(item, f"{parts} need {needed} tokens, {limit}")
        return length > self.max_prompt_length

    def __getitem__(self, item: int) -> dict[str, Any]:
        row = dict(self.rows[item])
        ids, offsets = build_spd_input(*(row["extra_info"][name] for name in IDS), row.pop("sep_token_id"))
        shift = self.max_prompt_length - len(ids)  # below 0: the first -shift context tokens are cut
        cut = max(0, -shift)
        width, pad = self.max_prompt_length, self.tokenizer.pad_token_id
        input_ids, attention_mask, position_ids = left_pad(ids[cut:], width, pad)
        offsets["context_len"] -= cut
        offsets["draft_start"] += shift
        offsets["target_start"] += shift
        extra = {**row["extra_info"], **offsets, "ground_truth": row["reward_model"]["ground_truth"]}
        return {
            **row, "extra_info": extra, "rollout_info": offsets, "input_ids": input_ids,
            "attention_mask": attention_mask, "position_ids": position_ids,
            "spd_layout": torch.tensor(left_padded_layout(offsets, 0)),
            "index": extra["index"] if extra.get("index") is not None else item, "sample_index": torch.tensor(item),
        }  # fmt: skip
