"""Reads rows that earlier versions prepared, in which each fact of a block is repeated.

Besides the ids in `extra_info` they have `input_ids` = [Context] SEP [Draft] SEP [Target] SEP, and the offsets of its
parts in `extra_info` and `rollout_info`. Only the separator is new in these columns: it becomes `sep_token_id`.
"""

from collections.abc import Mapping
from typing import Any

import numpy as np
import pyarrow as pa

from recipe.spd.data.blocks import IDS, OFFSETS, build_spd_input
from recipe.spd.data.columns import Lists, joined
from verl.data.rl_dataset import DatasetError

REPEATED = ("input_ids", "rollout_info")


def row_without_copies(row: dict[str, Any], where: str) -> dict[str, Any]:
    """The row as it is prepared today. Raises DatasetError, which begins with `where`, if its copies differ."""
    if "input_ids" not in row:
        return row
    ids, extra = row["input_ids"], row.get("extra_info")
    parts = [extra.get(name) for name in IDS] if isinstance(extra, Mapping) else [None]
    if all(isinstance(part, list) for part in parts):
        place = len(parts[0])
        sep = ids[place] if isinstance(ids, list) and len(ids) > place else None
        if len(parts[2]) != len(parts[1]) + 1 or ids != build_spd_input(*parts, sep)[0]:
            raise DatasetError(
                f"{where}: input_ids is not [context_ids] SEP [draft_ids] SEP [target_ids] SEP of extra_info. Prepare "
                "the file again with train_spd_scorer.py --blocks BLOCKS --metadata METADATA."
            )
        extra = {name: value for name, value in extra.items() if name not in OFFSETS}
        row = {**row, "extra_info": extra, "sep_token_id": sep}
    return {name: value for name, value in row.items() if name not in REPEATED}


def batch_without_copies(batch: pa.RecordBatch) -> pa.RecordBatch:
    """`row_without_copies` of several rows in columns; any exception: they must be looked at one by one."""
    if "input_ids" not in batch.schema.names:
        return batch
    extra, ids = batch.column("extra_info"), Lists.of(batch.column("input_ids"))
    parts = [Lists.of(extra.field(name)) for name in IDS]
    separators = ids.values[ids.starts + np.minimum(parts[0].lengths, ids.lengths - 1)]
    expected = joined(parts, separators)
    if extra.null_count or not (np.array_equal(ids.lengths, expected.lengths)
                                and np.array_equal(ids.values, expected.values)):  # fmt: skip
        raise ValueError("the copies differ")
    fields = [field for field in extra.type if field.name not in OFFSETS]
    columns = {name: batch.column(name) for name in batch.schema.names if name not in REPEATED}
    columns["extra_info"] = pa.StructArray.from_arrays([extra.field(field.name) for field in fields], fields=fields)
    columns["sep_token_id"] = pa.array(separators)
    return pa.RecordBatch.from_pydict(columns)
