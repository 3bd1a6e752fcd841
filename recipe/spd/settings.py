"""The settings of the spd rollout, from the recipe's config group `spd` (passed as rollout.custom)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any, ClassVar

from recipe.spd.client import ClientSettings
from recipe.spd.reward import SPDRewardConfig, refuse_unknown, reward_config
from verl.config.fields import check_settings, setting, value_errors

_YAML = "recipe/spd/config/spd_trainer.yaml"


@dataclass(frozen=True)
class SPDRolloutSettings:
    """Group spd.rollout; recipe/spd/config/spd_trainer.yaml documents each key and has its default."""

    section: ClassVar[str] = "spd.rollout"
    servers: list[str] | str | None
    served_model: str | None
    server_args: list[str]
    server_log: str
    start_timeout_s: float
    max_model_len: int | None
    store_path: str
    lost_share_max: float = setting(low=0, high=1)
    rounds: int = setting(low=1)
    draft_path: str | None = setting()
    max_tokens: int = setting(low=1)
    timeout_s: float = setting()
    attempts: int = setting(low=1)
    prompts_per_request: int = setting(low=1)
    concurrency: int = setting(low=1)

    def __post_init__(self) -> None:
        check_settings(self)
        if self.rounds > 1 and not self.draft_path:
            raise ValueError(
                f"spd.rollout.rounds={self.rounds} needs the draft model to decode further: name its directory in "
                "spd.rollout.draft_path, or use spd.rollout.rounds=1."
            )

    def client(self) -> ClientSettings:
        """The settings of the HTTP client."""
        return ClientSettings(
            self.timeout_s, self.attempts, prompts_per_request=self.prompts_per_request, concurrency=self.concurrency
        )


@dataclass(frozen=True)
class SPDSettings:
    """The keys of group spd that the rollout needs."""

    target_path: str
    loss_positions: str = setting(choices=("judged", "all"))
    seed: int = setting()
    reward: SPDRewardConfig = setting()
    rollout: SPDRolloutSettings = setting()

    @classmethod
    def from_custom(cls, custom: Mapping[str, Any] | None) -> SPDSettings:
        """Settings from actor_rollout_ref.rollout.custom; ValueError names a missing, unknown or wrong key."""
        custom = dict(custom or {})
        if missing := [f.name for f in fields(cls) if f.name not in custom]:
            raise ValueError(
                f"actor_rollout_ref.rollout.custom lacks {', '.join(missing)}: rollout.name=spd needs the group "
                f"spd there ({_YAML} sets rollout.custom=${{spd}})."
            )
        if errors := value_errors(cls, custom, "spd"):
            raise ValueError("\n".join(message for _, message in errors))
        given = dict(custom["rollout"])
        known = [f.name for f in fields(SPDRolloutSettings)]
        refuse_unknown("spd.rollout", given, known)
        if missing := [name for name in known if name not in given]:
            raise ValueError(f"spd.rollout lacks {', '.join(missing)}; {_YAML} has the defaults.")
        values = {f.name: custom[f.name] for f in fields(cls)}
        return cls(**{**values, "reward": reward_config(custom["reward"]), "rollout": SPDRolloutSettings(**given)})
