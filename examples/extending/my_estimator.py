"""An advantage estimator.

    actor_rollout_ref.model.external_lib=examples.extending.my_estimator algorithm.adv_estimator=median
"""

import torch

from verl.algos.advantage import register_adv_est


@register_adv_est("median")
def compute_median_advantage(token_level_rewards, response_mask, index):
    """Score minus the median of the prompt's samples. [B, T] -> two of [B, T].

    The trainer passes what the signature names: token_level_rewards and response_mask [B, T], index [B] (equal for the
    samples of one prompt), values, reward_baselines, gamma, lam, config, ...
    """
    scores = token_level_rewards.sum(-1)  # [B]
    advantages = torch.empty_like(scores)
    for prompt in set(index):
        rows = torch.tensor([i for i, other in enumerate(index) if other == prompt])
        advantages[rows] = scores[rows] - scores[rows].median()
    advantages = advantages.unsqueeze(-1) * response_mask
    return advantages, advantages
