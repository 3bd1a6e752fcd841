"""Values of response tokens and their clipped regression to the returns (Schulman et al. 2017, PPO)."""

from contextlib import nullcontext
from dataclasses import replace

import torch
from tensordict import TensorDict
from torch import nn

from verl.algos.aggregation import StepCounts, masked_mean
from verl.algos.policy_loss import value_loss
from verl.config.critic import FSDPCriticConfig
from verl.protocol import DataProto
from verl.training.actor.batch_cuts import micro_batches
from verl.training.actor.optimizer_step import forward_in_order, update_by_mini_batches
from verl.training.critic.base import BasePPOCritic
from verl.training.engine import FSDPEngine
from verl.training.peft_weights import without_adapters
from verl.training.policy.attention import make_packable
from verl.training.policy.float32 import in_float32
from verl.training.policy.layout_probe import agreeing_layouts
from verl.training.policy.packing import on_host, pack_batch

_FORWARD_KEYS = ("input_ids", "attention_mask", "position_ids", "responses", "response_mask")


class DataParallelPPOCritic(BasePPOCritic):
    """Each rank brings its rows; the loss is the same however they are cut into micro-batches and ranks.

    The engine's module gives one number per token, logits [B, T, 1]; `config.ppo_mini_batch_size` counts a rank's rows.
    """

    def __init__(self, config: FSDPCriticConfig, engine: FSDPEngine):
        super().__init__(config)
        self.engine = engine
        self.packs = packs_values(engine)

    def compute_values(self, data: DataProto) -> torch.Tensor:
        rows, tokens = self.config.forward_micro_batch_size_per_gpu, self.config.forward_max_token_len_per_gpu
        chosen = data.select(batch_keys=list(_FORWARD_KEYS), non_tensor_batch_keys=[])
        budget = tokens * self.engine.sequence_parallel_size if self.config.use_dynamic_bsz else None
        chosen, own = self.engine.gather_over_sequence_group(chosen)
        micros = micro_batches(chosen, rows=rows, tokens=budget, whole_groups=False)
        (values,) = forward_in_order(self.engine, micros, lambda batch: [self._values(batch) * batch["response_mask"]])
        return values[own]

    def update_critic(self, data: DataProto) -> dict:
        data = data.select(batch_keys=[*_FORWARD_KEYS, "values", "returns"], non_tensor_batch_keys=[])
        return update_by_mini_batches(self.engine, self.config, data, self._loss, "critic", whole_groups=False)

    def _loss(self, batch: TensorDict, counts: StepCounts) -> tuple[torch.Tensor, dict[str, float], dict[str, float]]:
        mask, values = batch["response_mask"], self._values(batch)
        counts = replace(counts, loss_scale_factor=self.config.loss_scale_factor)
        loss, clipped = value_loss(values, batch["returns"], batch["values"], mask, counts, self.config)
        means = {"critic/vf_clipfrac": clipped.item(), "critic/vpred_mean": masked_mean(values.detach(), mask).item()}
        return loss, {"critic/vf_loss": loss.item()}, means

    def _values(self, batch: TensorDict) -> torch.Tensor:
        """[B, R] float32."""
        mask = on_host(batch)["attention_mask"]
        tokens = int(mask.sum()) if self.packs else mask.numel()
        with self.engine.autocast(tokens if torch.is_grad_enabled() else 0):
            return response_values(self.engine.module, batch, self.packs)


def response_values(module: nn.Module, batch: TensorDict, packs: bool) -> torch.Tensor:
    """[B, R] float32, with padding or, if it `packs`, in a flat row: the value in front of each response token, which
    stands one position to its left."""
    inputs = {key: batch[key] for key in ("input_ids", "attention_mask", "position_ids")}
    length = batch["responses"].shape[1]
    if not packs:
        return module(**inputs, use_cache=False).logits[:, -length - 1 : -1, 0].float()  # of [B, P+R, 1]
    packing = pack_batch(batch, length)
    flat = packing.model_inputs(inputs["input_ids"], inputs["position_ids"])
    values = module(**flat).logits[0, :, 0][packing.predicted_from].float()  # [N]
    return packing.scatter_to_responses(values, batch["responses"].shape)


def packs_values(engine: FSDPEngine) -> bool:
    """Whether a model with one value per token runs without padding: asked for, possible, and with the same values.

    Called on all ranks. Raises ValueError where padding changes values, or where ranks share sequences and cannot.
    """
    model, shared = without_adapters(engine.module), engine.sequence_parallel_size > 1
    packs = make_packable(model, shared, engine.model_config.use_remove_padding)

    def values(rows: TensorDict, flat: bool, wide: bool) -> torch.Tensor:
        with in_float32(engine.module) if wide else nullcontext():
            return response_values(engine.module, rows, flat)

    with engine.eval_mode():
        layouts = {"without padding": values} if packs else {}
        agrees = agreeing_layouts(model, "values", values, layouts, engine.device)
    return packs and agrees["without padding"]
