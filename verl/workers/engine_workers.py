"""Compatibility with verl: `ActorRolloutRefWorker` under the path of verl's model engine."""

from typing import Any

from verl.workers.roles.actor_rollout_ref import ActorRolloutRefWorker

__all__ = ["ActorRolloutRefWorker", "TrainingWorker"]


class TrainingWorker:
    """Not there: a worker that is built from a TrainingWorkerConfig and a loss."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        instead = "subclass ActorRolloutRefWorker of this module, or build a verl.workers.engine.FSDPEngine"
        raise NotImplementedError(f"TrainingWorker does not exist here: {instead}.")
