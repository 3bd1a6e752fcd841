"""Settings of the RL algorithm: advantages, KL control, group filter, rollout correction."""

from dataclasses import dataclass, replace
from typing import Any

from verl.config.base import BaseConfig
from verl.config.fields import setting

KL_TYPES = ("kl", "k1", "abs", "mse", "k2", "low_var_kl", "k3", "full")
KL_CHOICES = KL_TYPES + tuple(f"{t}+" for t in KL_TYPES)  # "+": straight-through gradient of k2


@dataclass
class KLControlConfig(BaseConfig, section="algorithm.kl_ctrl"):
    """Coefficient of the KL penalty in the reward: fixed, or adapted towards `target_kl` over `horizon` samples."""

    type: str = setting("fixed", "fixed, or adaptive: moves kl_coef towards target_kl.", choices=("fixed", "adaptive"))
    kl_coef: float = setting(0.001, "Coefficient, or its first value.", low=0)
    horizon: int = setting(10000, "Number of samples over which the adaptive coefficient reacts.", low=1)
    target_kl: float = setting(0.1, "KL that the adaptive coefficient aims at.", above=0)


@dataclass
class FilterGroupsConfig(BaseConfig, section="algorithm.filter_groups"):
    """DAPO: groups whose samples all have the same metric are replaced; max_num_gen_batches <= 0 sets no limit."""

    enable: bool = setting(False, "Filter groups.")
    metric: str | None = setting(None, "What must differ within a group: acc, score, seq_reward, ...")
    max_num_gen_batches: int = setting(0, "Maximum generations per training batch; 0 for no limit.")
    keep_surplus: bool = setting(False, "Start the next batch with usable prompts that this one had no room for.")

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.enable and not self.metric:
            raise ValueError(
                "algorithm.filter_groups.enable=true needs algorithm.filter_groups.metric: name the reward's key that "
                "must differ within a group, such as acc, score or seq_reward."
            )


REJECTIONS = (
    "token_k1", "token_k2", "token_k3", "seq_sum_k1", "seq_sum_k2", "seq_sum_k3", "seq_mean_k1", "seq_mean_k2",
    "seq_mean_k3", "seq_max_k2", "seq_max_k3",
)  # fmt: skip
OLD_REJECTIONS = {"token": "token_k1", "sequence": "seq_sum_k1", "geometric": "seq_mean_k1"}


def _bounds(value: float | str, key: str) -> tuple[float | None, float]:
    """(lower or None, upper) of a number, or of a text "lower_upper". Raises ValueError for anything else."""
    try:
        numbers = [float(part) for part in str(value).strip().split("_")]
    except ValueError:
        numbers = []
    if len(numbers) not in (1, 2) or not 0 < numbers[0] <= numbers[-1]:
        both = "two (lower_upper) with a decimal point in each, such as 0.5_5.0"  # 0.5_5 is 0.55 in YAML
        raise ValueError(f"{key}={value} must be a number above 0, or {both}.")
    return (None, numbers[0]) if len(numbers) == 1 else (numbers[0], numbers[1])


def is_bounds(threshold: float | str) -> tuple[float | None, float]:
    """(lower or None, upper) of rollout_is_threshold."""
    return _bounds(threshold, "algorithm.rollout_correction.rollout_is_threshold")


def rejections(
    options: str, threshold: float | str | None, lower: float | None = None
) -> list[tuple[str, float, float]]:
    """(option, lower, upper) of each option in rollout_rs; `lower` replaces the reciprocal of an upper bound."""
    key = "algorithm.rollout_correction.rollout_rs"
    names = [OLD_REJECTIONS.get(name.strip(), name.strip()) for name in options.split(",")]
    if unknown := [name for name in names if name not in REJECTIONS]:
        known = ", ".join((*OLD_REJECTIONS, *REJECTIONS))
        raise ValueError(f"{key}={options}: {unknown[0]!r} is unknown. Known: {known}; several separated by commas.")
    if threshold is None:
        raise ValueError(f"{key}_threshold is not set; rollout_rs={options} needs it.")
    values = str(threshold).split(",")
    if len(values) not in (1, len(names)):
        raise ValueError(f"{key}_threshold={threshold} has {len(values)} bounds for {len(names)} options of {key}.")
    bounds = []
    for name, value in zip(names, values if len(values) > 1 else values * len(names), strict=True):
        low, high = _bounds(value, f"{key}_threshold")
        if not name.endswith("k1"):
            if low is not None:
                raise ValueError(f"{key}_threshold={value}: {name} has an upper bound only. Give one number.")
            low = 0.0
        elif low is None:
            low = 1 / high if lower is None else lower
        bounds.append((name, low, high))
    return bounds


@dataclass
class RolloutCorrectionConfig(BaseConfig, section="algorithm.rollout_correction"):
    """Importance weights and rejection between the rollout's policy and the trained one."""

    rollout_is: str | None = setting(
        "sequence", "Importance weights per token or sequence; null for none.", choices=("token", "sequence")
    )
    rollout_is_threshold: float | str = setting(
        2.0, "Upper bound of the weights; larger ones are truncated. Text such as 0.5_5.0: weights outside are 0."
    )
    rollout_rs: str | None = setting(
        None,
        "Rejection outside of the bounds: token, sequence, geometric, or {token,seq_sum,seq_mean,seq_max}_{k1,k2,k3}, "
        "several separated by commas; null for none.",
    )
    rollout_rs_threshold: float | str | None = setting(
        None,
        "Upper bound of the ratio (k1) or divergence, or text such as 0.5_5.0; one per option, separated by commas. "
        "null: rollout_is_threshold.",
    )
    rollout_rs_threshold_lower: float | None = setting(None, "Lower bound; null: reciprocal of the upper one.", above=0)
    rollout_token_veto_threshold: float | None = setting(
        None, "Reject sequences with a token ratio below; null: never.", above=0
    )
    bypass_mode: bool = setting(False, "Use the rollout's log-probs as old log-probs, without a forward of their own.")
    loss_type: str = setting("ppo_clip", "Loss in bypass mode.", choices=("ppo_clip", "reinforce"))
    rollout_is_batch_normalize: bool = setting(False, "Divide the weights by their mean over the batch.")

    def __post_init__(self) -> None:
        super().__post_init__()
        is_bounds(self.rollout_is_threshold)
        upper = self.rollout_is_threshold if self.rollout_rs_threshold is None else self.rollout_rs_threshold
        if self.rollout_rs is not None:
            rejections(self.rollout_rs, upper, self.rollout_rs_threshold_lower)

    @classmethod
    def decoupled_token_is(cls, threshold=2.0):
        """Truncated importance weight of each token, own old-log-prob pass."""
        return cls(rollout_is="token", rollout_is_threshold=threshold)

    @classmethod
    def decoupled_seq_is(cls, threshold=2.0):
        """Truncated importance weight of the full sequence, own old-log-prob pass."""
        return cls(rollout_is="sequence", rollout_is_threshold=threshold)

    @classmethod
    def decoupled_seq_is_rs(cls, is_threshold=2.0, rs_threshold=2.0, rs_threshold_lower=None):
        """Sequence weights, and sequences outside the bounds leave the loss."""
        rejection = {"rollout_rs_threshold": rs_threshold, "rollout_rs_threshold_lower": rs_threshold_lower}
        return cls(rollout_is="sequence", rollout_is_threshold=is_threshold, rollout_rs="sequence", **rejection)

    @classmethod
    def decoupled_geo_rs(cls, rs_threshold=1.001, rs_threshold_lower=None, veto_threshold=1e-4):
        """No weights; sequences with a geometric mean ratio outside the bounds, or a vetoed token, leave the loss."""
        bounds = {"rollout_rs_threshold": rs_threshold, "rollout_rs_threshold_lower": rs_threshold_lower}
        return cls(rollout_is=None, rollout_rs="geometric", rollout_token_veto_threshold=veto_threshold, **bounds)

    @classmethod
    def bypass_ppo_clip(cls):
        """The rollout's log-probs stand in for the old ones; PPO's clip does the rest."""
        return cls(rollout_is=None, bypass_mode=True, loss_type="ppo_clip")

    @classmethod
    def bypass_ppo_clip_geo_rs(cls, rs_threshold=1.001, rs_threshold_lower=None, veto_threshold=1e-4):
        """bypass_ppo_clip with geometric rejection."""
        rejection = cls.decoupled_geo_rs(rs_threshold, rs_threshold_lower, veto_threshold)
        return replace(rejection, bypass_mode=True, loss_type="ppo_clip")

    @classmethod
    def bypass_pg_is(cls, threshold=2.0):
        """Plain policy gradient under sequence weights, without an old-log-prob pass."""
        return replace(cls.decoupled_seq_is(threshold), bypass_mode=True, loss_type="reinforce")

    @classmethod
    def bypass_pg_rs(cls, rs_threshold=1.001, rs_threshold_lower=None, veto_threshold=1e-4):
        """Plain policy gradient with geometric rejection, without weights."""
        rejection = cls.decoupled_geo_rs(rs_threshold, rs_threshold_lower, veto_threshold)
        return replace(rejection, bypass_mode=True, loss_type="reinforce")

    @classmethod
    def geo_rs_seq_tis(cls, is_threshold=2.0, rs_threshold=1.001, rs_threshold_lower=None, veto_threshold=1e-4):
        """Truncated sequence weights with geometric rejection, own old-log-prob pass."""
        rejection = cls.decoupled_geo_rs(rs_threshold, rs_threshold_lower, veto_threshold)
        return replace(rejection, rollout_is="sequence", rollout_is_threshold=is_threshold)

    @classmethod
    def bypass_pg_geo_rs_seq_tis(
        cls, is_threshold=2.0, rs_threshold=1.001, rs_threshold_lower=None, veto_threshold=1e-4
    ):
        """geo_rs_seq_tis as a plain policy gradient without an old-log-prob pass."""
        decoupled = cls.geo_rs_seq_tis(is_threshold, rs_threshold, rs_threshold_lower, veto_threshold)
        return replace(decoupled, bypass_mode=True, loss_type="reinforce")

    @classmethod
    def decoupled_token_icepop(cls, threshold=5.0, threshold_lower=0.5):
        """The ratio of each token as its weight, 0 outside the bounds, own old-log-prob pass."""
        return cls(rollout_is="token", rollout_is_threshold=f"{threshold_lower}_{threshold}")

    @classmethod
    def bypass_pg_token_icepop(cls, threshold=5.0, threshold_lower=0.5):
        """decoupled_token_icepop as a plain policy gradient without an old-log-prob pass."""
        return replace(cls.decoupled_token_icepop(threshold, threshold_lower), bypass_mode=True, loss_type="reinforce")

    @classmethod
    def decoupled_geo_rs_seq_tis(cls, is_threshold=2.0, rs_threshold="0.999_1.001"):
        """Truncated sequence weights; sequences with a geometric mean ratio outside the bounds leave the loss."""
        return replace(cls.decoupled_seq_is(is_threshold), rollout_rs="seq_mean_k1", rollout_rs_threshold=rs_threshold)

    @classmethod
    def decoupled_geo_rs_token_tis(cls, is_threshold=2.0, rs_threshold="0.999_1.001"):
        """decoupled_geo_rs_seq_tis with token weights."""
        return replace(cls.decoupled_geo_rs_seq_tis(is_threshold, rs_threshold), rollout_is="token")

    @classmethod
    def bypass_pg_geo_rs(cls, rs_threshold="0.999_1.001"):
        """Plain policy gradient with geometric rejection, without weights."""
        bypass = cls(rollout_is=None, bypass_mode=True, loss_type="reinforce")
        return replace(bypass, rollout_rs="seq_mean_k1", rollout_rs_threshold=rs_threshold)

    @classmethod
    def bypass_pg_geo_rs_token_tis(cls, is_threshold=2.0, rs_threshold="0.999_1.001"):
        """decoupled_geo_rs_token_tis as a plain policy gradient without an old-log-prob pass."""
        decoupled = cls.decoupled_geo_rs_token_tis(is_threshold, rs_threshold)
        return replace(decoupled, bypass_mode=True, loss_type="reinforce")

    @classmethod
    def decoupled_k3_rs(cls, rs_threshold=0.01):
        """No weights; sequences whose mean k3 estimate of the divergence is larger leave the loss."""
        return cls(rollout_is=None, rollout_rs="seq_mean_k3", rollout_rs_threshold=rs_threshold)

    @classmethod
    def decoupled_k3_rs_seq_tis(cls, is_threshold=2.0, rs_threshold=0.01):
        """decoupled_k3_rs with truncated sequence weights."""
        return replace(cls.decoupled_seq_is(is_threshold), rollout_rs="seq_mean_k3", rollout_rs_threshold=rs_threshold)

    @classmethod
    def decoupled_k3_rs_token_tis(cls, is_threshold=2.0, rs_threshold=0.01):
        """decoupled_k3_rs with truncated token weights."""
        return replace(cls.decoupled_k3_rs_seq_tis(is_threshold, rs_threshold), rollout_is="token")

    @classmethod
    def bypass_ppo_clip_k3_rs(cls, rs_threshold=0.01):
        """bypass_ppo_clip with the rejection of decoupled_k3_rs."""
        return replace(cls.decoupled_k3_rs(rs_threshold), bypass_mode=True, loss_type="ppo_clip")

    @classmethod
    def disabled(cls):
        """Neither weights nor rejection."""
        return cls(rollout_is=None, rollout_rs=None)


def check_reweight_method(method: str) -> None:
    """Raise ValueError for a way of weighting samples that PF-PPO does not have."""
    if method not in ("max_min", "max_random", "pow"):
        raise ValueError(f"algorithm.pf_ppo.reweight_method={method!r} is unknown. Known: max_min, max_random, pow.")


@dataclass
class AlgoConfig(BaseConfig, section="algorithm"):
    """How scores become advantages."""

    gamma: float = setting(1.0, "Discount of later rewards.", low=0, high=1)
    lam: float = setting(1.0, "Lambda of generalized advantage estimation.", low=0, high=1)
    adv_estimator: str = setting("gae", "Registered advantage estimator, such as gae, grpo, rloo, remax or opd.")
    norm_adv_by_std_in_grpo: bool = setting(True, "Divide GRPO's advantages by the standard deviation of the group.")
    use_kl_in_reward: bool = setting(False, "Subtract the KL to the reference policy from each token's reward.")
    kl_penalty: str = setting(
        "kl", "Estimator of the KL of use_kl_in_reward: k1, abs, k2, low_var_kl (k3).", choices=KL_CHOICES
    )
    kl_ctrl: KLControlConfig = setting(KLControlConfig, "Coefficient of that KL.")
    use_pf_ppo: bool = setting(False, "Resample with weights from the scores (PF-PPO, policy filtration for PPO).")
    pf_ppo: dict[str, Any] = setting(
        dict,
        "Resampling: reweight_method (pow, max_min, max_random) and weight_pow, its exponent.",
    )
    filter_groups: FilterGroupsConfig | None = setting(None, "DAPO: replace groups of samples with equal metrics.")
    gdpo_reward_keys: list[str] | None = setting(
        None, "Values of the reward function that gdpo normalises one by one; it needs at least one."
    )
    gdpo_reward_weights: list[float] | None = setting(None, "Weights of those; null: 1 each.")
    rollout_correction: RolloutCorrectionConfig | None = setting(
        RolloutCorrectionConfig.disabled, "Correction for a rollout policy that differs from the trained one."
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        keys, weights = self.gdpo_reward_keys or [], self.gdpo_reward_weights
        if self.adv_estimator == "gdpo" and not keys:
            raise ValueError(
                "algorithm.adv_estimator=gdpo needs algorithm.gdpo_reward_keys: names of values that the reward "
                "function returns."
            )
        if weights is not None and len(weights) != len(keys):
            count = f"{len(weights)} weights for {len(keys)} of algorithm.gdpo_reward_keys"
            raise ValueError(f"algorithm.gdpo_reward_weights has {count}; give one for each.")
        check_reweight_method(self.pf_ppo.get("reweight_method", "pow"))
