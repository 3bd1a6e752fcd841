"""Compatibility with verl: import path of `verl.workers.rollout.tools.code_tool`."""

import sys

from verl.workers.rollout.tools import code_tool

sys.modules[__name__] = code_tool
