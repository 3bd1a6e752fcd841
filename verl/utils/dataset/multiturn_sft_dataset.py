"""Compatibility with verl: import path of `verl.data.multiturn_sft_dataset`, and its conversion of nested arrays."""

from typing import Any

import numpy as np

from verl.data.multiturn_sft_dataset import MultiTurnSFTDataset  # noqa: F401


def convert_nested_value_to_list_recursive(data_item: Any) -> Any:
    """Nested arrays, as parquet readers return them, to plain lists and dicts."""
    if isinstance(data_item, dict):
        return {key: convert_nested_value_to_list_recursive(value) for key, value in data_item.items()}
    if isinstance(data_item, list | tuple | np.ndarray):
        return [convert_nested_value_to_list_recursive(value) for value in data_item]
    return data_item.item() if isinstance(data_item, np.generic) else data_item
