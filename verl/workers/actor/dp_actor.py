"""The PPO update loop of the actor over an engine and a policy."""

import math
from collections import defaultdict
from dataclasses import asdict, replace

import torch
from loguru import logger
from tensordict import TensorDict

from verl.protocol import DataProto
from verl.trainer.ppo.core_algos import agg_loss, get_policy_loss_fn, kl_penalty
from verl.utils.user_code import defined_at, kind
from verl.workers.actor.base import BasePPOActor
from verl.workers.actor.batch_cuts import micro_batches, mini_batches, restore_order
from verl.workers.actor.optimizer_step import accumulate_and_step, global_counts
from verl.workers.config import FSDPActorConfig
from verl.workers.engine import FSDPEngine
from verl.workers.policy import Policy

#: columns of the update besides the policy's own; the optional ones where present
_UPDATE_KEYS = ("response_mask", "advantages")
_OPTIONAL_KEYS = ("old_log_probs", "ref_log_prob", "rollout_is_weights")


class DataParallelPPOActor(BasePPOActor):
    """Each rank brings its rows; losses are divided by counts over all ranks and all micro-batches of a mini-batch.

    So neither the cut into micro-batches nor the number of ranks changes the loss. `config.ppo_mini_batch_size` is the
    number of rows on this rank.
    """

    def __init__(self, config: FSDPActorConfig, engine: FSDPEngine, policy: Policy):
        super().__init__(config)
        self.engine = engine
        self.policy = policy
        self.loss_fn = get_policy_loss_fn(config.policy_loss.loss_mode)
        policy.bind(engine.module)

    @torch.no_grad()
    def compute_log_prob(
        self, data: DataProto, calculate_entropy: bool = False
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """log_probs [B, R] and, when asked, entropys [B, R], float32 on the CPU, in the batch's order.

        meta_info: `temperature`; `micro_batch_size`, `use_dynamic_bsz`, `max_token_len` replace the actor's own keys.
        """
        temperature = _temperature(data)
        meta = data.meta_info
        dynamic = meta["use_dynamic_bsz"] if "use_dynamic_bsz" in meta else self.config.use_dynamic_bsz
        rows = meta["micro_batch_size"] if "micro_batch_size" in meta else self.config.ppo_micro_batch_size_per_gpu
        tokens = meta["max_token_len"] if "max_token_len" in meta else self.config.ppo_max_token_len_per_gpu
        index, log_probs, entropys = [], [], []
        with self.engine.eval_mode():
            micros = self._micro_batches(self._select(data, ()), rows=rows, tokens=tokens if dynamic else None)
            for part, micro in micros:
                batch = micro.to(self.engine.device).batch
                with self.engine.autocast():
                    log_prob, entropy = self.policy.log_probs(
                        self.engine.module, batch, temperature=temperature, with_entropy=calculate_entropy
                    )
                index.append(part)
                log_probs.append(log_prob.float().cpu())
                if calculate_entropy:
                    entropys.append(entropy.float().cpu())
        return restore_order(log_probs, index), (restore_order(entropys, index) if calculate_entropy else None)

    def update_policy(self, data: DataProto) -> dict:
        """One optimizer step a mini-batch, `ppo_epochs` times over. Lists in the metrics have one entry a mini-batch.

        Each entry is this rank's share times the number of ranks: its mean over ranks is the value of the whole.
        """
        temperature = _temperature(data)
        data = self._select(data, (*_UPDATE_KEYS, *(k for k in _OPTIONAL_KEYS if k in data.batch.keys())))
        self._check_columns(data)
        metrics: dict = defaultdict(list)
        skipped = 0
        with self.engine.train_mode():
            config = self.config
            order = {"epochs": config.ppo_epochs, "shuffle": config.shuffle, "seed": config.data_loader_seed}
            size, whole = config.ppo_mini_batch_size, config.share_prompt_forward
            for mini in mini_batches(data, size, whole_groups=whole, **order):
                skipped += self._update_on(mini, temperature, metrics)
        metrics["actor/nonfinite_steps"] = [skipped]
        if self.config.use_kl_loss:
            metrics["actor/kl_coef"] = [self.config.kl_loss_coef]
        return dict(metrics)

    def _update_on(self, mini: DataProto, temperature: float, metrics: dict) -> bool:
        """Accumulate a mini-batch's gradient, step, append its metrics; True if the step was skipped."""
        counts = global_counts(self.engine, mini.batch["response_mask"])
        if counts.batch_num_tokens == 0:
            logger.warning("skipping a mini-batch that has no counted token on any rank")
            return False
        budget = self.config.ppo_max_token_len_per_gpu if self.config.use_dynamic_bsz else None
        micros = self._micro_batches(mini, rows=self.config.ppo_micro_batch_size_per_gpu, tokens=budget)
        # Losses take the counts from their config, as in verl.
        info = {**asdict(counts), "loss_scale_factor": self.config.loss_scale_factor}
        config = replace(self.config, global_batch_info=info)
        values, step = accumulate_and_step(
            self.engine, micros, lambda batch: self._loss(batch, temperature, config), counts.batch_num_tokens,
            config.grad_clip,
        )  # fmt: skip
        if math.isfinite(step.grad_norm):
            values["actor/grad_norm"] = step.grad_norm
        for name, value in values.items():
            metrics[name].append(value)
        self._log_step(mini, values)
        return step.skipped

    def _loss(
        self, batch: TensorDict, temperature: float, config: FSDPActorConfig
    ) -> tuple[torch.Tensor, dict[str, float], dict[str, float]]:
        """(loss to differentiate, parts that add up over micro-batches, means over this micro-batch's tokens).

        `batch` has columns [b, R] and [b, P+R]; `config` is the actor's with the mini-batch's `global_batch_info`.
        """
        mask = batch["response_mask"]
        wants_entropy = config.entropy_coeff != 0 or config.calculate_entropy
        with self.engine.autocast():
            log_prob, entropy = self.policy.log_probs(
                self.engine.module, batch, temperature=temperature, with_entropy=wants_entropy
            )
        old = batch["old_log_probs"] if "old_log_probs" in batch.keys() else log_prob.detach()
        result = self.loss_fn(
            old_log_prob=old,
            log_prob=log_prob,
            advantages=batch["advantages"],
            response_mask=mask,
            loss_agg_mode=config.loss_agg_mode,
            config=config,
            rollout_is_weights=batch["rollout_is_weights"] if "rollout_is_weights" in batch.keys() else None,
        )
        loss, means = result if isinstance(result, tuple) and len(result) == 2 else (None, None)
        if not isinstance(loss, torch.Tensor) or loss.numel() != 1 or not isinstance(means, dict):
            raise TypeError(
                f"policy loss {defined_at(self.loss_fn)} returned {kind(result)}; expected (loss, metrics): a tensor "
                "of shape () and a dict of numbers."
            )
        dp_size = self.engine.get_data_parallel_size()
        additive = {"actor/pg_loss": loss.item()}
        if wants_entropy:
            entropy_agg = agg_loss(entropy, mask, config.loss_agg_mode, **config.global_batch_info)
            additive["actor/entropy"] = entropy_agg.item()
            if config.entropy_coeff != 0:
                loss = loss - config.entropy_coeff * entropy_agg
        if config.use_kl_loss:
            kl = kl_penalty(log_prob, batch["ref_log_prob"], config.kl_loss_type)
            kl_loss = agg_loss(kl, mask, config.loss_agg_mode, **config.global_batch_info)
            additive["actor/kl_loss"] = kl_loss.item()
            loss = loss + config.kl_loss_coef * kl_loss
        counted = mask.bool()
        drift = torch.where(counted, (log_prob.detach() - old).abs(), 0.0)
        mean_drift, max_drift = self.policy.drift_metrics
        additive[mean_drift] = drift.sum().item() * dp_size / config.global_batch_info["batch_num_tokens"]
        return loss, additive, {**means, max_drift: drift.max().item()}

    def _select(self, data: DataProto, columns: tuple[str, ...]) -> DataProto:
        """Only what the forward and the loss read: the rest need not be cut and moved."""
        keys = list(dict.fromkeys([*self.policy.required_keys, *columns]))
        if self.config.share_prompt_forward and "group_index" not in keys:
            keys.append("group_index")
        if missing := [k for k in keys if k not in data.batch.keys()]:
            raise ValueError(
                f"the actor's batch lacks {missing}; it has {sorted(data.batch.keys())}. The policy "
                f"{type(self.policy).__name__} and the loss need them."
            )
        return data.select(batch_keys=keys, non_tensor_batch_keys=[])

    def _check_columns(self, data: DataProto) -> None:
        columns = data.batch.keys()
        if self.config.use_kl_loss and "ref_log_prob" not in columns:
            raise ValueError("actor.use_kl_loss=true needs the column ref_log_prob, which the batch lacks.")
        steps = self.config.ppo_epochs * math.ceil(len(data) / self.config.ppo_mini_batch_size)
        if steps > 1 and "old_log_probs" not in columns:
            raise ValueError(
                f"the batch lacks old_log_probs, but {steps} steps are taken on it (rows={len(data)}, "
                f"ppo_mini_batch_size={self.config.ppo_mini_batch_size} a rank, ppo_epochs={self.config.ppo_epochs}); "
                "only a single step may leave them out."
            )

    def _micro_batches(self, data: DataProto, *, rows: int | None, tokens: int | None) -> list:
        shared = self.config.share_prompt_forward
        reads = self.policy.reads_answers
        return micro_batches(
            data, rows=rows, tokens=tokens, whole_groups=shared, shared=shared, reads_answers=reads
        )

    def _log_step(self, mini: DataProto, values: dict[str, float]) -> None:
        if self.engine.rank != 0:
            return
        batch = mini.batch
        counted = batch["response_mask"].bool()
        described = {"rows": len(mini), "response_mask": f"{int(counted.sum())} of {counted.numel()} counted"}
        for key in ("old_log_probs", "advantages"):
            if key in batch.keys() and counted.any():
                column = batch[key][counted]
                described[key] = f"mean {column.mean():.4g} min {column.min():.4g} max {column.max():.4g}"
        described.update({name: f"{value:.6g}" for name, value in values.items()})
        logger.debug("actor update: {}", ", ".join(f"{k}={v}" for k, v in described.items()))


def _temperature(data: DataProto) -> float:
    if "temperature" not in data.meta_info:
        raise ValueError(
            "the actor's batch has no meta_info['temperature']: log-probs must be taken at the sampling temperature."
        )
    return data.meta_info["temperature"]
