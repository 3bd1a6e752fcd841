"""Forwards of ragged rows through any causal model: with a key/value cache that rolls back, or without one."""

from __future__ import annotations

import torch
from loguru import logger
from torch import nn

from dllm_reasoning.inference.commit_rules import Row
from verl.workers.rollout.spd.kv_cache import RowCache


class Reader:
    """Logits behind each row's last committed token and its guesses.

    A cached row is read once: later forwards take its last committed token, the guesses, and committed tokens in front
    that were never fed as such (a rule that is not lossless); what a wrong guess left in the cache is written over.
    """

    def __init__(self, model: nn.Module, rows: list[Row], slots: int, pad_token_id: int, use_cache: bool) -> None:
        self.model, self.pad = model, pad_token_id
        self.device, self.dtype = model.device, model.dtype
        layers = model.config.get_text_config().num_hidden_layers
        self.cache = RowCache(len(rows), slots, layers) if use_cache and full_attention(model) else None

    def logits(self, rows: list[Row]) -> torch.Tensor:
        """[B, w, V], w the most guesses of a row plus one; row i's last committed token stands at place 0."""
        starts = [0 if self.cache is None else min(row.known, len(row.tokens) - 1) for row in rows]
        fed = [row.tokens[start:] + row.guesses for row, start in zip(rows, starts, strict=True)]
        width = max(map(len, fed))
        ids = torch.tensor([f + [self.pad] * (width - len(f)) for f in fed], device=self.device)
        positions = torch.arange(width, device=self.device) + torch.tensor(starts, device=self.device)[:, None]
        at = [len(row.tokens) - 1 - start for row, start in zip(rows, starts, strict=True)]
        first, wide = min(at), max(len(row.guesses) for row in rows) + 1
        kept = torch.arange(first, min(width, max(at) + wide), device=self.device)
        if self.cache is None:
            lengths = torch.tensor([len(f) for f in fed], device=self.device)
            inputs = {"attention_mask": (positions < lengths[:, None]).long(), "use_cache": False}
        else:
            mask = self.cache.announce(positions, self.dtype)
            inputs = {"attention_mask": mask, "past_key_values": self.cache, "use_cache": True}
        found = self.model(input_ids=ids, position_ids=positions, logits_to_keep=kept, **inputs).logits
        if all(place == first for place in at):
            return found[:, :wide]
        columns = torch.tensor(at, device=self.device)[:, None] - first + torch.arange(wide, device=self.device)
        columns = columns.clamp(max=found.shape[1] - 1)  # behind a row's own guesses nobody looks
        return found.gather(1, columns.unsqueeze(-1).expand(-1, -1, found.shape[-1]))

    def drop_done(self, rows: list[Row]) -> list[Row]:
        """The rows that go on, moved to the front of the cache."""
        left = sum(not row.done for row in rows)
        holes = [i for i in range(left) if rows[i].done]
        sources = [i for i in range(left, len(rows)) if not rows[i].done]
        if self.cache is not None and holes:
            self.cache.move_rows(torch.tensor(sources), torch.tensor(holes))
        for hole, source in zip(holes, sources, strict=True):
            rows[hole] = rows[source]
        return rows[:left]


def full_attention(model: nn.Module) -> bool:
    """Whether every layer attends to everything before, as the rolling cache needs; warns where one does not."""
    described = model.config.get_text_config().to_dict()
    kinds = set(described.get("layer_types") or ())
    windowed = not kinds and described.get("sliding_window") and described.get("use_sliding_window", True)
    if kinds <= {"full_attention"} and not windowed:
        return True
    logger.warning("{} has layers without full attention: each forward reads the whole text anew, without a cache",
                   type(model).__name__)  # fmt: skip
    return False
