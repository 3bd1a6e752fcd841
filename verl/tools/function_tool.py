"""Compatibility with verl: import path of `verl.workers.rollout.tools.function_tool`."""

import sys

from verl.workers.rollout.tools import function_tool

sys.modules[__name__] = function_tool
