"""Import path of verl; the settings live in `verl.config.engine`."""

from verl.config.engine import *  # noqa: F403
