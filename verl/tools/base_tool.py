"""Compatibility with verl: import path of `verl.workers.rollout.tools.base_tool`."""

import sys

from verl.workers.rollout.tools import base_tool

sys.modules[__name__] = base_tool
