"""Checks of the blocks and questions that users give."""

import difflib
import functools
from collections.abc import Mapping
from typing import Any

from recipe.spd.data.blocks import IDS, bonus_error, mismatches
from verl.utils.problems import one_line

# Columns that a block may lack; is_correct_baseline is then that of its question.
OPTIONAL = ("is_correct_baseline", "baseline_length", "question_len", "labels")
INT32_MAX = 2**31 - 1


def validate_block(block: Mapping[str, Any], vocabulary: int) -> str:
    """The error in the ids and optional columns of a block; empty if there is none."""
    for name in IDS:
        if error := validate_ids(name, block[name], vocabulary):
            return error
    draft, target = block["draft_ids"], block["target_ids"]
    if error := validate_optional(block) or validate_column_names(tuple(block)) or bonus_error(draft, target):
        return error
    labels, count = block.get("labels") or (), len(mismatches(draft, target))
    if len(labels) > count:
        return f"{len(labels)} labels for {count} mismatches; give one for each of the first mismatches."
    return ""


def validate_ids(name: str, ids: Any, vocabulary: int) -> str:
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


def validate_optional(block: Mapping[str, Any]) -> str:
    """The error in a column of OPTIONAL (None: unknown); empty if there is none."""
    limits = {"is_correct_baseline": 1, "baseline_length": INT32_MAX, "question_len": INT32_MAX}
    for name, high in limits.items():
        value = block.get(name)
        if value is not None and not (isinstance(value, int | float) and 0 <= value <= high and value == int(value)):
            rule = "0 or 1" if high == 1 else "a number of tokens"
            return f"{name} must be {rule}, not {one_line(value)}."
    labels = block.get("labels")
    if labels is not None and not (
        isinstance(labels, list) and all(isinstance(label, int | float) and 0 <= label <= 1 for label in labels)
    ):
        return f"labels must be a list of numbers from 0 (harmful) to 1 (harmless), not {one_line(labels)}."
    return ""


def validate_ground_truth(truth: Any) -> str:
    """The error in a ground truth, which must be a non-empty string or a finite number; empty if there is none."""
    if (isinstance(truth, str) and truth.strip()) or (type(truth) in (int, float) and abs(truth) < float("inf")):
        return ""
    return f"ground_truth must be a string or a number, not {one_line(repr(truth))}."


@functools.cache
def validate_column_names(names: tuple[str, ...]) -> str:
    """The error of a column name that nearly matches an optional column; empty if there is none."""
    for name in names:
        if name not in OPTIONAL and (close := difflib.get_close_matches(name, OPTIONAL, n=1, cutoff=0.85)):
            return f"'{name}' is not a known column; did you mean '{close[0]}'? Rename it."
    return ""
