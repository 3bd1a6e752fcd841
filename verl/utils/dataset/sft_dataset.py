"""Compatibility with verl: import path of `verl.data.sft_dataset`."""

import sys

from verl.data import sft_dataset

sys.modules[__name__] = sft_dataset
