"""Compatibility with verl: import path of `verl.data`."""

from verl.data import RLHFDataset, SFTDataset, collate_fn, get_dataset_class

__all__ = ['RLHFDataset', 'SFTDataset', 'collate_fn', 'get_dataset_class']
