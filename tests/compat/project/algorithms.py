"""An advantage estimator and a policy loss."""

from collections import defaultdict

import torch

from verl.trainer.ppo.core_algos import (
    ADV_ESTIMATOR_REGISTRY,
    POLICY_LOSS_REGISTRY,
    agg_loss,
    register_adv_est,
    register_policy_loss,
)


@register_adv_est("group_rank")
def compute_group_rank_advantage(token_level_rewards, response_mask, index, config=None, **kwargs):
    """Ranks of the scores within a prompt's samples, from -1 to 1."""
    with torch.no_grad():
        scores = token_level_rewards.sum(dim=-1)
        groups = defaultdict(list)
        for row, uid in enumerate(index):
            groups[uid].append(row)
        ranks = torch.zeros_like(scores)
        for rows in groups.values():
            order = scores[rows].argsort(stable=True).argsort().float()
            ranks[rows] = 2 * order / max(1, len(rows) - 1) - 1
        advantages = ranks.unsqueeze(-1) * response_mask
    return advantages, advantages


@register_policy_loss("unclipped")
def compute_unclipped_loss(
    old_log_prob, log_prob, advantages, response_mask, loss_agg_mode="token-mean", config=None,
    rollout_is_weights=None,
):  # fmt: skip
    """-A * ratio, without clipping."""
    ratio = torch.exp(log_prob - old_log_prob)
    losses = -advantages * ratio
    if rollout_is_weights is not None:
        losses = losses * rollout_is_weights
    loss = agg_loss(loss_mat=losses, loss_mask=response_mask, loss_agg_mode=loss_agg_mode)
    return loss, {"actor/ratio_max": ratio.max().detach().item()}


assert "group_rank" in ADV_ESTIMATOR_REGISTRY and "unclipped" in POLICY_LOSS_REGISTRY
