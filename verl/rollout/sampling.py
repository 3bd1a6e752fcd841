"""What token rollouts share: from a batch of prompts to a request, from its samples to a batch."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from verl.config.rollout import RolloutConfig
from verl.protocol import DataProto


@dataclass(frozen=True)
class Sampling:
    """How the next token is chosen; greedy ignores the filters. top_k -1 and top_p 1 turn a filter off."""

    greedy: bool
    temperature: float
    top_k: int
    top_p: float

    def parameters(self) -> dict[str, float]:
        """The arguments of an engine: temperature, top_p and top_k; for greedy only a temperature of 0."""
        if self.greedy:
            return {"temperature": 0.0}
        return {"temperature": self.temperature, "top_p": self.top_p, "top_k": self.top_k}


@dataclass(frozen=True)
class GenerationRequest:
    """n samples of each prompt; a sample ends with a token of `eos_ids` or after `limit` tokens.

    `seeds[i][k]` is the seed, below 2**56, of sample k of prompt i: a hash of the prompt, its sample_index if the batch
    has that column, the global step, k and rollout.seed, so that neither the batch nor the rank changes it.
    """

    prompt_ids: list[list[int]]
    n: int
    sampling: Sampling
    eos_ids: tuple[int, ...]
    pad_id: int
    seeds: list[list[int]]
    limit: int
    log_probs: bool  # whether the samples come with the engine's log-probs
    repetition_penalty: float
    records_masks: bool = False  # whether the tokens that top-k and top-p leave are recorded (column `sampling_mask`)

    @classmethod
    def from_batch(cls, prompts: DataProto, config: RolloutConfig) -> GenerationRequest:
        """The request of left-padded prompts [B, P], attention_mask 1 = token.

        Reads meta_info n (1), eos_token_id (an id, several, or None), pad_token_id, global_steps (0) and do_sample,
        which overrides the settings. In validation (meta_info["validate"]) these are `config.val_kwargs`; else
        meta_info["temperature"] overrides them, too. With meta_info["probe_tokens"] samples have at most so many
        tokens, drawn from the model's own distribution (temperature 1, no filter, no penalty), with log-probs.
        """
        meta = prompts.meta_info
        validate = bool(meta.get("validate"))
        base = config.val_kwargs if validate else config
        temperature = base.temperature if validate else meta.get("temperature", base.temperature)
        greedy = not meta.get("do_sample", base.do_sample) or temperature == 0
        # Without a temperature to divide by, the log-probs of greedy tokens are those at 1.
        sampling = Sampling(greedy, temperature or 1.0, base.top_k, base.top_p)
        limit, log_probs, penalty = config.response_length, config.calculate_log_probs, config.repetition_penalty
        if probe := meta.get("probe_tokens"):
            sampling = Sampling(greedy=False, temperature=1.0, top_k=-1, top_p=1.0)
            limit, log_probs, penalty = min(limit, probe), True, 1.0
        filtered = not greedy and (sampling.top_k > 0 or sampling.top_p < 1)
        rows = zip(prompts.batch["input_ids"], prompts.batch["attention_mask"].bool(), strict=True)
        prompt_ids = [ids[attended].tolist() for ids, attended in rows]
        n, sample_index = meta.get("n", 1), prompts.non_tensor_batch.get("sample_index")
        seeds = _seeds(prompt_ids, sample_index, n, meta.get("global_steps", 0), config.seed)
        eos = meta["eos_token_id"]
        eos_ids = (eos,) if isinstance(eos, int) else tuple(eos or ())
        masks = config.record_sampling_mask and filtered and not validate
        return cls(prompt_ids, n, sampling, eos_ids, meta["pad_token_id"], seeds, limit, log_probs, penalty, masks)


def _seeds(prompt_ids: list[list[int]], sample_index: Sequence | None, n: int, step: int, seed: int) -> list[list[int]]:
    """`seeds` of GenerationRequest."""
    seeds = []
    for i, ids in enumerate(prompt_ids):
        known = "" if sample_index is None else sample_index[i]
        identity = np.asarray(ids, dtype=np.int64).tobytes()
        keys = (identity + f"|{known}|{step}|{k}|{seed}".encode() for k in range(n))
        seeds.append([int.from_bytes(hashlib.blake2b(key, digest_size=7).digest(), "big") for key in keys])
    return seeds


def right_padded(rows: Sequence[Sequence], length: int, value: float, dtype: torch.dtype) -> torch.Tensor:
    """Rows of at most `length` values as [len(rows), length] of `dtype`, padded with `value` on the right."""
    filled = torch.full((len(rows), length), value, dtype=dtype)
    for i, row in enumerate(rows):
        filled[i, : len(row)] = torch.tensor(row, dtype=dtype)
    return filled


def build_rollout_batch(
    prompts: DataProto, n: int, responses: torch.Tensor, mask: torch.Tensor, log_probs: torch.Tensor | None
) -> dict[str, torch.Tensor]:
    """The tensors that a rollout returns for prompts [B, P] and responses [B*n, R], those of one prompt adjacent.

    mask [B*n, R] int64, 1 = generated token; log_probs [B*n, R] float32. Returns prompts [B*n, P], responses,
    response_mask, input_ids, attention_mask, position_ids [B*n, P+R], and rollout_log_probs if given, on the CPU.
    """
    ids, attention, positions = (
        prompts.batch[key].cpu().repeat_interleave(n, 0) for key in ("input_ids", "attention_mask", "position_ids")
    )
    responses, mask = responses.cpu(), mask.cpu()
    steps = torch.arange(1, responses.shape[1] + 1)
    output = {
        "prompts": ids,
        "responses": responses,
        "response_mask": mask,
        "input_ids": torch.cat([ids, responses], 1),
        "attention_mask": torch.cat([attention, mask], 1),
        "position_ids": torch.cat([positions, positions[:, -1:] + steps], 1),
    }
    return output if log_probs is None else {**output, "rollout_log_probs": log_probs.cpu()}
