"""Forwards of ragged rows through any causal model: with a key/value cache that rolls back, or without one."""

from __future__ import annotations

import torch
from torch import nn

from dllm_reasoning.inference.commit_rules import Row
from dllm_reasoning.utils.attention import FULL, layer_kinds, rolling_problem
from dllm_reasoning.utils.logging_utils import warn_once
from verl.utils.kv_cache import RowCache


class Reader:
    """Logits behind each row's last committed token and its guesses.

    A cached row is read once: later forwards take its last committed token, the guesses, and committed tokens in front
    that were never fed as such (a rule that is not lossless); what a wrong guess left in the cache is written over.
    """

    def __init__(self, model: nn.Module, rows: list[Row], slots: int, pad_token_id: int, use_cache: bool) -> None:
        self.model, self.pad = model, pad_token_id
        self.device, self.dtype = model.device, model.dtype
        layers = model.config.get_text_config().num_hidden_layers
        self.cache = RowCache(len(rows), slots, layers) if use_cache and cacheable(model) else None

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


def cacheable(model: nn.Module) -> bool:
    """Whether the rolling cache is right for the model: every layer attends to everything before. Warns once where
    one does not; ValueError where the model cannot be fed with such a cache at all."""
    name = type(model).__name__
    if problem := rolling_problem(model):
        raise ValueError(f"{name} {problem}, so that no cache of it can drop wrong guesses; set use_cache=False "
                         "(--no_cache in the demo), which reads the whole text in each forward.")  # fmt: skip
    if layer_kinds(model.config) == {FULL}:
        return True
    warn_once(f"{name} has layers without full attention: each forward reads the whole text anew, without a cache")
    return False
