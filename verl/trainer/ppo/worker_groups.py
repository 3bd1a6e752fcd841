"""Starts the ranks of every role: those placed on one pool share its processes."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import ray
from loguru import logger
from omegaconf import DictConfig, OmegaConf
from ray.exceptions import RayError

from verl.algos.rollout_correction import use_bypass_loss
from verl.single_controller.ray import RayClassWithInitArgs, RayWorkerGroup
from verl.single_controller.ray.base import create_colocated_worker_cls
from verl.trainer.ppo.resources import ResourcePoolManager
from verl.trainer.ppo.utils import Role, WorkerType, need_reference_policy, rollout_correction

CLOSE_TIMEOUT_S = 20


def actor_role(mapping: Mapping[Role, WorkerType]) -> Role:
    """What the actor's ranks are: with a reference policy in the same process, or without."""
    return Role.ActorRolloutRef if need_reference_policy(mapping) else Role.ActorRollout


def classes(
    config: DictConfig, mapping: Mapping[Role, WorkerType], device_name: str, steps: int
) -> dict[Role, RayClassWithInitArgs]:
    """The class of each role with its share of the config; `steps` end the learning-rate schedules."""
    # Resolved here: a part sent to a rank has no root that its interpolations could point to.
    whole = OmegaConf.create(OmegaConf.to_container(config, resolve=True))
    whole.actor_rollout_ref.actor.optim.total_training_steps = steps
    whole.critic.optim.total_training_steps = steps
    correction = rollout_correction(whole)
    if correction is not None and correction.bypass_mode:
        use_bypass_loss(whole.actor_rollout_ref.actor.policy_loss, correction)
    common = {"device_name": device_name, "nccl_timeout": whole.actor_rollout_ref.nccl_timeout}
    role = actor_role(mapping)
    found = {role: RayClassWithInitArgs(
        mapping[Role.ActorRollout], config=whole.actor_rollout_ref, role=str(role), device_name=device_name
    )}  # fmt: skip
    for other, section in ((Role.Critic, whole.critic), (Role.RewardModel, whole.reward_model)):
        if other in mapping:
            found[other] = RayClassWithInitArgs(mapping[other], config=section, **common)
    return found


class WorkerGroups:
    """One group of processes a pool, and one group of methods a role on top of it."""

    def __init__(
        self, manager: ResourcePoolManager, parts: Mapping[Role, RayClassWithInitArgs],
        group_cls: type[RayWorkerGroup], **options: Any,
    ) -> None:
        self.manager = manager
        self.processes: list[RayWorkerGroup] = []
        self.roles: dict[Role, RayWorkerGroup] = {}
        for pool in manager.resource_pool_dict:
            here = {role: part for role, part in parts.items() if manager.mapping[_placed_as(role)] == pool}
            if here:
                self._start(manager.resource_pool_dict[pool], here, group_cls, options)

    def _start(self, pool: Any, here: dict[Role, RayClassWithInitArgs], group_cls: type, options: dict) -> None:
        options = {"name_prefix": "_".join(map(str, here)), **options}
        if len(here) == 1:
            ((role, part),) = here.items()
            group = group_cls(resource_pool=pool, ray_cls_with_init=part, **options)
            self.roles[role] = group
        else:
            joined = create_colocated_worker_cls({str(role): part for role, part in here.items()})
            group = group_cls(resource_pool=pool, ray_cls_with_init=joined, **options)
            spawned = group.spawn(prefix_set={str(role) for role in here})
            self.roles.update({role: spawned[str(role)] for role in here})
        self.processes.append(group)

    def end(self) -> None:
        """Let the rollouts end what they started, end the ranks, then give the pools back to Ray."""
        for role, group in self.roles.items():
            if role in (Role.ActorRollout, Role.ActorRolloutRef):
                _close_rollouts(group)
        for group in self.processes:
            group.shutdown()
        for pool in self.manager.resource_pool_dict.values():
            pool.release()
        self.manager.resource_pool_dict.clear()


def _placed_as(role: Role) -> Role:
    """The key of the placement: a reference policy beside the actor changes nothing about it."""
    return Role.ActorRollout if role == Role.ActorRolloutRef else role


def _close_rollouts(group: RayWorkerGroup) -> None:
    prefix = f"{group.sub_cls_name}_" if group.sub_cls_name else ""
    closing = group.execute_all_async(f"{prefix}close_rollout")
    done, hanging = ray.wait(closing, num_returns=len(closing), timeout=CLOSE_TIMEOUT_S)
    for ref in done:
        try:
            ray.get(ref)
        except RayError as e:
            logger.warning(f"a rollout could not be closed: {str(e).strip().splitlines()[-1]}")
    if hanging:
        logger.warning(f"{len(hanging)} of {len(closing)} ranks did not close within {CLOSE_TIMEOUT_S} s: killed")
