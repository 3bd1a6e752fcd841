"""Compatibility with verl: import path of `verl.data.dynamicgen_dataset`."""

import sys

from verl.data import dynamicgen_dataset

sys.modules[__name__] = dynamicgen_dataset
