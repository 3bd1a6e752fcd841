"""The settings of the spd rollout, from the recipe's config group `spd` (passed as rollout.custom)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

from recipe.spd.client import ClientSettings
from recipe.spd.reward import SPDRewardConfig, refuse_unknown, reward_config
from verl.utils.registry import nearest

LOSS_POSITIONS = ("judged", "all")


@dataclass(frozen=True)
class SPDRolloutSettings:
    """Group spd.rollout; recipe/spd/config/spd_trainer.yaml documents each key and has its default."""

    servers: list[str] | str | None
    served_model: str | None
    server_args: list[str]
    server_log: str
    start_timeout_s: float
    max_model_len: int | None
    store_path: str
    lost_share_max: float
    rounds: int
    draft_path: str | None
    max_tokens: int
    timeout_s: float
    attempts: int
    prompts_per_request: int
    concurrency: int

    def __post_init__(self) -> None:
        for name in ("rounds", "max_tokens", "attempts", "prompts_per_request", "concurrency"):
            if getattr(self, name) < 1:
                raise ValueError(f"spd.rollout.{name}={getattr(self, name)} is too small; use 1 or more.")
        if not 0 <= self.lost_share_max <= 1:
            raise ValueError(f"spd.rollout.lost_share_max={self.lost_share_max} is a share; use a value from 0 to 1.")
        if self.rounds > 1 and not self.draft_path:
            raise ValueError(
                f"spd.rollout.rounds={self.rounds} needs the draft model to decode further: name its directory in "
                "spd.rollout.draft_path, or use spd.rollout.rounds=1."
            )

    def client(self) -> ClientSettings:
        """The part that the HTTP client needs."""
        return ClientSettings(
            self.timeout_s, self.attempts, prompts_per_request=self.prompts_per_request, concurrency=self.concurrency
        )


@dataclass(frozen=True)
class SPDSettings:
    """The keys of group spd that the rollout needs."""

    target_path: str
    loss_positions: str
    seed: int
    reward: SPDRewardConfig
    rollout: SPDRolloutSettings

    def __post_init__(self) -> None:
        if self.loss_positions not in LOSS_POSITIONS:
            raise ValueError(
                f"spd.loss_positions={self.loss_positions!r} is unknown"
                f"{nearest(self.loss_positions, LOSS_POSITIONS) or '.'} Known: {', '.join(LOSS_POSITIONS)}."
            )

    @classmethod
    def from_custom(cls, custom: Mapping[str, Any] | None) -> SPDSettings:
        """Settings from actor_rollout_ref.rollout.custom; ValueError names a missing or unknown key."""
        custom = dict(custom or {})
        if missing := [f.name for f in fields(cls) if f.name not in custom]:
            raise ValueError(
                f"actor_rollout_ref.rollout.custom lacks {', '.join(missing)}: rollout.name=spd needs the group "
                "spd there (recipe/spd/config/spd_trainer.yaml sets rollout.custom=${spd})."
            )
        given = dict(custom["rollout"])
        known = [f.name for f in fields(SPDRolloutSettings)]
        refuse_unknown("spd.rollout", given, known)
        if missing := [name for name in known if name not in given]:
            raise ValueError(
                f"spd.rollout lacks {', '.join(missing)}; recipe/spd/config/spd_trainer.yaml has the defaults."
            )
        values = {f.name: custom[f.name] for f in fields(cls)}
        values["seed"] = int(values["seed"])
        return cls(**{**values, "reward": reward_config(custom["reward"]), "rollout": SPDRolloutSettings(**given)})
