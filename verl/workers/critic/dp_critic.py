"""Values of response tokens and their clipped regression to the returns (Schulman et al. 2017, PPO)."""

import math
from collections import defaultdict
from dataclasses import asdict

import torch
from loguru import logger
from tensordict import TensorDict

from verl.protocol import DataProto
from verl.trainer.ppo.core_algos import compute_value_loss
from verl.utils.peft_weights import without_adapters
from verl.utils.torch_functional import masked_mean
from verl.workers.actor.batch_cuts import micro_batches, mini_batches, restore_order
from verl.workers.actor.optimizer_step import StepCounts, accumulate_and_step, global_counts
from verl.workers.config import FSDPCriticConfig
from verl.workers.critic.base import BasePPOCritic
from verl.workers.engine import FSDPEngine
from verl.workers.policy.packing import make_packable, pack

_FORWARD_KEYS = ("input_ids", "attention_mask", "position_ids", "responses", "response_mask")


class DataParallelPPOCritic(BasePPOCritic):
    """Each rank brings its rows; the loss is the same however they are cut into micro-batches and ranks.

    The engine's module gives one number a token, logits [B, T, 1]; `config.ppo_mini_batch_size` counts rows of a rank.
    """

    def __init__(self, config: FSDPCriticConfig, engine: FSDPEngine):
        super().__init__(config)
        self.engine = engine
        self.packs = engine.model_config.use_remove_padding and make_packable(without_adapters(engine.module))

    @torch.no_grad()
    def compute_values(self, data: DataProto) -> torch.Tensor:
        config = self.config
        rows, tokens = config.forward_micro_batch_size_per_gpu, config.forward_max_token_len_per_gpu
        budget = tokens if config.use_dynamic_bsz else None
        index, values = [], []
        with self.engine.eval_mode():
            chosen = data.select(batch_keys=list(_FORWARD_KEYS), non_tensor_batch_keys=[])
            for part, micro in micro_batches(chosen, rows=rows, tokens=budget, whole_groups=False):
                batch = micro.to(self.engine.device).batch
                index.append(part)
                values.append((self._values(batch) * batch["response_mask"]).cpu())
        return restore_order(values, index)

    def update_critic(self, data: DataProto) -> dict:
        config = self.config
        data = data.select(batch_keys=[*_FORWARD_KEYS, "values", "returns"], non_tensor_batch_keys=[])
        order = {"epochs": config.ppo_epochs, "shuffle": config.shuffle, "seed": config.data_loader_seed}
        metrics: dict = defaultdict(list)
        skipped = 0
        with self.engine.train_mode():
            for mini in mini_batches(data, config.ppo_mini_batch_size, whole_groups=False, **order):
                skipped += self._update_on(mini, metrics)
        metrics["critic/nonfinite_steps"] = [skipped]
        return dict(metrics)

    def _update_on(self, mini: DataProto, metrics: dict) -> bool:
        counts, config = global_counts(self.engine, mini.batch["response_mask"]), self.config
        if counts.batch_num_tokens == 0:
            logger.warning("a mini-batch without a counted token on any rank is skipped by the critic")
            return False
        budget = config.ppo_max_token_len_per_gpu if config.use_dynamic_bsz else None
        micros = micro_batches(mini, rows=config.ppo_micro_batch_size_per_gpu, tokens=budget, whole_groups=False)
        results, step = accumulate_and_step(
            self.engine, micros, lambda batch: self._loss(batch, counts), counts.batch_num_tokens, config.grad_clip
        )
        if math.isfinite(step.grad_norm):
            results["critic/grad_norm"] = step.grad_norm
        for name, value in results.items():
            metrics[name].append(value)
        return step.skipped

    def _loss(self, batch: TensorDict, counts: StepCounts) -> tuple[torch.Tensor, dict[str, float], dict[str, float]]:
        mask, values = batch["response_mask"], self._values(batch)
        loss, clipped = compute_value_loss(
            values, batch["returns"], batch["values"], mask, self.config.cliprange_value, self.config.loss_agg_mode,
            global_batch_info=asdict(counts),
        )  # fmt: skip
        means = {
            "critic/vf_clipfrac": clipped.item(),
            "critic/vpred_mean": masked_mean(values.detach(), mask).item(),
        }
        return loss, {"critic/vf_loss": loss.item()}, means

    def _values(self, batch: TensorDict) -> torch.Tensor:
        """[B, R] float32; the value in front of a response token stands one position to its left."""
        inputs = {key: batch[key] for key in ("input_ids", "attention_mask", "position_ids")}
        mask, length = inputs["attention_mask"], batch["responses"].shape[1]
        with self.engine.autocast():
            if not self.packs:
                logits = self.engine.module(**inputs, use_cache=False).logits  # [B, P+R, 1]
                return logits[:, -length - 1 : -1, 0].float()
            packing = pack(mask, length)
            flat = packing.model_inputs(inputs["input_ids"], inputs["position_ids"])
            values = self.engine.module(**flat).logits[0, :, 0][packing.predicted_from].float()  # [N]
        attended = mask[:, -length:].bool()
        return torch.zeros(attended.shape, device=values.device).masked_scatter(attended, values)
