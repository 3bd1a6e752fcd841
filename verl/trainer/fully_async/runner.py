"""Builds the trainer of an asynchronous run."""

import os
from collections.abc import Callable
from typing import Any

import ray

from verl.config.asynchronous import AsyncPPOConfig
from verl.config.compose import to_settings
from verl.config.ppo import PPOConfig
from verl.trainer.main_ppo import POOL, TaskRunner
from verl.trainer.ppo.utils import Role


class FullyAsyncTaskRunner(TaskRunner):
    """TaskRunner with FullyAsyncTrainer, whose ranks train only."""

    def add_actor_rollout_worker(self, config: PPOConfig) -> tuple[Any, Any]:
        from verl.roles.separate_actor import SeparateActorWorker
        from verl.single_controller.ray import RayWorkerGroup

        self.role_worker_mapping[Role.ActorRollout] = ray.remote(SeparateActorWorker)
        self.mapping[Role.ActorRollout] = POOL
        return SeparateActorWorker, RayWorkerGroup

    def make_trainer(self, config: Any, stop_flag: Callable[[], bool] | None = None) -> Any:
        from verl.trainer.fully_async.trainer import FullyAsyncTrainer

        settings = to_settings(config, AsyncPPOConfig)
        if settings.trainer.device == "cpu":  # ranks of both kinds compute at the same time
            ranks = settings.trainer.n_gpus_per_node + settings.rollout.n_gpus_per_node
            os.environ.setdefault("OMP_NUM_THREADS", str(max(1, (os.cpu_count() or 1) // ranks)))
        return self.build(FullyAsyncTrainer, settings, stop_flag)
