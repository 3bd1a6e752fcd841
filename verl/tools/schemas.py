"""Compatibility with verl: import path of `verl.workers.rollout.tools.schemas`."""

import sys

from verl.workers.rollout.tools import schemas

sys.modules[__name__] = schemas
