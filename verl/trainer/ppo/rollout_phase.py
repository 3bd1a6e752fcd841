"""The rollout phase: generation by the actor's ranks and scores of the rewards, for training and validation."""

from typing import Any

import numpy as np
import torch
from omegaconf import DictConfig

from verl.protocol import DataProto, pad_dataproto_to_divisor, unpad_dataproto
from verl.single_controller.ray import RayWorkerGroup
from verl.trainer.ppo.batching import LOST, compute_response_mask
from verl.trainer.ppo.metric_utils import reduce_metrics
from verl.trainer.ppo.reward import compute_reward, drop_failed


class RolloutPhase:
    """Generates samples of prompts and scores them.

    `actor_group` generates, `rm_group` is the reward model's worker group or None.
    """

    def __init__(
        self, config: DictConfig, tokenizer: Any, actor_group: RayWorkerGroup, rm_group: RayWorkerGroup | None
    ) -> None:
        self.rollout_config = config.actor_rollout_ref.rollout
        self.tokenizer = tokenizer
        self.actor_group = actor_group
        self.rm_group = rm_group

    def generate(
        self, prompts: DataProto, step: int, validate: bool = False, **overrides: Any
    ) -> tuple[DataProto, dict[str, float]]:
        """n samples of each prompt, those of one prompt adjacent, joined with the prompts' columns; rollout metrics.

        Prompts [B, P] give samples [B * n, T] with response_mask [B * n, R], 1 = token of the response. `overrides`
        replace entries of the meta_info that the rollout reads. Raises ValueError if the rollout returns other rows.
        """
        rollout = self.rollout_config
        sampling = rollout.val_kwargs if validate else rollout
        meta = {
            "n": sampling.n,
            "temperature": sampling.temperature,
            "do_sample": sampling.do_sample,
            "eos_token_id": self.tokenizer.eos_token_id,
            "pad_token_id": self.tokenizer.pad_token_id,
            "validate": validate,
            "recompute_log_prob": False,
            "global_steps": step,
            **overrides,
        }
        n = meta["n"]
        gen_batch = DataProto(prompts.batch, dict(prompts.non_tensor_batch), meta)  # with extra_info [SPD Fix]
        padded, pad = pad_dataproto_to_divisor(gen_batch, self.actor_group.world_size)
        output = unpad_dataproto(self.actor_group.generate_sequences(padded), pad_size=pad * n)
        if len(output) != len(prompts) * n:
            raise ValueError(
                f"rollout '{rollout.name}' returned {len(output)} rows for {len(prompts)} prompts x n={n}; "
                f"expected {len(prompts) * n}, samples of one prompt adjacent."
            )
        metrics = reduce_metrics(output.meta_info["metrics"]) if "metrics" in output.meta_info else {}
        # The rollout may have changed a column (extra_info): its own columns replace those of the prompts.
        columns = {k: v for k, v in prompts.non_tensor_batch.items() if k not in output.non_tensor_batch}
        samples = DataProto(None, columns, {}).repeat(n, interleave=True)
        samples.union(DataProto(output.batch, output.non_tensor_batch, {}))
        if "response_mask" not in samples.batch:
            samples.batch["response_mask"] = compute_response_mask(samples)
        samples.meta_info = {"global_steps": step, "temperature": rollout.temperature}
        return samples, metrics

    def score(self, samples: DataProto, reward_fn: Any) -> tuple[DataProto, torch.Tensor, dict[str, Any], Any]:
        """Samples that have a score, token-level scores [B, R], extras by name, and how many failed in which way.

        With a reward model, its rm_scores [B, R] are a column that the reward manager takes or mixes in.
        """
        if self.rm_group is not None:
            columns = ["raw_prompt"] if "raw_prompt" in samples.non_tensor_batch else []
            sent = samples.select(
                batch_keys=["input_ids", "attention_mask", "position_ids", "responses", "response_mask"],
                non_tensor_batch_keys=columns,
            )
            padded, pad = pad_dataproto_to_divisor(sent, self.rm_group.world_size)
            samples.union(unpad_dataproto(self.rm_group.compute_rm_score(padded), pad_size=pad))
        return drop_failed(samples, *compute_reward(samples, reward_fn))


def without_lost(samples: DataProto) -> tuple[DataProto, int]:
    """The samples whose generation succeeded, and how many failed (column `__lost__`)."""
    if LOST not in samples.non_tensor_batch:
        return samples, 0
    lost = samples.non_tensor_batch.pop(LOST).astype(bool)
    return samples.select_idxs(np.flatnonzero(~lost)), int(lost.sum())
