"""Data sets: files to samples."""

from verl.utils.dataset.rl_dataset import RLHFDataset, collate_fn, get_dataset_class
from verl.utils.dataset.sft_dataset import SFTDataset

__all__ = ["RLHFDataset", "SFTDataset", "collate_fn", "get_dataset_class"]
