"""A policy loss.

    actor_rollout_ref.model.external_lib=examples.extending.my_loss
    actor_rollout_ref.actor.policy_loss.loss_mode=squared_ratio
"""

from verl.algos.policy_loss import LossInputs, register_policy_loss
from verl.config.actor import ActorConfig


@register_policy_loss("squared_ratio")
def squared_ratio_loss(inputs: LossInputs, config: ActorConfig):
    """-A r + (r - 1)^2 with r = pi / pi_old: a soft bound on the ratio. Tensors [B, R] -> (tensor [], metrics).

    inputs.aggregate divides by token counts over all ranks, so that the cut into micro-batches does not matter.
    """
    ratio = inputs.log_ratio().exp()
    loss = inputs.aggregate(-inputs.advantages * ratio + (ratio - 1).square(), config.loss_agg_mode)
    counted = inputs.response_mask.bool()
    drift = (ratio[counted] - 1).abs().mean().item() if counted.any() else 0.0
    return loss, {"actor/ratio_drift": drift}
