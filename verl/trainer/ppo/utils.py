"""Names the roles of workers and tells which roles and corrections a run has."""

from __future__ import annotations

from enum import Enum
from typing import Any

from verl.config.algorithm import RolloutCorrectionConfig
from verl.config.ppo import PPOConfig
from verl.config.roles import need_critic as need_critic  # code written for verl imports it from this module
from verl.utils.registry import nearest

WorkerType = type[Any]  # a Ray remote class made from a Worker


class Role(Enum):
    """What a worker group does; the value is the name used in logs and worker names."""

    Actor = "actor"
    Rollout = "rollout"
    ActorRollout = "actor_rollout"
    Critic = "critic"
    RefPolicy = "ref"
    RewardModel = "rm"
    ActorRolloutRef = "actor_rollout_ref"
    Env = "env"

    def __str__(self) -> str:
        return self.value

    @classmethod
    def from_string(cls, name: str) -> Role:
        """The role called `name` ("ref", "actor_rollout", ...)."""
        known = [role.value for role in cls]
        if name not in known:
            raise ValueError(f"role {name!r} is unknown{nearest(name, known) or '.'} Known: {', '.join(known)}.")
        return cls(name)


def need_reference_policy(role_worker_mapping: dict[Role, WorkerType]) -> bool:
    """True when a reference model is among the roles: in its own workers, or in the actor's."""
    return Role.RefPolicy in role_worker_mapping or Role.ActorRolloutRef in role_worker_mapping


def need_reward_model(role_worker_mapping: dict[Role, WorkerType]) -> bool:
    """True when a reward model is among the roles."""
    return Role.RewardModel in role_worker_mapping


def rollout_correction(config: PPOConfig) -> RolloutCorrectionConfig | None:
    """algorithm.rollout_correction where any part of it is switched on, else None."""
    section = config.algorithm.rollout_correction
    if section is None:
        return None
    parts = (section.rollout_is, section.rollout_rs, section.rollout_token_veto_threshold)
    return section if section.bypass_mode or any(part is not None for part in parts) else None
