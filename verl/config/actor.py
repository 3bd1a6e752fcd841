"""Settings of the actor's update (mini-batches, clipping, losses) and of the reference policy."""

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, ClassVar

from verl.config.algorithm import KL_CHOICES
from verl.config.base import BaseConfig
from verl.config.common import COMPILED, SEQUENCE_RANKS, SUM_OVER_RANKS, CheckpointConfig
from verl.config.engine import FSDPEngineConfig
from verl.config.fields import setting
from verl.config.model import HFModelConfig
from verl.config.optimizer import FSDPOptimizerConfig, OptimizerConfig
from verl.config.profiler import ProfilerConfig
from verl.utils.problems import raise_if_any

LOSS_AGG_MODES = ("token-mean", "seq-mean-token-sum", "seq-mean-token-mean", "seq-mean-token-sum-norm", "token-sum")


@dataclass
class PolicyLossConfig(BaseConfig, section="actor.policy_loss"):
    """Policy loss by registered name, and the numbers that some of them read."""

    loss_mode: str = setting(
        "vanilla",
        "Policy loss: vanilla, gspo, sapo, gpg, clip_cov, kl_cov, geo_mean, cispo, dppo_tv, dppo_kl, dro.",
    )
    clip_cov_ratio: float = setting(0.0002, "Share of tokens that clip_cov leaves out.", low=0, high=1)
    clip_cov_lb: float = setting(1.0, "Lower bound of the covariance for clip_cov.")
    clip_cov_ub: float = setting(5.0, "Upper bound of the covariance for clip_cov.")
    kl_cov_ratio: float = setting(0.0002, "Share of tokens that kl_cov penalises.", low=0, high=1)
    ppo_kl_coef: float = setting(0.1, "Weight of kl_cov's penalty.", low=0)
    dro_beta: float | None = setting(None, "Weight of dro's penalty, which that loss needs.", above=0)
    rollout_correction: Any = setting(None, "algorithm.rollout_correction, set by the trainer in bypass mode.")

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.loss_mode == "dro" and self.dro_beta is None:
            key = "actor_rollout_ref.actor.policy_loss"
            raise ValueError(f"{key}.loss_mode=dro needs {key}.dro_beta, the weight of its penalty, such as 0.05.")


@dataclass
class AuxiliaryLossConfig(BaseConfig, section="actor.auxiliary_losses"):
    """Settings of an auxiliary loss, under its name in actor.auxiliary_losses; a subclass may add more."""

    coef: float = setting(1.0, "Weight of the loss; 0: none.", low=0)


@dataclass
class ActorConfig(BaseConfig, section="actor"):
    """The PPO update of the policy; batch sizes count prompts over all ranks, *_per_gpu samples on one rank."""

    #: counts of the mini-batch, in the copy of this config that a loss written for verl gets (verl_losses.from_verl)
    global_batch_info: ClassVar[Mapping[str, Any]] = MappingProxyType({})
    ppo_mini_batch_size: int = setting(256, "Prompts (each with rollout.n samples) per optimizer step.", low=1)
    ppo_micro_batch_size: int | None = setting(None, SUM_OVER_RANKS, low=1)
    ppo_micro_batch_size_per_gpu: int | None = setting(None, "Samples per forward and backward on one rank.", low=1)
    use_dynamic_bsz: bool = setting(False, "Cut micro-batches by tokens (ppo_max_token_len_per_gpu), not by samples.")
    ppo_max_token_len_per_gpu: int = setting(16384, "Tokens per forward on one rank with use_dynamic_bsz.", low=1)
    clip_ratio: float = setting(0.2, "Clip range of the probability ratio.", low=0)
    clip_ratio_low: float | None = setting(None, "Clip range below 1; null takes clip_ratio.", low=0)
    clip_ratio_high: float | None = setting(None, "Clip range above 1; null takes clip_ratio.", low=0)
    policy_loss: PolicyLossConfig = setting(PolicyLossConfig, "The policy loss.")
    clip_ratio_c: float = setting(3.0, "Bound on the ratio for negative advantages (dual clip).", above=1)
    loss_agg_mode: str = setting("token-mean", "How token losses are aggregated.", choices=LOSS_AGG_MODES)
    loss_scale_factor: int | None = setting(None, "Divisor of seq-mean-token-sum-norm; null: response length.", low=1)
    entropy_coeff: float = setting(0, "Weight of the entropy bonus.")
    tau_pos: float = setting(1.0, "Temperature of SAPO for positive advantages.", above=0)
    tau_neg: float = setting(1.05, "Temperature of SAPO for negative advantages.", above=0)
    calculate_entropy: bool = setting(False, "Measure the entropy although its weight is 0.")
    calculate_sum_pi_squared: bool = setting(
        False, "Sum the squared probabilities of each token's distribution, by a second forward with the old log-probs."
    )
    use_kl_loss: bool = setting(False, "Add the KL to the reference policy to the loss.")
    use_torch_compile: bool = setting(False, COMPILED)
    kl_loss_coef: float = setting(0.001, "Weight of the KL of use_kl_loss.", low=0)
    kl_loss_type: str = setting(
        "low_var_kl", "Estimator of the KL of use_kl_loss; a + takes the gradient of k2.", choices=KL_CHOICES
    )
    ppo_epochs: int = setting(1, "Passes over each batch.", low=1)
    shuffle: bool = setting(False, "Shuffle samples before mini-batches are cut.")
    data_loader_seed: int = setting(42, "Seed of the order with shuffle=true.", low=0)
    checkpoint: CheckpointConfig = setting(CheckpointConfig, "Contents of checkpoints.")
    optim: OptimizerConfig = setting(lambda: OptimizerConfig(lr=1e-6), "Optimizer of the actor.")
    profiler: ProfilerConfig = setting(ProfilerConfig, "Profiling of this role.")
    model_config: HFModelConfig | None = None
    auxiliary_losses: dict[str, Any] = setting(
        dict, "Settings of auxiliary losses by registered name; coef, the weight of a loss, turns it off at 0."
    )
    share_prompt_forward: bool = setting(
        False,
        "Compute tokens that several rows of a prompt begin with once, in one micro-batch: equal prompts, and any "
        "longer or other prefix where that saves at least 64 tokens a row.",
    )

    def validate(self, n_gpus: int, train_batch_size: int, model_config: dict | None = None) -> None:
        """Raise ValueError where these settings cannot share a batch of `train_batch_size` prompts out to `n_gpus`."""
        from verl.config.batch_sizes import actor_problems

        n = self.get("rollout_n", 1)  # a key of old scripts (old_keys.yaml)
        raise_if_any(actor_problems(self, n_gpus=n_gpus, train_batch_size=train_batch_size, rollout_n=n))


@dataclass
class FSDPActorConfig(ActorConfig):
    """ActorConfig on FSDP2."""

    grad_clip: float = setting(1.0, "Maximum gradient norm.", above=0)
    ulysses_sequence_parallel_size: int = setting(1, SEQUENCE_RANKS, low=1)
    fsdp_config: FSDPEngineConfig = setting(FSDPEngineConfig, "The actor's engine.")
    optim: FSDPOptimizerConfig = setting(lambda: FSDPOptimizerConfig(lr=1e-6))
    use_remove_padding: bool = setting(False, "Remove padding before the forward.")
    use_rollout_log_probs: bool = setting(
        False, "Use the rollout's log-probs as old log-probs, without a forward of their own."
    )

    def validate(self, n_gpus: int, train_batch_size: int, model_config: dict | None = None) -> None:
        """As ActorConfig.validate, and where ranks share sequences (Ulysses) that have padding by `model_config`."""
        super().validate(n_gpus, train_batch_size, model_config)
        removes_padding = HFModelConfig.use_remove_padding  # unless model_config has it
        padded = model_config is not None and not model_config.get("use_remove_padding", removes_padding)
        if self.ulysses_sequence_parallel_size > 1 and padded:
            raise ValueError(
                "actor_rollout_ref.actor.ulysses_sequence_parallel_size="
                f"{self.ulysses_sequence_parallel_size} needs batches without padding. Set "
                "actor_rollout_ref.model.use_remove_padding=true."
            )


@dataclass
class FSDPRefConfig(BaseConfig, section="ref"):
    """The reference policy: a forward only."""

    model_path: str | None = setting(
        None, "Folder or hub name of another model of the same vocabulary, such as a teacher; null: the actor's start."
    )
    use_torch_compile: bool = setting(False, COMPILED)
    log_prob_micro_batch_size: int | None = setting(None, SUM_OVER_RANKS, low=1)
    log_prob_micro_batch_size_per_gpu: int | None = setting(None, "Samples per forward on one rank.", low=1)
    log_prob_use_dynamic_bsz: bool = setting(False, "Cut micro-batches by tokens.")
    log_prob_max_token_len_per_gpu: int = setting(16384, "Tokens per forward on one rank.", low=1)
    ulysses_sequence_parallel_size: int = setting(1, SEQUENCE_RANKS, low=1)
    fsdp_config: FSDPEngineConfig = setting(lambda: FSDPEngineConfig(forward_only=True), "The reference's engine.")
    profiler: ProfilerConfig = setting(ProfilerConfig, "Profiling of this role.")
