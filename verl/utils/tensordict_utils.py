"""Compatibility with verl: import path of `verl.protocol.tensordict_utils`."""

import sys

from verl.protocol import tensordict_utils

sys.modules[__name__] = tensordict_utils
