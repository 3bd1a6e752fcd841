"""Compatibility with verl: import path of `verl.workers.rollout.tools.sandbox_fusion_tools`."""

import sys

from verl.workers.rollout.tools import sandbox_fusion_tools

sys.modules[__name__] = sandbox_fusion_tools
