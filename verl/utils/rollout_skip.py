"""Compatibility with verl: import path of `verl.trainer.ppo.rollout_skip`."""

import sys

from verl.trainer.ppo import rollout_skip

sys.modules[__name__] = rollout_skip
