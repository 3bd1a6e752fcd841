"""Generates with the actor's own module: no second engine, no copy of the weights."""

from typing import Any, NamedTuple

import numpy as np
import torch
import torch.distributed as dist
from transformers.cache_utils import Cache

from verl.models.kv_cache import last_columns
from verl.protocol import DataProto
from verl.protocol.sampling_mask import SAMPLING_MASK, mask_column
from verl.rollout.base import BaseRollout, register_rollout
from verl.rollout.sampling import GenerationRequest, Sampling, build_rollout_batch
from verl.training.peft_weights import without_adapters
from verl.training.policy.attention import make_packable


@register_rollout("hf", "sync")
class HFRollout(BaseRollout):
    """Batched, KV-cached generation through the engine's (sharded) Hugging Face module.

    A sample depends on the step, its prompt and its number among the prompt's samples, not on the other rows of the
    batch or the rank. All ranks step together until the last row of the last rank is done, since a sharded module's
    forward is a collective call; but rows that are done leave the batch. Weights are gathered once per call, not once
    per token.
    """

    # Rows leave when at most this share of the batch is not done. That copies the cache of the others, as every token
    # does: together these copies cost at most those of four tokens of the full batch.
    drop_at = 0.75
    compare_at = 9  # response tokens at which the model's cache is checked, once
    compared = False
    engine: Any = None
    keeps_weights = True  # they are the actor's own

    def bind_actor(self, engine: Any, policy: Any) -> None:
        self.engine, model = engine, without_adapters(engine.module)
        self.model_name = type(model).__name__.removeprefix("FSDP")
        make_packable(model, wanted=False)  # applies soft caps

    def generate_sequences(self, prompts: DataProto) -> DataProto:
        if self.engine is None:
            raise RuntimeError("HFRollout has no actor to generate with; call bind_actor(engine, policy) first.")
        n = prompts.meta_info.get("n", 1)
        self.kept_masses: list[torch.Tensor] = []  # of the tokens of this call, with a sampling mask
        with self.engine.eval_mode(), self.engine.unsharded(), torch.no_grad(), self.engine.autocast():
            step = max(1, self.config.max_num_seqs // n)  # prompts at a time
            parts = [self._generate(prompts[start : start + step]) for start in range(0, len(prompts), step)]
        tensors = {key: torch.cat([part[key] for part in parts]) for key in parts[0] if key != SAMPLING_MASK}
        masks = [part[SAMPLING_MASK] for part in parts if SAMPLING_MASK in part]
        if not masks:
            return DataProto.from_dict(tensors)
        metrics = {"health/kept_mass": [torch.cat(self.kept_masses).mean().item()]}
        return DataProto.from_dict(tensors, {SAMPLING_MASK: np.concatenate(masks)}, {"metrics": metrics})

    def _generate(self, prompts: DataProto) -> dict[str, Any]:
        """Samples of prompts [B, P], as `build_rollout_batch` returns them, and their sampling masks if recorded."""
        request = GenerationRequest.from_batch(prompts, self.config)
        n, pad, limit = request.n, request.pad_id, self.config.response_length
        device = self.engine.device  # with fsdp_config.offload_policy not that of the parameters
        eos = torch.tensor(request.eos_ids, dtype=torch.int64, device=device)
        inputs = [prompts.batch[key].to(device) for key in ("input_ids", "attention_mask", "position_ids")]  # [B, P]
        generators = [torch.Generator().manual_seed(seed) for seeds in request.seeds for seed in seeds]
        uniforms = torch.stack([torch.rand(limit, generator=g) for g in generators]).to(device)  # [B*n, R]

        # A prompt is processed once; its cache is then repeated for its samples.
        logits, cache = self._forward(*inputs, {})
        if n > 1:
            logits = logits.repeat_interleave(n, 0)  # [B*n, V]
            choose_rows(cache, torch.arange(len(prompts), device=device).repeat_interleave(n))
        _, attention_mask, positions = (tensor.repeat_interleave(n, 0) for tensor in inputs)
        rows = torch.arange(len(positions), device=device)  # those in the batch
        responses = torch.full((len(rows), limit), pad, device=device)
        response_mask = torch.zeros_like(responses)
        log_probs = torch.zeros_like(responses, dtype=torch.float32)
        done = torch.zeros(len(responses), dtype=torch.bool, device=device)
        kept_ids: list[list[np.ndarray]] = [[] for _ in rows]
        for t in range(limit):
            token, log_prob, kept = choose(logits.float(), uniforms[rows, t], request.sampling, filtered=True)
            runs = ~done[rows]  # [b]
            if request.records_masks:
                self.kept_masses.append(kept.mass[runs].cpu())
                for row, ids, is_running in zip(rows.tolist(), kept.ids(), runs.tolist(), strict=True):
                    if is_running:
                        kept_ids[row].append(ids)
            responses[rows, t] = torch.where(runs, token, pad)
            log_probs[rows, t] = torch.where(runs, log_prob, 0.0)
            response_mask[rows, t] = runs.long()
            if not self.config.ignore_eos:
                done[rows] |= torch.isin(token, eos)
            if t + 1 == limit:
                break
            some_row_runs = (~done).any().long()
            if dist.is_initialized() and dist.get_world_size() > 1:
                dist.all_reduce(some_row_runs, op=dist.ReduceOp.MAX)
            if not some_row_runs:  # on any rank
                break
            running = (~done[rows]).nonzero().squeeze(1)
            if len(running) == 0:  # other ranks have rows: one takes part in their forwards
                running = rows.new_zeros(1)
            if len(running) <= self.drop_at * len(rows):
                rows = rows[running]
                choose_rows(cache, running)
            seen = torch.cat([attention_mask[rows], response_mask[rows, : t + 1]], 1)
            position = positions[rows, -1:] + t + 1
            logits, cache = self._forward(responses[rows, t : t + 1], seen, position, cache)
            if not self.compared and t + 2 == min(limit, self.compare_at):
                ids = torch.cat([inputs[0][rows // n], responses[rows, : t + 1]], 1)
                later = positions[rows, -1:] + 1 + torch.arange(t + 1, device=device)
                self._compare(logits, ids, seen, torch.cat([positions[rows], later], 1), ~done[rows])
        returned = log_probs if self.config.calculate_log_probs else None
        samples: dict[str, Any] = build_rollout_batch(prompts, n, responses, response_mask, returned)
        return samples | ({SAMPLING_MASK: mask_column(kept_ids)} if request.records_masks else {})

    def _forward(
        self, input_ids: torch.Tensor, attention_mask: torch.Tensor, position_ids: torch.Tensor, cache: dict[str, Cache]
    ) -> tuple[torch.Tensor, dict[str, Cache]]:
        """Logits [B, V] of the last position, and the model's cache under the name of the argument that takes it.

        input_ids and position_ids [B, q], attention_mask [B, cached + q]. Without a cache the model makes its own: that
        of a hybrid has states of convolutions and recurrences too.
        """
        inputs = {"input_ids": input_ids, "attention_mask": attention_mask, "position_ids": position_ids, **cache}
        if "cache_params" in cache:  # models of recurrences alone take no mask of tokens that they have read
            del inputs["attention_mask"]
        output = self.engine.module(**inputs, use_cache=True, logits_to_keep=last_columns(input_ids, 1))
        made = {name: output.get(name) for name in ("past_key_values", "cache_params")}
        made = {name: cache for name, cache in made.items() if cache is not None}
        if not made:
            raise ValueError(
                f"rollout.name=hf needs a model that gives a cache, which {self.model_name} does not. Set "
                "actor_rollout_ref.rollout.name=vllm, or sglang."
            )
        return output.logits[:, -1], made

    def _compare(
        self, logits: torch.Tensor, input_ids: torch.Tensor, attention_mask: torch.Tensor, position_ids: torch.Tensor,
        compared: torch.Tensor,
    ) -> None:  # fmt: skip
        """Raise ValueError if `logits` [B, V], computed with a cache, are not those of a forward over all tokens.

        The other inputs are [B, L]; compared: bool [B], the rows that count. In float32 the row that differs most
        decides; in half precision, whose rounding makes single rows differ by more than the limit, their mean.
        """
        inputs = {"input_ids": input_ids, "attention_mask": attention_mask, "position_ids": position_ids}
        kept = last_columns(input_ids, 1)
        whole = self.engine.module(**inputs, use_cache=False, logits_to_keep=kept).logits[:, -1]
        expected, given = (x[compared].float().log_softmax(-1) for x in (whole, logits))
        gap = (expected.exp() * (expected - given).abs()).sum(-1)  # of a log-prob, mean over the drawn token
        largest = torch.cat([gap, gap.new_zeros(1)]).max()  # there may be no row
        sums = torch.stack([gap.sum(), gap.new_tensor(len(gap))])
        if dist.is_initialized() and dist.get_world_size() > 1:
            dist.all_reduce(largest, op=dist.ReduceOp.MAX)
            dist.all_reduce(sums)
        self.compared = True
        full_precision = whole.dtype == torch.float32
        difference = largest if full_precision else sums[0] / sums[1].clamp(min=1)
        limit = 1e-3 if full_precision else 0.05
        if not difference <= limit:
            raise ValueError(
                f"rollout.name=hf: with its cache {self.model_name} gives log-probs that differ by {difference:.2g} "
                f"(limit {limit}) from those of a forward over all tokens. Set actor_rollout_ref.rollout.name=vllm, or "
                "sglang."
            )


def choose_rows(caches: dict[str, Cache], rows: torch.Tensor) -> None:
    """Let the caches hold these rows, int64 [B], of those that they hold; a row may come more than once."""
    for cache in caches.values():
        # A class of its own for one model knows what else it holds. Of others, only reorder_cache moves the states of
        # convolutions and recurrences.
        own = type(cache).batch_select_indices is not Cache.batch_select_indices
        (cache.batch_select_indices if own else cache.reorder_cache)(rows)


class Kept(NamedTuple):
    """The tokens that top-k and top-p leave in each of B rows."""

    counts: torch.Tensor  # int64 [B], how many
    order: torch.Tensor  # int64 [B, V], ids; a row begins with those that are left
    mass: torch.Tensor  # [B], their probability before the filters

    def ids(self) -> list[np.ndarray]:
        """The ids that are left in each row, int32 arrays."""
        order = self.order[:, : int(self.counts.max())].to("cpu", torch.int32).numpy()
        return [row[:count].copy() for row, count in zip(order, self.counts.tolist(), strict=True)]


def choose(
    logits: torch.Tensor, uniform: torch.Tensor, sampling: Sampling, filtered: bool = False
) -> tuple[torch.Tensor, torch.Tensor, Kept | None]:
    """Next token of each row and its log-probability: logits [B, V], uniform [B] in [0, 1) -> [B] int64, [B]; and what
    top-k and top-p leave, None without filters.

    Draws by inverting the cumulative distribution at `uniform`, over tokens in order of their ids, or of falling
    probability where top-k or top-p sort them. The log-probability is that of the tempered distribution before top-k
    and top-p, or, if `filtered`, of the distribution after them, from which the token was drawn.
    """
    kept = None
    log_probs = (logits / sampling.temperature).log_softmax(-1)
    if sampling.greedy:
        token = logits.argmax(-1)
    elif sampling.top_k <= 0 and sampling.top_p >= 1:
        token = invert(log_probs.exp().double().cumsum(-1), uniform)
    else:
        probs, order = log_probs.exp().sort(dim=-1, descending=True, stable=True)
        if sampling.top_k > 0:
            probs[:, sampling.top_k :] = 0.0
        if sampling.top_p < 1:
            before = (probs.cumsum(-1) - probs) / probs.sum(-1, keepdim=True)  # of what top-k leaves, as in vLLM
            probs = probs.masked_fill(before >= sampling.top_p, 0.0)
        cumulative = probs.double().cumsum(-1)
        token = order.gather(-1, invert(cumulative, uniform).unsqueeze(-1)).squeeze(-1)
        kept = Kept((probs > 0).sum(-1), order, cumulative[:, -1])
        if filtered:
            log_probs = log_probs - cumulative[:, -1:].log().to(log_probs.dtype)
    return token, log_probs.gather(-1, token.unsqueeze(-1)).squeeze(-1), kept


def invert(cumulative: torch.Tensor, uniform: torch.Tensor) -> torch.Tensor:
    """cumulative [B, V] float64, uniform [B] below 1 -> [B], the first position that exceeds that share of the sum.

    A product with a float32 below 1 stays below the sum: no token of probability 0 comes first. NaN gives the last one.
    """
    target = uniform.double().unsqueeze(-1) * cumulative[:, -1:]
    return torch.searchsorted(cumulative, target, right=True).squeeze(-1).clamp(max=cumulative.shape[-1] - 1)
