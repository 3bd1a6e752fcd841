"""The data set of drafted blocks: prepared rows become [Context] SEP [Draft] SEP [Target] SEP with its offsets."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from loguru import logger
from omegaconf import DictConfig

from recipe.spd.data.blocks import IDS, build_spd_input, left_padded_layout
from recipe.spd.data.columns import TableRows, read_table_rows
from recipe.spd.data.validation import validate_block, validate_ground_truth
from verl.data.rl_dataset import FileRows, left_pad
from verl.utils.problems import one_line


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
        # Of each block, for the recipe's checks: the separator, the largest id, the length before a cut.
        self.separators, self.largest_ids, self.lengths = np.empty((3, len(self.rows)), dtype=np.int64)
        if cut := sum(self._check(item, row) for item, row in enumerate(self.rows)):
            logger.info(
                "{} of {} blocks exceed data.max_prompt_length={} and lose the start of their context",
                cut, len(self.rows), self.max_prompt_length,
            )  # fmt: skip

    @staticmethod
    def read(path: str | Path) -> Sequence[dict[str, Any]]:
        return read_table_rows(path)

    def _keep(self, numbers: list[int]) -> None:
        rows = self.rows
        super()._keep(numbers)
        if isinstance(rows, TableRows):
            self.rows = rows.take(numbers)

    def _check(self, item: int, row: dict[str, Any]) -> bool:
        """Raise DatasetError for wrong ids, optional columns or lengths; True if the context will be cut."""
        for column in ("extra_info", "reward_model"):
            if not isinstance(row.get(column), Mapping):
                raise self.error(item, f"column '{column}' is missing or not a mapping; columns: {', '.join(row)}.")
        extra = row["extra_info"]
        if missing := [name for name in (*IDS, "is_correct_baseline") if extra.get(name) is None]:
            raise self.error(item, f"extra_info lacks {', '.join(missing)}; make the file with train_spd_scorer.py.")
        if "ground_truth" not in row["reward_model"]:
            raise self.error(item, f"reward_model has no 'ground_truth'; it has {sorted(row['reward_model'])}.")
        truth, sep = row["reward_model"]["ground_truth"], row.get("sep_token_id")
        if error := validate_block(extra, self.vocabulary) or validate_ground_truth(truth):
            raise self.error(item, error)
        if type(sep) is not int or not 0 <= sep < self.vocabulary:
            rule = f"sep_token_id must be a token id from 0 to {self.vocabulary - 1}, not {one_line(sep)}"
            raise self.error(item, f"{rule}; make the file with train_spd_scorer.py.")
        context, draft, target = (extra[name] for name in IDS)
        if len(draft) > self.gamma:
            excess = f"the draft has {len(draft)} tokens, data.max_response_length={self.gamma}"
            raise self.error(item, f"{excess}. Raise it to {len(draft)}.")
        length = len(context) + len(draft) + len(target) + 3
        self.separators[item], self.lengths[item] = sep, length
        self.largest_ids[item] = max(sep, max(context), max(draft), max(target))
        needed = length - len(context) + 1  # one context token must stay: it predicts t_1
        if needed > self.max_prompt_length:
            what = f"draft and target with their separators and one context token need {needed} tokens"
            limit = f"data.max_prompt_length={self.max_prompt_length} would cut the draft. Raise it."
            raise self.error(item, f"{what}, {limit}")
        return length > self.max_prompt_length

    def __getitem__(self, item: int) -> dict[str, Any]:
        row = dict(self.rows[item])
        ids, offsets = build_spd_input(*(row["extra_info"][name] for name in IDS), row.pop("sep_token_id"))
        shift = self.max_prompt_length - len(ids)  # below 0: the first -shift context tokens are cut
        cut = max(0, -shift)
        padded = left_pad(ids[cut:], self.max_prompt_length, self.tokenizer.pad_token_id)
        input_ids, attention_mask, position_ids = padded
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
