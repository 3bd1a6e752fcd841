"""Settings of asynchronous training: the ranks that generate, the weight syncs, the bound of staleness."""

import math
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass, is_dataclass, replace
from typing import Any

from omegaconf import DictConfig, OmegaConf

from verl.config.algorithm import RolloutCorrectionConfig
from verl.config.base import BaseConfig
from verl.config.fields import setting
from verl.config.ppo import ActorRolloutRefConfig, PPOConfig
from verl.config.rollout import AgentLoopConfig, RolloutConfig


@dataclass
class CheckpointEngineConfig(BaseConfig, section="async_training.checkpoint_engine"):
    """How weights are sent to the ranks that generate."""

    device_buffer_size_M: int = setting(4096, "MiB of weights that are sent together.", low=1)  # noqa: N815


@dataclass
class AsyncTrainingConfig(BaseConfig, section="async_training"):
    """When weights are sent, and how old samples may be; weights versions are counted in updates."""

    require_batches: int = setting(1, "Mini-batches of ppo_mini_batch_size prompts that an update takes.", low=1)
    trigger_parameter_sync_step: int = setting(4, "Updates between two weight syncs.", low=1)
    staleness_threshold: float = setting(
        0.1,
        "Prompts that may be started beyond those of the updates until the next weight sync, as a share of them; 0 "
        "starts none.",
        low=0,
    )
    max_staleness: int | None = setting(
        None,
        "Weights versions by which the oldest token of a sample may be behind the trained weights; null: what "
        "staleness_threshold and trigger_parameter_sync_step allow.",
        low=0,
    )
    stale_samples: str = setting(
        "wait",
        "What happens before a sample becomes older than max_staleness: wait (an update waits until it is in the "
        "batch), or drop (its prompt is dropped, and another one started).",
        choices=("wait", "drop"),
    )
    partial_rollout: bool = setting(
        True, "Interrupt running generations at a weight sync and continue them with the new weights; false: wait."
    )
    use_rollout_log_probs: bool = setting(True, "Old log-probs are those of the rollout.")
    compute_prox_log_prob: bool = setting(
        False, "Compute log-probs with the weights before the update, as those of the proximal policy."
    )
    allow_off_policy: bool = setting(
        False,
        "Permit use_rollout_log_probs=false with compute_prox_log_prob=false where samples are of earlier weights.",
    )
    record: bool = setting(True, "Write the trained samples, with the weights of their tokens, to async_record.jsonl.")
    checkpoint_engine: CheckpointEngineConfig = setting(
        CheckpointEngineConfig, "How weights are sent to the ranks that generate."
    )


@dataclass
class RolloutPoolConfig(BaseConfig, section="rollout"):
    """The ranks that generate, and how much."""

    nnodes: int = setting(1, "Machines with ranks that generate.", low=1)
    n_gpus_per_node: int = setting(8, "Ranks that generate on each of them, with trainer.device=cpu too.", low=1)
    n: int = setting(4, "Samples of each prompt.", low=1)
    total_rollout_steps: int | None = setting(100, "Prompts of the run; null: as many as the epochs have.", low=1)
    total_epochs: int = setting(10, "Epochs over the training data.", low=1)
    test_freq: int = setting(1, "Weight syncs between validations; -1 for none.", low=-1)


@dataclass
class SeparateAgentLoopConfig(AgentLoopConfig, section="rollout.agent"):
    """Agent loops of asynchronous training."""

    command_journal: bool = setting(
        False,
        fixed="conversations of programs would be of other weights than those of the resumed run",
    )


@dataclass
class SeparateRolloutConfig(RolloutConfig, section="rollout"):
    """A rollout on ranks of its own."""

    mode: str = "async"
    calculate_log_probs: bool = True
    agent: SeparateAgentLoopConfig = setting(SeparateAgentLoopConfig)


@dataclass
class SeparateRolesConfig(ActorRolloutRefConfig, section="actor_rollout_ref"):
    """Policy, rollout and reference, the rollout on ranks of its own."""

    rollout: SeparateRolloutConfig = setting(SeparateRolloutConfig)


@dataclass
class AsyncPPOConfig(PPOConfig, section=""):
    """The tree of fully_async_ppo_trainer and one_step_off_ppo_trainer."""

    actor_rollout_ref: SeparateRolesConfig = setting(SeparateRolesConfig)
    async_training: AsyncTrainingConfig = setting(
        AsyncTrainingConfig, "When weights are sent to the rollout, and how old samples may be."
    )
    rollout: RolloutPoolConfig = setting(RolloutPoolConfig, "The ranks that generate, and how much.")

    def __post_init__(self) -> None:
        super().__post_init__()
        bound, rollout = self.async_training, self.actor_rollout_ref["rollout"]
        objective_settings(bound, self.algorithm["rollout_correction"])
        least, most = bound["trigger_parameter_sync_step"] - 1, bound["max_staleness"]
        if most is not None and most < least:
            raise ValueError(
                f"async_training.max_staleness={most}: the last update before a weight sync has samples that are "
                f"{least} versions old (trigger_parameter_sync_step - 1). Set it to {least} or more."
            )
        if rollout["mode"] != "async":
            raise ValueError(
                f"actor_rollout_ref.rollout.mode={rollout['mode']}: asynchronous training generates by "
                "rollout servers. Set it to async."
            )
        unused = {
            "trainer.local": self.trainer["local"], "actor_rollout_ref.rollout.skip_rollout": rollout["skip_rollout"],
            "actor_rollout_ref.rollout.over_sample_rate": rollout["over_sample_rate"],
            "actor_rollout_ref.rollout.agent.agent_loop_manager_class": rollout["agent"]["agent_loop_manager_class"],
            "reward_model.enable": self.reward_model["enable"],
        }
        for key, value in unused.items():
            if value:
                raise ValueError(f"{key}={value} does not work with asynchronous training. Leave it out.")


def versions_allowed(bound: Mapping[str, Any]) -> int:
    """Weights versions, counted in updates, by which the oldest token of a trained sample may be behind."""
    if bound["max_staleness"] is not None:
        return bound["max_staleness"]
    return math.ceil(round((1 + bound["staleness_threshold"]) * bound["trigger_parameter_sync_step"], 6)) - 1


def objective_settings(bound: Mapping[str, Any], correction: Mapping[str, Any] | None) -> dict[str, Any]:
    """What the loss of an asynchronous run compares the policy with: settings of the trainer, by dotted key.

    `bound` and `correction` are the sections async_training and algorithm.rollout_correction. With
    `use_rollout_log_probs` old log-probs are those of the rollout: each token's of the weights that generated it. With
    `compute_prox_log_prob`, whatever the former is, they are those of the weights at the start of the step, and every
    token has the weight pi_old / pi_rollout, truncated (decoupled PPO, arXiv 2110.00641 and 2505.24298): the weights of
    `correction`, or those of each token where it has none. With neither, no weights are added: ValueError, unless all
    samples are made by the weights that are trained, or `allow_off_policy`.
    """
    if correction is not None and not isinstance(correction, RolloutCorrectionConfig):
        correction = RolloutCorrectionConfig(**correction)
    uses_rollout, computes = bound["use_rollout_log_probs"], bound["compute_prox_log_prob"]
    bypasses = correction is not None and correction.bypass_mode
    if computes and bypasses:
        raise ValueError(
            "async_training.compute_prox_log_prob=true computes old log-probs, which "
            "algorithm.rollout_correction.bypass_mode=true leaves out. Set one of them to false."
        )
    trains_newest = bound["staleness_threshold"] == 0 or bound["max_staleness"] == 0
    on_policy = trains_newest and bound["trigger_parameter_sync_step"] == 1
    if not (uses_rollout or computes or bypasses or on_policy or bound["allow_off_policy"]):
        raise ValueError(
            "async_training.use_rollout_log_probs=false with async_training.compute_prox_log_prob=false takes ratios "
            "against other weights than those that made the samples. Set one of them to true, or "
            "async_training.allow_off_policy=true."
        )
    if computes and not bound["allow_off_policy"]:
        correction = RolloutCorrectionConfig.disabled() if correction is None else correction
        if correction.rollout_is is None:
            correction = replace(correction, rollout_is="token")
    return {
        "actor_rollout_ref.actor.use_rollout_log_probs": uses_rollout and not computes,
        "actor_rollout_ref.rollout.calculate_log_probs": True,
        "algorithm.rollout_correction": correction,
    }


def with_derived_settings(config: DictConfig) -> DictConfig:
    """A config in which data.train_batch_size and gen_batch_size are the prompts of an update, with its objective.

    The prompts are require_batches x ppo_mini_batch_size, unless data.train_batch_size is set
    (one_step_off_ppo_trainer). The objective is that of `objective_settings`; one that is wrong stays for the checks.
    """
    config = config.copy()
    bound, roles = config.async_training, config.actor_rollout_ref
    prompts = config.data.train_batch_size or bound.require_batches * roles.actor.ppo_mini_batch_size
    values = {"data.train_batch_size": prompts, "data.gen_batch_size": prompts}
    with suppress(ValueError):
        values |= objective_settings(bound, config.algorithm.rollout_correction)
    for key, value in values.items():
        OmegaConf.update(config, key, asdict(value) if is_dataclass(value) else value)
    return config


def tree_type(config_type: type, plain: Mapping[str, Any]) -> type:
    """The dataclass that checks a tree: `config_type`, or that of asynchronous runs, whose tree has more keys."""
    return AsyncPPOConfig if config_type is PPOConfig and "async_training" in plain else config_type
