"""Compatibility with verl: import path of `verl.data.rl_dataset`."""

import sys

from verl.data import rl_dataset

sys.modules[__name__] = rl_dataset
