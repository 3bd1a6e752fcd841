"""Compatibility with verl: the runtime environment of Ray's workers, for code that starts Ray itself."""

import os
from typing import Any

from verl.trainer.run.ray_session import WORKER_ENV

PPO_RAY_RUNTIME_ENV: dict[str, Any] = {"env_vars": dict(WORKER_ENV)}


def get_ppo_ray_runtime_env() -> dict[str, Any]:
    """The `runtime_env` of `ray.init`: variables that the driver sets itself are left to it."""
    return {"env_vars": {name: value for name, value in WORKER_ENV.items() if name not in os.environ}}
