"""Which models a PPO config needs besides the actor: rules that checks, the memory estimate and the trainer share.

`config` is the composed tree, as a DictConfig or as plain dicts.
"""

from collections.abc import Mapping
from typing import Any

LEARNS_VALUES = ("gae",)  # estimators that read the values of a critic
READS_REFERENCE = ("opd",)  # estimators that read the log-probs of the reference policy


def need_critic(config: Mapping[str, Any]) -> bool:
    """`critic.enable` where it is set, else whether the estimator reads values."""
    enable = config["critic"]["enable"]
    return config["algorithm"]["adv_estimator"] in LEARNS_VALUES if enable is None else bool(enable)


def reads_reference(config: Mapping[str, Any]) -> bool:
    """Whether the reward, the loss or the estimator reads the reference policy's log-probs (for a KL term)."""
    algorithm, actor = config["algorithm"], config["actor_rollout_ref"]["actor"]
    by_estimator = algorithm["adv_estimator"] in READS_REFERENCE
    return bool(algorithm["use_kl_in_reward"] or actor["use_kl_loss"] or by_estimator)


def serves_reward_model(config: Mapping[str, Any]) -> bool:
    """Whether the reward model runs in servers (reward_model.rollout.name), not in the ranks themselves."""
    reward = config["reward_model"]
    return bool(reward["enable"] and reward["rollout"]["name"])
