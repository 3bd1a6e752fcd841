"""A policy loss, and the agent loop's registration: the module that actor_rollout_ref.model.external_lib names."""

import torch

import tests.compat.project09.agent  # noqa: F401
from verl.trainer.ppo.core_algos import agg_loss, register_policy_loss


@register_policy_loss("squared_ratio")
def compute_policy_loss_squared_ratio(
    old_log_prob, log_prob, advantages, response_mask, loss_agg_mode="token-mean", config=None, rollout_is_weights=None
):
    """Policy gradient with a penalty on the squared log-ratio."""
    log_ratio = log_prob - old_log_prob
    losses = -advantages * torch.exp(log_ratio) + 0.5 * log_ratio**2
    if rollout_is_weights is not None:
        losses = losses * rollout_is_weights
    loss = agg_loss(
        loss_mat=losses, loss_mask=response_mask, loss_agg_mode=loss_agg_mode, **config.global_batch_info
    )
    return loss, {"actor/log_ratio_max": log_ratio.detach().abs().max().item()}
