"""Compatibility with verl: import path of `verl.workers.rollout.agent_loop.prometheus_utils`."""

import sys

from verl.workers.rollout.agent_loop import prometheus_utils

sys.modules[__name__] = prometheus_utils
