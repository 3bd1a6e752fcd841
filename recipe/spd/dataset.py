"""Drafted blocks for the speculative-decoding scorer: [Context] SEP [Draft] SEP [Target] SEP with its offsets."""

from __future__ import annotations

import difflib
import functools
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import torch
from loguru import logger
from omegaconf import DictConfig

from recipe.spd.columns import ROWS_AT_A_TIME, Lists, TableRows, joined, read_table_rows
from verl.data.rl_dataset import FileRows, left_pad
from verl.utils.problems import one_line

OFFSETS = ("context_len", "draft_start", "draft_len", "target_start", "target_len")
IDS = ("context_ids", "draft_ids", "target_ids")
# Of a block; the first then comes from the metadata.
OPTIONAL = ("is_correct_baseline", "baseline_length", "question_len")
SEP_VARIABLE = "SPD_SEP_TOKEN_ID"


def build_spd_input(
    context_ids: list[int], draft_ids: list[int], target_ids: list[int], sep_token_id: int
) -> tuple[list[int], dict[str, int]]:
    """The scorer's input ids, and the offsets of its parts in it. Raises ValueError without a bonus token."""
    if len(target_ids) != len(draft_ids) + 1:
        raise ValueError(
            f"{len(target_ids)} target_ids for {len(draft_ids)} draft_ids; one more target id (the bonus token) is "
            "needed."
        )
    ids = [*context_ids, sep_token_id, *draft_ids, sep_token_id, *target_ids, sep_token_id]
    draft_start = len(context_ids) + 1
    return ids, {
        "context_len": len(context_ids), "draft_start": draft_start, "draft_len": len(draft_ids),
        "target_start": draft_start + len(draft_ids) + 1, "target_len": len(target_ids),
    }  # fmt: skip


def cut_at_end(draft: list[int], target: list[int], ends: frozenset[int]) -> tuple[list[int], list[int]]:
    """Drop the draft tokens after its end token, which are never used."""
    end = next((i for i, token in enumerate(draft) if token in ends), None)
    return (draft, target) if end is None else (draft[: end + 1], target[: end + 2])


def left_padded_layout(offsets: Mapping[str, int], padding: int) -> list[int]:
    """spd_layout: context_start, context_len, draft_start, draft_len, target_start after `padding` columns in front.

    The context ends before the first separator, also after a cut.
    """
    draft_start = offsets["draft_start"] + padding
    context_start = draft_start - 1 - offsets["context_len"]
    return [context_start, offsets["context_len"], draft_start, offsets["draft_len"], offsets["target_start"] + padding]


@dataclass
class SPDInputData:
    """Input batch of the scorer; all tensors have the same first dimension."""

    input_ids: torch.Tensor  # [B, P] int64, left-padded
    attention_mask: torch.Tensor  # [B, P], 1 = text
    position_ids: torch.Tensor  # [B, P], counted from the context's first token, 0 at padding
    spd_layout: torch.Tensor  # [B, 5] = context_start, context_len, draft_start, draft_len, target_start

    @classmethod
    def from_blocks(
        cls, contexts: Sequence[list[int]], drafts: Sequence[list[int]], targets: Sequence[list[int]], *,
        sep_token_id: int, pad_token_id: int, device: torch.device | str = "cpu",
    ) -> SPDInputData:  # fmt: skip
        """Blocks as ids (each target one longer than its draft), left-padded to the longest."""
        built = [build_spd_input(c, d, t, sep_token_id) for c, d, t in zip(contexts, drafts, targets, strict=True)]
        width = max(len(ids) for ids, _ in built)
        texts = [[pad_token_id] * (width - len(ids)) + ids for ids, _ in built]
        layout = [left_padded_layout(offsets, width - len(ids)) for ids, offsets in built]
        layout = torch.tensor(layout, device=device)
        positions = torch.arange(width, device=device) - layout[:, :1]
        return cls(torch.tensor(texts, device=device), (positions >= 0).long(), positions.clamp(min=0), layout)

    def as_kwargs(self) -> dict[str, torch.Tensor]:
        """The keyword arguments of ScoringActor.forward."""
        return dict(vars(self))


def block_error(block: Mapping[str, Any], vocabulary: int) -> str:
    """The error in the ids and optional columns of a block; empty if there is none."""
    wrong = (ids_error(name, block[name], vocabulary) for name in IDS)
    return next(filter(None, (*wrong, facts_error(block), spelling_error(tuple(block)))), "")


def ids_error(name: str, ids: Any, vocabulary: int) -> str:
    """The error in a column of token ids of a tokenizer with `vocabulary` entries; empty if there is none."""
    if isinstance(ids, list) and not ids:
        return f"{name} is empty; it needs at least one token id."
    rule = f"{name} must be a list of token ids from 0 to {vocabulary - 1}, those of the tokenizer"
    if not isinstance(ids, list):
        return f"{rule}, not {one_line(ids)}."
    if set(map(type, ids)) != {int} or min(ids) < 0 or max(ids) >= vocabulary:
        bad = next(i for i in ids if type(i) is not int or not 0 <= i < vocabulary)
        return f"{rule}, but holds {one_line(bad)}. Name the tokenizer that the ids were made with."
    return ""


def facts_error(facts: Mapping[str, Any]) -> str:
    """The error in a column of OPTIONAL (None: unknown); empty if there is none."""
    for name, low, high, rule in (
        ("is_correct_baseline", 0, 1, "0 or 1"),
        *((name, 0, 2**31 - 1, "a number of tokens") for name in ("baseline_length", "question_len")),
    ):  # fmt: skip
        value = facts.get(name)
        if value is not None and not (isinstance(value, int | float) and low <= value <= high and value == int(value)):
            return f"{name} must be {rule}, not {one_line(value)}."
    return ""


def truth_error(truth: Any) -> str:
    """The error in a ground truth, which must be a non-empty string or a finite number; empty if there is none."""
    if (isinstance(truth, str) and truth.strip()) or (type(truth) in (int, float) and abs(truth) < float("inf")):
        return ""
    return f"ground_truth must be a string or a number, not {one_line(repr(truth))}."


@functools.cache
def spelling_error(names: tuple[str, ...]) -> str:
    """The error of a column name that nearly matches an optional column; empty if there is none."""
    for name in names:
        if name not in OPTIONAL and (close := difflib.get_close_matches(name, OPTIONAL, n=1, cutoff=0.85)):
            return f"'{name}' is not a known column; did you mean '{close[0]}'? Rename it."
    return ""


def resolve_sep_token_id(tokenizer: Any, read: bool = True) -> int:
    """SPD_SEP_TOKEN_ID, else the tokenizer's sep token, else its first reserved special token; else an error.

    Without `read` (a `target` head, which sees no separator) the pad or end token does, instead of the error.
    """
    if SEP_VARIABLE in os.environ:
        text = os.environ[SEP_VARIABLE]
        if not text.isdecimal() or int(text) >= len(tokenizer):
            raise ValueError(f"{SEP_VARIABLE}={text!r} is not a token id below {len(tokenizer)}, the tokenizer's size.")
        return int(text)
    if tokenizer.sep_token_id is not None:
        return tokenizer.sep_token_id
    reserved = sorted(i for i, token in tokenizer.added_tokens_decoder.items() if "reserved" in token.content.lower())
    if reserved:
        return reserved[0]
    if not read:
        return tokenizer.eos_token_id if tokenizer.pad_token_id is None else tokenizer.pad_token_id
    raise ValueError(
        "an own backbone reads a separator, but the tokenizer has neither a sep nor a reserved special token: set "
        f"{SEP_VARIABLE} to a token id that never occurs in text, or use spd.backbone=target."
    )


def _integers(column: pa.Array) -> np.ndarray:
    """A column of integers, [N] int64; ValueError for a null or another type."""
    if column.null_count or not pa.types.is_integer(column.type):
        raise ValueError(f"a column of {column.type} with {column.null_count} nulls")
    return column.to_numpy().astype(np.int64)


class SPDRLHFDataset(FileRows):
    """One sample per drafted block: input_ids, attention_mask, position_ids [P] int64 (left-padded to
    data.max_prompt_length), spd_layout [5] int64, sample_index, and every other column of the row.

    Offsets in `extra_info` and `rollout_info` are shifted by the padding. An over-long block keeps its last
    data.max_prompt_length tokens: only context is cut. The ids in `extra_info` are not cut. Raises DatasetError, which
    names file and row, for a row that does not fit.
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
        return read_table_rows(path)

    def _keep(self, numbers: list[int]) -> None:
        rows = self.rows
        super()._keep(numbers)
        if isinstance(rows, TableRows):
            self.rows = rows.take(numbers)

    def _check_columns(self, numbers: range) -> int | None:
        """`_check` of several rows: how many will be cut, None where one of them must be looked at by itself."""
        (batch,) = self.rows.table.slice(numbers.start, len(numbers)).combine_chunks().to_batches()
        try:
            structs = extra, rollout, reward = [batch.column(n) for n in ("extra_info", "rollout_info", "reward_model")]
            ids = Lists.of(batch.column("input_ids"))
            context, draft, target = (Lists.of(extra.field(name)) for name in IDS)
            offsets = [[_integers(struct.field(name)) for name in OFFSETS] for struct in (extra, rollout)]
            known = [extra.field(name) for name in OPTIONAL if extra.type.get_field_index(name) >= 0]
            facts = [_integers(column.drop_null()) for column in known if not pa.types.is_null(column.type)]
            right, truths = _integers(extra.field("is_correct_baseline")), reward.field("ground_truth")
            is_blank = pc.any(pc.equal(pc.utf8_trim_whitespace(truths), "")).as_py()
            separators = ids.values[ids.starts + np.minimum(context.lengths, ids.lengths - 1)]
        except (AttributeError, KeyError, ValueError, TypeError, IndexError, pa.ArrowException):
            return None
        expected = joined((context, draft, target), separators)
        draft_start, target_start = context.lengths + 1, context.lengths + draft.lengths + 2
        places = [context.lengths, draft_start, draft.lengths, target_start, draft.lengths + 1]  # as in OFFSETS
        needed = ids.lengths - context.lengths + 1
        if not (
            all(part.within(self.vocabulary) for part in (ids, context, draft, target))
            and not any(column.null_count for column in (*structs, truths)) and not is_blank
            and np.array_equal(target.lengths, places[-1]) and all(np.array_equal(given, places) for given in offsets)
            and np.array_equal(ids.lengths, expected.lengths) and np.array_equal(ids.values, expected.values)
            and all(((0 <= column) & (column < 2**31)).all() for column in facts) and right.max() <= 1
            and draft.lengths.max() <= self.gamma and needed.max() <= self.max_prompt_length
            and not spelling_error(tuple(field.name for field in extra.type))
        ):  # fmt: skip
            return None
        where = slice(numbers.start, numbers.stop)
        self.separators[where], self.largest_ids[where] = separators, np.maximum.reduceat(ids.values, ids.starts)
        self.lengths[where] = ids.lengths
        return int((ids.lengths > self.max_prompt_length).sum())

    def _check(self, item: int) -> bool:
        """Raise DatasetError for inconsistent ids, offsets or lengths; True if the context will be cut."""
        row = self.rows[item]
        for column in ("input_ids", "extra_info", "rollout_info", "reward_model"):
            kind = list if column == "input_ids" else Mapping
            if column not in row or not isinstance(row[column], kind):
                raise self.error(
                    item, f"column '{column}' is missing or not a {kind.__name__.lower()}; columns: {', '.join(row)}."
                )
        extra, ids = row["extra_info"], row["input_ids"]
        if missing := [k for k in (*OFFSETS, *IDS, "is_correct_baseline") if extra.get(k) is None]:
            raise self.error(item, f"extra_info lacks {', '.join(missing)}; make the file with train_spd_scorer.py.")
        if "ground_truth" not in row["reward_model"]:
            raise self.error(item, f"reward_model has no 'ground_truth'; it has {sorted(row['reward_model'])}.")
        error = ids_error("input_ids", ids, self.vocabulary) or block_error(extra, self.vocabulary)
        if error := error or truth_error(row["reward_model"]["ground_truth"]):
            raise self.error(item, error)
        context, draft, target = (extra[name] for name in IDS)
        sep = ids[len(context)] if len(ids) > len(context) else -1
        try:
            expected, offsets = build_spd_input(context, draft, target, sep)
        except ValueError as length:
            raise self.error(item, str(length)) from length
        if ids != expected:
            raise self.error(item, "input_ids is not [context_ids] SEP [draft_ids] SEP [target_ids] SEP of extra_info.")
        for where in ("extra_info", "rollout_info"):
            for name, value in offsets.items():
                if type(row[where].get(name)) is not int or row[where][name] != value:
                    raise self.error(item, f"{where}.{name} is {row[where].get(name)!r}; input_ids says {value}.")
        if len(draft) > self.gamma:
            excess = f"the draft has {len(draft)} tokens, data.max_response_length={self.gamma}"
            raise self.error(item, f"{excess}. Raise it to {len(draft)}.")
        self.separators[item], self.largest_ids[item], self.lengths[item] = sep, max(ids), len(ids)
        needed = len(ids) - len(context) + 1  # one context token must stay: it predicts t_1
        if needed > self.max_prompt_length:
            limit = f"data.max_prompt_length={self.max_prompt_length} would cut the draft. Raise it."
            parts = "draft and target with their separators and one context token"
            raise self.error(item, f"{parts} need {needed} tokens, {limit}")
        return len(ids) > self.max_prompt_length

    def __getitem__(self, item: int) -> dict[str, Any]:
        row = dict(self.rows[item])
        ids = row.pop("input_ids")
        shift = self.max_prompt_length - len(ids)  # below 0: the first -shift context tokens are cut
        cut = max(0, -shift)
        width, pad = self.max_prompt_length, self.tokenizer.pad_token_id
        input_ids, attention_mask, position_ids = left_pad(ids[cut:], width, pad)
        offsets = {name: row["extra_info"][name] for name in OFFSETS}
        offsets["context_len"] -= cut
        offsets["draft_start"] += shift
        offsets["target_start"] += shift
        extra = {**row["extra_info"], **offsets, "ground_truth": row["reward_model"]["ground_truth"]}
        return {
            **row, "extra_info": extra, "rollout_info": {**row["rollout_info"], **offsets}, "input_ids": input_ids,
            "attention_mask": attention_mask, "position_ids": position_ids,
            "spd_layout": torch.tensor(left_padded_layout(offsets, 0)),
            "index": extra["index"] if extra.get("index") is not None else item, "sample_index": torch.tensor(item),
        }  # fmt: skip
