"""The accept/reject policy: one Bernoulli action per judged draft token."""

import torch
import torch.nn.functional as F
from tensordict import TensorDict
from torch import nn

from verl.training.peft_weights import without_adapters
from verl.training.policy.attention import make_packable
from verl.training.policy.base import Policy, check_temperature, register_policy
from verl.training.policy.causal_lm import call_as_forward
from verl.training.policy.layout_probe import agreeing_layouts
from verl.training.policy.packing import ON_HOST, OnHost, on_host

MODEL_KEYS = ("input_ids", "attention_mask", "position_ids", "spd_layout")


@register_policy("bernoulli")
class BernoulliPolicy(Policy):
    """a ~ Bernoulli(sigmoid(z / T)) with z = model(input_ids, attention_mask, position_ids, spd_layout).

    `share`: rows of one `group_index` are adjacent and have the same input, so that each group needs one forward for
    all its samples.
    """

    reads_answers = False
    drift_metrics = ("spd/drift/mean", "spd/drift/max")

    def __init__(self, share: bool = False):
        self.share = share
        self.remove_padding = False
        self.required_keys = ("responses", *MODEL_KEYS, *(("group_index",) if share else ()))

    def set_forward(self, *, remove_padding: bool, share_prompt: bool) -> None:
        """The model removes padding in its forward; `share_prompt` is ignored in favour of the policy's `share`."""
        self.remove_padding = remove_padding

    def compare_layouts(self, model: nn.Module, device: torch.device) -> None:
        """Keep padding where the backbone's hidden states differ too much without."""
        if not self.remove_padding:
            return
        backbone = without_adapters(model.backbone)
        if not make_packable(backbone):
            return

        def states(rows: TensorDict, flat: bool, wide: bool) -> torch.Tensor:
            values = call_as_forward(model, backbone_states, rows, flat, wide=wide)
            return F.normalize(values[:, -rows["responses"].shape[1] :], dim=-1)

        layouts = {"without padding": states}
        self.remove_padding = agreeing_layouts(backbone, "hidden states", states, layouts, device)["without padding"]

    def scores(self, model: nn.Module, batch: TensorDict) -> torch.Tensor:
        """z [B, gamma] float32: 50.0 where draft and target agree, also at padding.

        input_ids [B, P]; attention_mask and position_ids [B, >= P], of which the first P columns count; spd_layout
        [B, 5] = (context_start, context_len, draft_start, draft_len, target_start).
        """
        width = batch["input_ids"].shape[1]
        options = {"remove_padding": True} if self.remove_padding else {}
        if ON_HOST in batch.keys():
            columns, names = on_host(batch), ("input_ids", "attention_mask", "spd_layout")
            options["host"] = OnHost({name: columns[name][:, :width] for name in names})
        inputs = {name: batch[name][:, :width] for name in ("input_ids", "attention_mask", "position_ids")}
        return model(**inputs, spd_layout=batch["spd_layout"], **options).float()

    def log_probs(
        self, model: nn.Module, micro_batch: TensorDict, *, temperature: float, with_entropy: bool
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """log p of the actions `responses` [B, R] in {0, 1}, and the Bernoulli entropy, both [B, R] float32."""
        temperature = check_temperature(temperature)
        actions = micro_batch["responses"]
        scores = self._scores_of_groups if self.share else self.scores
        z = fit_width(scores(model, micro_batch), actions.shape[1])
        log_p = action_log_probs(z, actions, temperature)
        if not with_entropy:
            return log_p, None
        z = z / temperature
        # H = -p log p - (1-p) log(1-p), with log(1-p) = log p - z
        return log_p, (1 - torch.sigmoid(z)) * z - F.logsigmoid(z)

    def _scores_of_groups(self, model: nn.Module, batch: TensorDict) -> torch.Tensor:
        """`scores` by one forward of the first row of each group; ValueError if rows of a group are not adjacent."""
        columns = on_host(batch)
        index = columns["group_index"].cpu()
        groups, group_of_row, sizes = torch.unique_consecutive(index, return_inverse=True, return_counts=True)
        if groups.unique().numel() != groups.numel():
            raise ValueError(
                f"group_index {index.tolist()} has a group whose rows are not adjacent; "
                "actor.share_prompt_forward needs batches cut and ordered along groups."
            )
        first = sizes.cumsum(0) - sizes
        device = batch["input_ids"].device
        chosen, group_of_row = (rows.to(device, non_blocking=True) for rows in (first, group_of_row))
        inputs = TensorDict({key: batch[key][chosen] for key in MODEL_KEYS}, batch_size=len(first))
        if ON_HOST in batch.keys():
            inputs.set_non_tensor(ON_HOST, OnHost({key: columns[key][first] for key in MODEL_KEYS}))
        return self.scores(model, inputs)[group_of_row]


def backbone_states(model: nn.Module, rows: TensorDict, flat: bool) -> torch.Tensor:
    """Last hidden states [B, P, H] of a scorer's backbone, in a `flat` row or not."""
    mask = rows["attention_mask"]
    return model.states(rows["input_ids"], mask.cpu() if flat else mask, rows["position_ids"], flat)


def fit_width(z: torch.Tensor, width: int) -> torch.Tensor:
    """z [B, g] -> [B, width]; padding gets 50.0, accepted for certain. Raises ValueError where g exceeds width."""
    if z.shape[1] > width:
        raise ValueError(
            f"the model scored {z.shape[1]} draft positions, the batch has {width}: data.max_response_length must be "
            "at least the longest draft (gamma)."
        )
    return F.pad(z, (0, width - z.shape[1]), value=50.0)


def action_log_probs(z: torch.Tensor, actions: torch.Tensor, temperature: float) -> torch.Tensor:
    """log p(a) under Bernoulli(sigmoid(z / T)): z [B, 1, g] or [B, n, g], actions [B, n, g] -> float32 [B, n, g]; or
    both [B, g].
    """
    scaled = z.float() / temperature
    return F.logsigmoid(torch.where(actions == 1, scaled, -scaled))
