"""Data sets and chat templates: from files to samples."""

import warnings

from verl.data.rl_dataset import RLHFDataset, collate_fn, get_dataset_class
from verl.data.sft_dataset import SFTDataset

__all__ = ["RLHFDataset", "SFTDataset", "collate_fn", "get_dataset_class"]

# The loader warns at each start of its processes that there are more than cores; data.dataloader_num_workers sets them.
warnings.filterwarnings("ignore", category=UserWarning, module=r"torchdata\.stateful_dataloader")
