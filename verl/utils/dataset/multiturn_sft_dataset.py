"""Compatibility with verl: import path of `verl.data.multiturn_sft_dataset`."""

import sys

from verl.data import multiturn_sft_dataset

sys.modules[__name__] = multiturn_sft_dataset
