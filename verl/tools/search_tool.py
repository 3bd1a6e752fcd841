"""Compatibility with verl: import path of `verl.workers.rollout.tools.search_tool`."""

import sys

from verl.workers.rollout.tools import search_tool

sys.modules[__name__] = search_tool
