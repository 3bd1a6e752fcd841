"""A rank that trains the actor while other ranks generate."""

from typing import Any

import ray

from verl.roles.actor_rollout_ref import ActorRolloutRefWorker
from verl.rollout.weight_parts import pack_parts
from verl.single_controller.base.dispatch import Dispatch, register


class SeparateActorWorker(ActorRolloutRefWorker):
    """Actor and reference policy; the rollout has ranks of its own, which get the weights of `export_weights`."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._is_rollout = False

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def export_weights(self, part_bytes: int) -> list[ray.ObjectRef]:
        """References to the weights in the rollout's type, in parts of `part_bytes` (weight_parts); of rank 0 alone.

        Raises FloatingPointError at a NaN or infinite weight. Every rank must call it.
        """
        with self.engine.eval_mode():
            weights = self._weights_for_rollout()
            if self.rank == 0:
                return [ray.put(part) for part in pack_parts(weights, part_bytes)]
            for _ in weights:  # gathering is collective
                pass
        return []
