"""A policy loss.

    actor_rollout_ref.model.external_lib=examples.extending.my_loss
    actor_rollout_ref.actor.policy_loss.loss_mode=squared_ratio
"""

from verl.algos.aggregation import agg_loss
from verl.algos.policy_loss import register_policy_loss


@register_policy_loss("squared_ratio")
def compute_squared_ratio_loss(
    old_log_prob, log_prob, advantages, response_mask, loss_agg_mode, config, rollout_is_weights=None
):
    """-A r + (r - 1)^2 with r = pi / pi_old: a soft bound on the ratio. All [B, T] -> (tensor [], metrics).

    config.global_batch_info holds token counts over all ranks, so that the cut into micro-batches does not matter.
    """
    ratio = (log_prob - old_log_prob).exp()
    losses = -advantages * ratio + (ratio - 1).square()
    if rollout_is_weights is not None:
        losses = losses * rollout_is_weights
    loss = agg_loss(losses, response_mask, loss_agg_mode, **config.global_batch_info)
    counted = response_mask.bool()
    drift = (ratio[counted] - 1).abs().mean().item() if counted.any() else 0.0
    return loss, {"actor/ratio_drift": drift}
