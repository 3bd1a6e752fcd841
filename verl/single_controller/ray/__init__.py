"""Worker groups over Ray."""

from verl.single_controller.ray.base import *  # noqa: F403 - what its __all__ names
