"""The PPO update loop of the actor over an engine and a policy."""

import math
from dataclasses import asdict, replace
from functools import partial

import numpy as np
import torch
import torch.distributed as dist
from tensordict import TensorDict

from verl.algos.aggregation import StepCounts, agg_loss
from verl.algos.kl import kl_penalty
from verl.algos.policy_loss import (
    LOSS_COLUMNS,
    LOSSES_OF_ADVANTAGES,
    TOKEN_SCORES,
    LossInputs,
    choose_tokens,
    get_loss_fn,
)
from verl.config.actor import FSDPActorConfig
from verl.protocol import DataProto
from verl.protocol.sampling_mask import SAMPLING_MASK
from verl.training.actor.base import BasePPOActor, auxiliary_losses
from verl.training.actor.batch_cuts import ROWS_PER_SAMPLE, groups_of, micro_batches
from verl.training.actor.optimizer_step import forward_in_order, update_by_mini_batches
from verl.training.engine import FSDPEngine
from verl.training.policy import Policy
from verl.utils.user_code import defined_at, kind

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
        self.loss_fn = get_loss_fn(config.policy_loss.loss_mode)
        self._cut = {"whole_groups": config.share_prompt_forward, "reads_answers": policy.reads_answers}
        with engine.eval_mode():  # there it is known whether ranks share sequences
            policy.bind(engine.module)
            policy.compare_layouts(engine.module, engine.device)
        self.auxiliary_losses = auxiliary_losses(config, engine)
        adds_terms = config.use_kl_loss or config.entropy_coeff or config.calculate_entropy or self.auxiliary_losses
        self.only_advantages = self.loss_fn in LOSSES_OF_ADVANTAGES and not adds_terms

    def compute_log_prob(
        self, data: DataProto, calculate_entropy: bool = False
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """log_probs [B, R] and, when asked, entropys [B, R], float32 on the CPU, in the batch's order.

        meta_info: `temperature`; `micro_batch_size`, `use_dynamic_bsz`, `max_token_len` replace the actor's own keys.
        """
        data, meta = self._select(data, ()), data.meta_info
        dynamic = meta.get("use_dynamic_bsz", self.config.use_dynamic_bsz)
        rows = meta.get("micro_batch_size", self.config.ppo_micro_batch_size_per_gpu)
        tokens = meta.get("max_token_len", self.config.ppo_max_token_len_per_gpu)
        data, own = self.engine.gather_over_sequence_group(data)
        budget = tokens * self.engine.sequence_parallel_size if dynamic else None
        micros = micro_batches(data, rows=rows, tokens=budget, **self._cut)

        def forward(batch: TensorDict) -> list[torch.Tensor]:
            log_prob, entropy = self.policy.log_probs(
                self.engine.module, batch, temperature=meta["temperature"], with_entropy=calculate_entropy
            )
            return [log_prob.float(), entropy.float()] if calculate_entropy else [log_prob.float()]

        log_probs, *entropys = (columns[own] for columns in forward_in_order(self.engine, micros, forward))
        return log_probs, (entropys[0] if calculate_entropy else None)

    def update_policy(self, data: DataProto) -> dict:
        """PPO steps on this rank's rows; the columns are [B, R] and [B, P+R]. See `update_by_mini_batches`."""
        config = self.config
        optional = (k for k in _OPTIONAL_KEYS if k in data.batch.keys())
        data = self._select(data, (*_UPDATE_KEYS, *LOSS_COLUMNS.get(config.policy_loss.loss_mode, ()), *optional))
        if config.use_kl_loss and "ref_log_prob" not in data.batch.keys():
            raise ValueError("actor.use_kl_loss=true needs the column ref_log_prob: add it, or set the key to false.")
        samples = len(data) // data.meta_info.get(ROWS_PER_SAMPLE, 1)
        steps = config.ppo_epochs * math.ceil(samples / config.ppo_mini_batch_size)
        if steps > 1 and "old_log_probs" not in data.batch.keys():
            raise ValueError(
                f"the batch lacks old_log_probs, which only a single step may leave out; {steps} are taken on its "
                f"{len(data)} rows (ppo_mini_batch_size={config.ppo_mini_batch_size} a rank, "
                f"ppo_epochs={config.ppo_epochs}). Add those of compute_log_prob."
            )
        loss_of = partial(self._loss, temperature=data.meta_info["temperature"])
        metrics = update_by_mini_batches(self.engine, config, data, loss_of, "actor", self._begin, **self._cut)
        if config.use_kl_loss:
            metrics["actor/kl_coef"] = [config.kl_loss_coef]
        return metrics

    def _begin(self, mini: DataProto, number: int) -> DataProto:
        """What a mini-batch needs before it is cut; returns the rows that its gradient comes from."""
        for auxiliary in self.auxiliary_losses:
            auxiliary.begin(mini)
        if self.config.policy_loss.loss_mode in TOKEN_SCORES:
            self._choose_tokens(mini, number)
        if not self.only_advantages or "old_log_probs" in mini.batch.keys():
            return mini
        return self._rows_with_advantages(mini)

    def _rows_with_advantages(self, mini: DataProto) -> DataProto:
        """`mini` without groups (rows, if groups are not kept whole) whose advantages [b, R] are all 0.

        With ratio 1 (no `old_log_probs`) they add exactly 0 to gradient and metrics, which are divided by the counts
        of all rows. Ranks keep equally many units, and at least one: forward and backward passes are collective calls.
        """
        columns, whole = mini.batch, self._cut["whole_groups"]
        units = groups_of(columns["group_index"]) if whole else [[i] for i in range(len(mini))]
        has_gradient = ((columns["advantages"] != 0) & columns["response_mask"].bool()).any(-1)  # [b]
        used = [bool(has_gradient[rows].any()) for rows in units]
        count = max(1, sum(used))
        prompts = columns["input_ids"][:, : -columns["responses"].shape[1]]
        if whole and self.policy.reads_answers and any((prompts[rows] != prompts[rows[0]]).any() for rows in units):
            count = len(units)  # such groups are cut into micro-batches, unlike numbers of them on unlike ranks
        largest = torch.tensor(count, device=self.engine.device)
        dist.all_reduce(largest, op=dist.ReduceOp.MAX)
        if int(largest) >= len(units):
            return mini
        used_first = sorted(range(len(units)), key=lambda i: not used[i])
        kept = sorted(used_first[: int(largest)])
        return mini.select_idxs(np.asarray([row for i in kept for row in units[i]]))

    def _choose_tokens(self, mini: DataProto, number: int) -> None:
        """Add the column `chosen` [b, R], from the log-probs of all micro-batches and ranks of a mini-batch.

        Drawn tokens depend on the row's tokens and the mini-batch's number, not on where the row is.
        """
        config, columns = self.config, mini.batch
        log_prob, _ = self.compute_log_prob(mini)

        def total(sums: torch.Tensor) -> torch.Tensor:
            sums = sums.to(self.engine.device)
            dist.all_reduce(sums)
            return sums.cpu()

        def gather(values: torch.Tensor) -> tuple[torch.Tensor, int]:
            everyone = values.new_empty(self.engine.world_size * len(values), device=self.engine.device)
            dist.all_gather_single(everyone, values.to(self.engine.device))
            return everyone.cpu(), self.engine.rank * len(values)

        keys = _token_keys(columns["input_ids"], log_prob.shape[1], config.data_loader_seed + number)
        old = columns["old_log_probs"] if "old_log_probs" in columns else log_prob
        inputs = LossInputs(log_prob, old, columns["advantages"], columns["response_mask"])
        columns["chosen"] = choose_tokens(config.policy_loss.loss_mode, inputs, config, keys, total, gather)

    def _loss(
        self, batch: TensorDict, counts: StepCounts, temperature: float
    ) -> tuple[torch.Tensor, dict[str, float], dict[str, float]]:
        """`LossOf` a micro-batch with columns [b, R] and [b, P+R]; response_mask: 1 = counted."""
        config, mask = self.config, batch["response_mask"]
        counts = replace(counts, loss_scale_factor=config.loss_scale_factor)
        wants_entropy = config.entropy_coeff != 0 or config.calculate_entropy
        caching = next((loss for loss in self.auxiliary_losses if loss.needs_cache), None)
        additive = {}
        for auxiliary in self.auxiliary_losses:
            if auxiliary is not caching:
                additive |= auxiliary.backward(batch)
        options = {} if caching is None else {"cache": caching.new_cache()}
        # Checkpointed layers would drop the cache.
        with self.engine.autocast(self.policy.forward_tokens(batch) if caching is None else 0):
            log_prob, entropy = self.policy.log_probs(
                self.engine.module, batch, temperature=temperature, with_entropy=wants_entropy, **options
            )
        if caching is not None:
            additive |= caching.backward(batch)
        old = batch["old_log_probs"] if "old_log_probs" in batch.keys() else log_prob.detach()
        inputs = LossInputs(
            log_prob=log_prob,
            old_log_prob=old,
            advantages=batch["advantages"],
            response_mask=mask,
            counts=counts,
            rollout_is_weights=batch.get("rollout_is_weights", None),
            columns=batch,
        )
        result = self.loss_fn(inputs, config)
        loss, means = result if isinstance(result, tuple) and len(result) == 2 else (None, None)
        if not isinstance(loss, torch.Tensor) or loss.numel() != 1 or not isinstance(means, dict):
            raise TypeError(
                f"policy loss {defined_at(self.loss_fn)} returned {kind(result)}; expected (loss, metrics): a tensor "
                "of shape () and a dict of numbers."
            )
        additive["actor/pg_loss"] = loss.item()
        if wants_entropy:
            entropy_agg = agg_loss(entropy, mask, config.loss_agg_mode, **asdict(counts))
            additive["actor/entropy"] = entropy_agg.item()
            if config.entropy_coeff != 0:
                loss = loss - config.entropy_coeff * entropy_agg
        if config.use_kl_loss:
            kl = kl_penalty(log_prob, batch["ref_log_prob"], config.kl_loss_type)
            kl_loss = agg_loss(kl, mask, config.loss_agg_mode, **asdict(counts))
            additive["actor/kl_loss"] = kl_loss.item()
            loss = loss + config.kl_loss_coef * kl_loss
        counted = mask.bool()
        drift = torch.where(counted, (log_prob.detach() - old).abs(), 0.0)
        mean_drift, max_drift = self.policy.drift_metrics
        additive[mean_drift] = drift.sum().item() * counts.dp_size / counts.batch_num_tokens
        return loss, additive, {**means, max_drift: drift.max().item()}

    def _select(self, data: DataProto, columns: tuple[str, ...]) -> DataProto:
        """Only what the forward and the loss read: the other columns are not copied to the device."""
        if "temperature" not in data.meta_info:
            raise ValueError("the actor's batch has no meta_info['temperature']; set it to that of the samples.")
        optional = [SAMPLING_MASK] if SAMPLING_MASK in data.batch.keys() else []
        groups = ["group_index"] if self.config.share_prompt_forward else []
        keys = list(dict.fromkeys([*self.policy.required_keys, *columns, *optional, *groups]))
        if missing := [k for k in keys if k not in data.batch.keys()]:
            needs = f"{type(self.policy).__name__} and the loss need"
            raise ValueError(f"the actor's batch lacks {missing}, which {needs}; it has {sorted(data.batch.keys())}.")
        return data.select(batch_keys=keys, non_tensor_batch_keys=[])


def _token_keys(input_ids: torch.Tensor, responses: int, seed: int) -> torch.Tensor:
    """Numbers in [0, 1) for the last `responses` columns of input_ids [B, L], by the row's tokens, column and seed."""

    def mixed(x: torch.Tensor) -> torch.Tensor:  # the finalizer of MurmurHash3, in int64 that wraps around
        for factor in (-49064778989728563, -4265267296055464877):
            x = (x ^ ((x >> 33) & 0x7FFFFFFF)) * factor
        return x ^ ((x >> 33) & 0x7FFFFFFF)

    columns = torch.arange(input_ids.shape[1], device=input_ids.device)
    rows = mixed(input_ids * 1_000_003 + columns).sum(-1, keepdim=True)  # [B, 1]
    drawn = mixed(mixed(rows + seed) + columns[-responses:])
    return ((drawn >> 24) & 0xFFFFFF).float() / 2**24
