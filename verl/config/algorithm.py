"""Settings of the RL algorithm: advantages, KL control, group filter, rollout correction."""

from dataclasses import dataclass, field
from typing import Any

from verl.base_config import BaseConfig
from verl.config.fields import setting

KL_TYPES = ("kl", "k1", "abs", "mse", "k2", "low_var_kl", "k3", "full")
KL_CHOICES = KL_TYPES + tuple(f"{t}+" for t in KL_TYPES)  # "+": straight-through gradient of k2


@dataclass
class KLControlConfig(BaseConfig, section="algorithm.kl_ctrl"):
    """Coefficient of the KL penalty in the reward: fixed, or adapted towards `target_kl` over `horizon` samples."""

    type: str = setting("fixed", choices=("fixed", "adaptive"))
    kl_coef: float = setting(0.001, low=0)
    horizon: int = setting(10000, low=1)
    target_kl: float = setting(0.1, above=0)


@dataclass
class FilterGroupsConfig(BaseConfig, section="algorithm.filter_groups"):
    """DAPO: groups whose samples all have the same metric are drawn anew; max_num_gen_batches <= 0 sets no limit."""

    enable: bool = False
    metric: str | None = None
    max_num_gen_batches: int = 0
    keep_surplus: bool = True

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.enable and not self.metric:
            raise ValueError(
                "algorithm.filter_groups.enable=true needs algorithm.filter_groups.metric: name the reward's key that "
                "must differ within a group, such as acc, score or seq_reward."
            )


@dataclass
class RolloutCorrectionConfig(BaseConfig, section="algorithm.rollout_correction"):
    """Importance weights and rejection between the rollout's policy and the trained one."""

    rollout_is: str | None = setting("sequence", choices=("token", "sequence"))
    rollout_is_threshold: float = setting(2.0, above=0)
    rollout_rs: str | None = setting(None, choices=("token", "sequence", "geometric"))
    rollout_rs_threshold: float | None = setting(None, above=0)
    rollout_rs_threshold_lower: float | None = setting(None, above=0)
    rollout_token_veto_threshold: float | None = setting(None, above=0)
    bypass_mode: bool = False
    loss_type: str = setting("ppo_clip", choices=("ppo_clip", "reinforce"))
    rollout_is_batch_normalize: bool = False

    @classmethod
    def decoupled_token_is(cls, threshold=2.0):
        """Truncated importance weight of each token, own old-log-prob pass."""
        return cls(rollout_is="token", rollout_is_threshold=threshold)

    @classmethod
    def decoupled_seq_is(cls, threshold=2.0):
        """Truncated importance weight of the whole sequence, own old-log-prob pass."""
        return cls(rollout_is="sequence", rollout_is_threshold=threshold)

    @classmethod
    def decoupled_seq_is_rs(cls, is_threshold=2.0, rs_threshold=2.0, rs_threshold_lower=None):
        """Sequence weights, and sequences outside the bounds leave the loss."""
        rejection = {"rollout_rs_threshold": rs_threshold, "rollout_rs_threshold_lower": rs_threshold_lower}
        return cls(rollout_is="sequence", rollout_is_threshold=is_threshold, rollout_rs="sequence", **rejection)

    @classmethod
    def decoupled_geo_rs(cls, rs_threshold=1.001, rs_threshold_lower=None, veto_threshold=1e-4):
        """No weights; sequences with a geometric mean ratio outside the bounds, or a vetoed token, leave the loss."""
        return cls(rollout_is=None, **_geometric(rs_threshold, rs_threshold_lower, veto_threshold))

    @classmethod
    def bypass_ppo_clip(cls):
        """The rollout's log-probs stand in for the old ones; PPO's clip does the rest."""
        return cls(rollout_is=None, bypass_mode=True, loss_type="ppo_clip")

    @classmethod
    def bypass_ppo_clip_geo_rs(cls, rs_threshold=1.001, rs_threshold_lower=None, veto_threshold=1e-4):
        """bypass_ppo_clip with geometric rejection."""
        rejection = _geometric(rs_threshold, rs_threshold_lower, veto_threshold)
        return cls(rollout_is=None, bypass_mode=True, loss_type="ppo_clip", **rejection)

    @classmethod
    def bypass_pg_is(cls, threshold=2.0):
        """Plain policy gradient under sequence weights, without an old-log-prob pass."""
        return cls(rollout_is="sequence", rollout_is_threshold=threshold, bypass_mode=True, loss_type="reinforce")

    @classmethod
    def bypass_pg_rs(cls, rs_threshold=1.001, rs_threshold_lower=None, veto_threshold=1e-4):
        """Plain policy gradient with geometric rejection, without weights."""
        rejection = _geometric(rs_threshold, rs_threshold_lower, veto_threshold)
        return cls(rollout_is=None, bypass_mode=True, loss_type="reinforce", **rejection)

    @classmethod
    def geo_rs_seq_tis(cls, is_threshold=2.0, rs_threshold=1.001, rs_threshold_lower=None, veto_threshold=1e-4):
        """Truncated sequence weights with geometric rejection, own old-log-prob pass."""
        rejection = _geometric(rs_threshold, rs_threshold_lower, veto_threshold)
        return cls(rollout_is="sequence", rollout_is_threshold=is_threshold, **rejection)

    @classmethod
    def bypass_pg_geo_rs_seq_tis(
        cls, is_threshold=2.0, rs_threshold=1.001, rs_threshold_lower=None, veto_threshold=1e-4
    ):
        """geo_rs_seq_tis as a plain policy gradient without an old-log-prob pass."""
        rejection = _geometric(rs_threshold, rs_threshold_lower, veto_threshold)
        weights = {"rollout_is": "sequence", "rollout_is_threshold": is_threshold}
        return cls(**weights, **rejection, bypass_mode=True, loss_type="reinforce")

    @classmethod
    def disabled(cls):
        """Neither weights nor rejection."""
        return cls(rollout_is=None, rollout_rs=None)


def _geometric(upper: float, lower: float | None, veto: float | None) -> dict[str, Any]:
    """Rejection of sequences by the geometric mean of their ratios, or by one token's ratio below `veto`."""
    return {
        "rollout_rs": "geometric", "rollout_rs_threshold": upper, "rollout_rs_threshold_lower": lower,
        "rollout_token_veto_threshold": veto,
    }  # fmt: skip


@dataclass
class AlgoConfig(BaseConfig, section="algorithm"):
    """How scores become advantages."""

    gamma: float = setting(1.0, low=0, high=1)
    lam: float = setting(1.0, low=0, high=1)
    adv_estimator: str = "gae"
    norm_adv_by_std_in_grpo: bool = True
    use_kl_in_reward: bool = False
    kl_penalty: str = setting("kl", choices=KL_CHOICES)
    kl_ctrl: KLControlConfig = field(default_factory=KLControlConfig)
    use_pf_ppo: bool = False
    pf_ppo: dict[str, Any] = field(default_factory=lambda: {"reweight_method": "pow", "weight_pow": 2.0})
    filter_groups: FilterGroupsConfig | None = None
    rollout_correction: RolloutCorrectionConfig | None = field(default_factory=RolloutCorrectionConfig.disabled)
