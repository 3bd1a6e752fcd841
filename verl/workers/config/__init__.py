"""Compatibility with verl: import path of the settings of workers, which are in `verl.config`."""

from verl.config.common import *  # noqa: F403
from verl.config.megatron import McoreRefConfig  # noqa: F401
from verl.config.profiler import *  # noqa: F403
from verl.config.sandbox import *  # noqa: F403
from verl.workers.config.actor import *  # noqa: F403
from verl.workers.config.critic import *  # noqa: F403
from verl.workers.config.engine import *  # noqa: F403
from verl.workers.config.model import *  # noqa: F403
from verl.workers.config.optimizer import *  # noqa: F403
from verl.workers.config.reward_model import *  # noqa: F403
from verl.workers.config.rollout import *  # noqa: F403
