"""Compatibility with verl: import path of `verl.data`."""
# ruff: noqa: F401

from verl.data import RLHFDataset, SFTDataset, collate_fn, get_dataset_class
