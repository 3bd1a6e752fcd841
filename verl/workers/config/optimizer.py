"""Import path of verl; the settings live in `verl.config.optimizer`."""

from verl.config.optimizer import *  # noqa: F403
