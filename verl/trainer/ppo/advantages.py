"""From scores to token rewards to advantages, on the driver."""

from typing import Any

from verl.protocol import DataProto
from verl.trainer.ppo import core_algos


def apply_kl_penalty(
    data: DataProto, kl_ctrl: core_algos.FixedKLController, kl_penalty: str = "kl"
) -> tuple[DataProto, dict[str, float]]:
    """token_level_rewards = token_level_scores - coefficient * KL(old || ref) on counted tokens; all [B, R].

    Then the controller sees the batch's KL: mean over samples of the mean over their counted tokens.
    """
    mask = data.batch["response_mask"]
    kl = core_algos.kl_penalty(data.batch["old_log_probs"], data.batch["ref_log_prob"], kl_penalty) * mask
    coefficient = kl_ctrl.value
    data.batch["token_level_rewards"] = data.batch["token_level_scores"] - coefficient * kl
    current = (kl.sum(-1) / mask.sum(-1).clamp(min=1)).mean().item()
    kl_ctrl.update(current_kl=current, n_steps=len(data))
    return data, {"actor/reward_kl_penalty": current, "actor/reward_kl_penalty_coeff": coefficient}


def compute_advantage(
    data: DataProto, adv_estimator: core_algos.AdvantageEstimator | str, gamma: float = 1.0, lam: float = 1.0,
    num_repeat: int = 1, norm_adv_by_std_in_grpo: bool = True, config: Any = None,
) -> DataProto:
    """Add advantages and returns [B, R] by the registered estimator, which takes what its signature names."""
    settings = {"gamma": gamma, "lam": lam, "num_repeat": num_repeat, "config": config,
                "norm_adv_by_std_in_grpo": norm_adv_by_std_in_grpo}
    inputs = {**settings, "index": data.non_tensor_batch["uid"], **dict(data.batch.items())}
    data.batch["advantages"], data.batch["returns"] = core_algos.estimate_advantages(adv_estimator, inputs)
    return data
