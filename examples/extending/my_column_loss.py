"""A policy loss that reads a column of its own, and a reward function that provides it.

    actor_rollout_ref.model.external_lib=examples.extending.my_column_loss
    actor_rollout_ref.actor.policy_loss.loss_mode=weighted_ratio
    custom_reward_function.path=examples/extending/my_column_loss.py
"""

from verl.algos.policy_loss import LossInputs, register_policy_loss
from verl.config.actor import ActorConfig


def compute_score(data_source, solution_str, ground_truth, extra_info=None):
    """1 if the answer ends with the ground truth; `weight` becomes the column that the loss reads."""
    words = solution_str.split()
    return {"score": float(words[-1:] == [str(ground_truth)]), "weight": 1 / max(1, len(words))}


@register_policy_loss("weighted_ratio", reads=("weight",))
def weighted_ratio_loss(inputs: LossInputs, config: ActorConfig):
    """-w A r with r = pi / pi_old and a weight w for each sample. Tensors [B, R] -> (tensor [], metrics)."""
    weight = inputs.columns["weight"].unsqueeze(-1)  # [B] -> [B, 1]
    losses = -weight * inputs.advantages * inputs.log_ratio().exp()
    return inputs.aggregate(losses, config.loss_agg_mode), {"actor/weight": weight.mean().item()}
