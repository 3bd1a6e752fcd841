"""Prepares training data of the scorer from drafted blocks and the questions' metadata."""

import itertools
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
from loguru import logger

from recipe.spd.data.blocks import IDS, cut_at_end, resolve_sep_token_id
from recipe.spd.data.columns import ROWS_AT_A_TIME, row_batches
from recipe.spd.data.validation import validate_block, validate_ground_truth, validate_optional
from recipe.spd.scorer.auto import SCORERS
from verl.data.rl_dataset import read_rows
from verl.utils.tokenizer import stop_ids

SCHEMA = pa.schema(
    [
        ("data_source", pa.string()), ("prompt", pa.string()), ("sep_token_id", pa.int32()),
        ("extra_info", pa.struct([
            ("index", pa.int64()), ("question_id", pa.string()), *((name, pa.list_(pa.int32())) for name in IDS),
            ("is_correct_baseline", pa.int64()), ("baseline_length", pa.int64()), ("question_len", pa.int64()),
            ("labels", pa.list_(pa.float32())),
        ])),
        ("reward_model", pa.struct([("style", pa.string()), ("ground_truth", pa.string())])),
    ]
)  # fmt: skip
"""The columns of a prepared file; docs/spd.md describes them."""


class DataError(ValueError):
    """A block or metadata file cannot be used; the message names the file, the row and the fix."""


@dataclass(frozen=True)
class PreparedData:
    """The file that `prepare_spd_data_from_real_source` wrote, with numbers of rows and lengths in tokens."""

    path: Path
    rows: int
    skipped_matches: int  # blocks that exact match accepts completely, or up to the end token
    longest_input: int
    gamma: int


def prepare_spd_data_from_real_source(
    blocks_path: str | Path, metadata_path: str | Path, output_path: str | Path, tokenizer: Any,
    backbone: str = "own",
) -> PreparedData:  # fmt: skip
    """Write the training parquet from generated blocks and the questions' metadata (parquet or jsonl).

    docs/spd.md describes their columns. `backbone` is the scorer's: a `target` head needs no separator token. Raises
    DataError for a block or question that cannot be used, and if no block has a mismatch.
    """
    questions = _read_metadata(metadata_path, read_rows(metadata_path))
    output = Path(output_path)
    output.parent.mkdir(parents=True, exist_ok=True)
    partial = output.with_suffix(".tmp")
    read = rows = longest = gamma = 0
    with pq.ParquetWriter(partial, SCHEMA, write_page_checksum=True) as writer:
        made = _training_rows(blocks_path, questions, metadata_path, tokenizer, backbone)
        while batch := list(itertools.islice(made, ROWS_AT_A_TIME)):
            kept = [row for row in batch if row is not None]
            writer.write_table(pa.Table.from_pylist(kept, SCHEMA))
            read += len(batch)
            rows += len(kept)
            for row in kept:
                context, draft, target = (len(row["extra_info"][name]) for name in IDS)
                longest = max(longest, context + draft + target + 3)  # with a separator after each
                gamma = max(gamma, draft)
    if not rows:
        partial.unlink()
        raise DataError(f"{blocks_path}: none of its {read} blocks has a mismatch to judge; generate more.")
    os.replace(partial, output)
    logger.info("{}: {} blocks to judge, {} blocks without a mismatch skipped", output, rows, read - rows)
    return PreparedData(output, rows, read - rows, longest, gamma)


def _training_rows(
    blocks_path: str | Path, questions: Mapping[Any, Mapping[str, Any]], metadata_path: str | Path, tokenizer: Any,
    backbone: str,
) -> Iterator[dict[str, Any] | None]:  # fmt: skip
    """The training row of each block; None for one without a mismatch. Raises DataError for a block that is wrong."""
    sep = resolve_sep_token_id(tokenizer, read=SCORERS[backbone].reads_separator)
    ends = frozenset(stop_ids(tokenizer))
    kept = 0
    for number, block in enumerate(itertools.chain.from_iterable(row_batches(blocks_path))):
        where = f"{blocks_path}, row {number}"
        _refuse_missing(where, block, ("question_id", *IDS))
        if block["question_id"] not in questions:
            raise DataError(f"{where}: question_id {block['question_id']!r} is not in {metadata_path}; add it there.")
        if error := validate_block(block, len(tokenizer)):
            raise DataError(f"{where}: {error}")
        context, draft, target = (list(block[name]) for name in IDS)
        if (block.get("question_len") or 0) > len(context):
            raise DataError(
                f"{where}: question_len is {block['question_len']}, but the context has {len(context)} ids. Lower it."
            )
        used, wanted = cut_at_end(draft, target, ends)
        if used == wanted[:-1]:
            yield None
            continue
        question = questions[block["question_id"]]
        baseline = block.get("is_correct_baseline")
        extra = {
            "index": kept, "question_id": str(block["question_id"]),
            "context_ids": context, "draft_ids": draft, "target_ids": target,
            "is_correct_baseline": int(question["is_correct_baseline"] if baseline is None else baseline),
            "labels": block.get("labels"),
        }  # fmt: skip
        for name in ("baseline_length", "question_len"):
            extra[name] = None if block.get(name) is None else int(block[name])
        kept += 1
        yield {
            "data_source": "spd_scorer", "prompt": question["question"], "sep_token_id": sep, "extra_info": extra,
            "reward_model": {"style": "rule", "ground_truth": str(question["ground_truth"])},
        }  # fmt: skip


def _read_metadata(path: str | Path, rows: Sequence[Mapping[str, Any]]) -> dict[Any, Mapping[str, Any]]:
    """The rows by question_id. Raises DataError for a missing or invalid value and for a repeated question_id."""
    questions: dict[Any, Mapping[str, Any]] = {}
    for number, row in enumerate(rows):
        where = f"{path}, row {number}"
        _refuse_missing(where, row, ("question_id", "question", "ground_truth", "is_correct_baseline"))
        if not isinstance(row["question"], str):
            raise DataError(f"{where}: question must be a string, not {str(row['question'])[:80]}.")
        if wrong := validate_optional(row) or validate_ground_truth(row["ground_truth"]):
            raise DataError(f"{where}: {wrong}")
        if row["question_id"] in questions:
            raise DataError(f"{where}: question_id {row['question_id']!r} occurs twice; keep one.")
        questions[row["question_id"]] = row
    return questions


def _refuse_missing(where: str, row: Mapping[str, Any], needed: Sequence[str]) -> None:
    """Raise DataError unless every needed column has a value, and question_id one that can be looked up."""
    if missing := [name for name in needed if row.get(name) is None]:
        raise DataError(f"{where}: lacks {', '.join(missing)}; it has {', '.join(map(str, row))}. Add or rename it.")
    if not isinstance(row["question_id"], str | int):
        raise DataError(f"{where}: question_id must be a string or an integer, not {str(row['question_id'])[:80]}.")
