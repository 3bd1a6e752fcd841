"""Generates with the actor's own module: no second engine, no copy of the weights."""

from typing import Any

import torch
import torch.distributed as dist
from transformers import DynamicCache

from verl.protocol import DataProto
from verl.workers.rollout.base import BaseRollout, register_rollout
from verl.workers.rollout.sampling import GenerationRequest, Sampling, answered


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
    engine: Any = None
    keeps_weights = True  # they are the actor's own

    def bind_actor(self, engine: Any, policy: Any) -> None:
        self.engine = engine

    def generate_sequences(self, prompts: DataProto) -> DataProto:
        if self.engine is None:
            raise RuntimeError("HFRollout has no actor to generate with; call bind_actor(engine, policy) first.")
        n = prompts.meta_info.get("n", 1)
        with self.engine.eval_mode(), self.engine.gathered(), torch.no_grad(), self.engine.autocast():
            step = max(1, self.config.max_num_seqs // n)  # prompts at a time
            parts = [self._generate(prompts[start : start + step]) for start in range(0, len(prompts), step)]
        return DataProto.from_dict(tensors={key: torch.cat([part[key] for part in parts]) for key in parts[0]})

    def _generate(self, prompts: DataProto) -> dict[str, torch.Tensor]:
        """Samples of prompts [B, P], as `answered` returns them."""
        request = GenerationRequest.from_batch(prompts, self.config)
        n, pad, limit = request.n, request.pad_id, self.config.response_length
        device = self.engine.device  # with fsdp_config.offload_policy not that of the parameters
        eos = torch.tensor(request.eos_ids, dtype=torch.int64, device=device)
        inputs = [prompts.batch[key].to(device) for key in ("input_ids", "attention_mask", "position_ids")]  # [B, P]
        generators = [torch.Generator().manual_seed(seed) for seeds in request.seeds for seed in seeds]
        uniforms = torch.stack([torch.rand(limit, generator=g) for g in generators]).to(device)  # [B*n, R]

        # A prompt is processed once; its cache is then repeated for its samples.
        cache = DynamicCache()
        logits = self._forward(*inputs, cache).repeat_interleave(n, 0)  # [B*n, V]
        if n > 1:
            cache.batch_repeat_interleave(n)
        _, attention_mask, positions = (tensor.repeat_interleave(n, 0) for tensor in inputs)
        rows = torch.arange(len(positions), device=device)  # those in the batch
        responses = torch.full((len(rows), limit), pad, device=device)
        response_mask = torch.zeros_like(responses)
        log_probs = torch.zeros_like(responses, dtype=torch.float32)
        done = torch.zeros(len(responses), dtype=torch.bool, device=device)
        for t in range(limit):
            token, log_prob = choose(logits.float(), uniforms[rows, t], request.sampling, filtered=True)
            responses[rows, t] = torch.where(done[rows], pad, token)
            log_probs[rows, t] = torch.where(done[rows], 0.0, log_prob)
            response_mask[rows, t] = (~done[rows]).long()
            if not self.config.ignore_eos:
                done[rows] |= torch.isin(token, eos)
            if t + 1 == limit:
                break
            left = (~done).any().long()
            if dist.is_initialized() and dist.get_world_size() > 1:
                dist.all_reduce(left, op=dist.ReduceOp.MAX)
            if not left:  # every row of every rank is done
                break
            running = (~done[rows]).nonzero().squeeze(1)
            if len(running) == 0:  # other ranks have rows: one takes part in their forwards
                running = rows.new_zeros(1)
            if len(running) <= self.drop_at * len(rows):
                rows = rows[running]
                cache.batch_select_indices(running)
            seen = torch.cat([attention_mask[rows], response_mask[rows, : t + 1]], 1)
            position = positions[rows, -1:] + t + 1
            logits = self._forward(responses[rows, t : t + 1], seen, position, cache)
        kept = log_probs if self.config.calculate_log_probs else None
        return answered(prompts, n, responses, response_mask, kept)

    def _forward(
        self, input_ids: torch.Tensor, attention_mask: torch.Tensor, position_ids: torch.Tensor, cache: DynamicCache
    ) -> torch.Tensor:
        """Logits of the last position: input_ids and position_ids [B, q], attention_mask [B, cached + q] -> [B, V]."""
        inputs = {"input_ids": input_ids, "attention_mask": attention_mask, "position_ids": position_ids}
        return self.engine.module(**inputs, past_key_values=cache, use_cache=True, logits_to_keep=1).logits[:, -1]


def choose(
    logits: torch.Tensor, uniform: torch.Tensor, sampling: Sampling, filtered: bool = False
) -> tuple[torch.Tensor, torch.Tensor]:
    """Next token of each row and its log-probability: logits [B, V], uniform [B] in [0, 1) -> [B] int64, [B].

    Draws by inverting the cumulative distribution at `uniform`, over tokens in order of their ids, or of falling
    probability where top-k or top-p sort them. The log-probability is that of the tempered distribution before top-k
    and top-p, or, if `filtered`, of the distribution after them, from which the token was drawn.
    """
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
        if filtered:
            log_probs = log_probs - cumulative[:, -1:].log().to(log_probs.dtype)
    return token, log_probs.gather(-1, token.unsqueeze(-1)).squeeze(-1)


def invert(cumulative: torch.Tensor, uniform: torch.Tensor) -> torch.Tensor:
    """cumulative [B, V] float64, uniform [B] below 1 -> [B], the first position that exceeds that share of the sum.

    A product with a float32 below 1 stays below the sum: no token of probability 0 comes first. NaN gives the last one.
    """
    target = uniform.double().unsqueeze(-1) * cumulative[:, -1:]
    return torch.searchsorted(cumulative, target, right=True).squeeze(-1).clamp(max=cumulative.shape[-1] - 1)
