"""What rollouts that answer in tokens share: sampling settings, seeds of samples, the batch they give back."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from verl.protocol import DataProto
from verl.workers.config import RolloutConfig


@dataclass(frozen=True)
class Sampling:
    """How the next token is chosen; greedy ignores the filters. top_k -1 and top_p 1 turn a filter off."""

    greedy: bool
    temperature: float
    top_k: int
    top_p: float


def sampling_of(config: RolloutConfig, meta: dict[str, Any]) -> Sampling:
    """The sampling of a batch: the rollout's settings, those of val_kwargs for validation; meta_info wins."""
    base = config.val_kwargs if meta.get("validate") else config
    temperature = meta["temperature"] if "temperature" in meta and not meta.get("validate") else base.temperature
    do_sample = meta["do_sample"] if "do_sample" in meta else base.do_sample
    greedy = not do_sample or temperature == 0
    return Sampling(greedy, 1.0 if temperature == 0 else temperature, base.top_k, base.top_p)


def prompt_ids(prompts: DataProto) -> list[list[int]]:
    """The attended tokens of each left-padded prompt [B, P]."""
    rows = zip(prompts.batch["input_ids"], prompts.batch["attention_mask"].bool(), strict=True)
    return [ids[kept].tolist() for ids, kept in rows]


def sample_seeds(prompts: DataProto, n: int) -> list[list[int]]:
    """A seed below 2**56 for each of the n samples of each prompt: it depends on step, prompt and number alone."""
    step = prompts.meta_info["global_steps"] if "global_steps" in prompts.meta_info else 0
    columns, seeds = prompts.non_tensor_batch, []
    for i, ids in enumerate(prompt_ids(prompts)):
        known = columns["sample_index"][i] if "sample_index" in columns else ""
        identity = np.asarray(ids, dtype=np.int64).tobytes()
        digests = (hashlib.blake2b(identity + f"|{known}|{step}|{k}".encode(), digest_size=7) for k in range(n))
        seeds.append([int.from_bytes(digest.digest(), "big") for digest in digests])
    return seeds


def right_padded(rows: Sequence[Sequence], length: int, value: float, dtype: torch.dtype) -> torch.Tensor:
    """[len(rows), length] of `dtype`, filled up with `value` behind each row."""
    filled = torch.full((len(rows), length), value, dtype=dtype)
    for i, row in enumerate(rows):
        filled[i, : len(row)] = torch.tensor(row, dtype=dtype)
    return filled


def answered(
    prompts: DataProto, n: int, responses: torch.Tensor, mask: torch.Tensor, log_probs: torch.Tensor | None
) -> dict[str, torch.Tensor]:
    """Prompts [B, P] with their responses [B*n, R], those of one prompt adjacent, as the batch a rollout gives back.

    mask [B*n, R] int64 is 1 on answered tokens; log_probs [B*n, R] float32. Gives prompts [B*n, P], responses,
    response_mask, input_ids, attention_mask, position_ids [B*n, P+R], and rollout_log_probs where given, on the CPU.
    """
    ids, seen, places = (
        prompts.batch[key].cpu().repeat_interleave(n, 0) for key in ("input_ids", "attention_mask", "position_ids")
    )
    responses, mask = responses.cpu(), mask.cpu()
    steps = torch.arange(1, responses.shape[1] + 1)
    found = {
        "prompts": ids,
        "responses": responses,
        "response_mask": mask,
        "input_ids": torch.cat([ids, responses], 1),
        "attention_mask": torch.cat([seen, mask], 1),
        "position_ids": torch.cat([places, places[:, -1:] + steps], 1),
    }
    return found if log_probs is None else {**found, "rollout_log_probs": log_probs.cpu()}
