"""Forwards of ragged rows through any causal model: with a key/value cache that rolls back, or without one."""

from collections.abc import Sequence

import torch
from torch import nn

from dllm_reasoning.inference.commit_rules import Row
from dllm_reasoning.utils.attention import FULL, layer_kinds, rolling_problem, warn_once
from verl.utils.kv_cache import RowCache


class ModelRunner:
    """Computes the logits that follow each row's last committed token and its guesses.

    With a cache, a forward takes only the last committed token, the guesses, and committed tokens before them that were
    not fed as such (a rule that is not lossless); it overwrites what a wrong guess left in the cache.
    """

    def __init__(self, model: nn.Module, rows: int, slots: int, pad_token_id: int, use_cache: bool) -> None:
        self.model, self.pad = model, pad_token_id
        layers = model.config.get_text_config().num_hidden_layers
        self.cache = RowCache(rows, slots, layers) if use_cache and cacheable(model) else None

    def prefill(self, rows: list[Row], n: int) -> None:
        """Read all but the last token of each n-th row into the cache, for it and the n - 1 rows after it.

        The runner must have been made for len(rows) / n rows; afterwards it serves all of them.
        """
        if self.cache is None:
            return
        prompts = [row.tokens[:-1] for row in rows[::n]]
        width = max(map(len, prompts))
        if width:
            ids = torch.tensor([ids + [self.pad] * (width - len(ids)) for ids in prompts], device=self.model.device)
            positions = torch.arange(width, device=ids.device).expand_as(ids)
            mask = self.cache.announce(positions, self.model.dtype)
            self.model(input_ids=ids, position_ids=positions, attention_mask=mask, past_key_values=self.cache,
                       use_cache=True, logits_to_keep=1)  # fmt: skip
        self.cache.repeat_interleave(n)
        for row in rows:
            row.cached = len(row.tokens) - 1

    def logits(self, rows: list[Row], branch: Sequence[int] = ()) -> torch.Tensor:
        """[B, w (1 + m), V], w the most guesses of a row plus one, m the tokens of `branch`.

        `branch` is fed after the last committed token and after each guess, as if the text went on there: of each of
        these w tokens, 1 + m predictions stand together, after the token itself and after those of its branch. Without
        a branch, index 0 follows the row's last committed token.
        """
        device = self.model.device
        starts = [0 if self.cache is None else min(row.cached, len(row.tokens) - 1) for row in rows]
        fed = [row.tokens[start:] + row.guesses for row, start in zip(rows, starts, strict=True)]
        width = max(map(len, fed))
        ids = torch.tensor([f + [self.pad] * (width - len(f)) for f in fed], device=device)
        positions = torch.arange(width, device=device) + torch.tensor(starts, device=device)[:, None]  # [B, width]
        last = [len(row.tokens) - 1 - start for row, start in zip(rows, starts, strict=True)]  # column of that token
        first, wide = min(last), max(len(row.guesses) for row in rows) + 1
        kept = torch.arange(first, min(width, max(last) + wide), device=device)
        if self.cache is None:
            lengths = torch.tensor([len(f) for f in fed], device=device)
            inputs = {"attention_mask": (positions < lengths[:, None]).long(), "use_cache": False}
        else:
            slots, visible = positions, None
            if branch:
                ends = torch.tensor([[len(row.tokens) - 1, row.prompt_length + row.limit - 1] for row in rows],
                                    device=device)  # fmt: skip
                slots, visible, positions = _with_branches(positions, *ends.split(1, dim=1), wide, len(branch))
                ids = torch.cat([ids, torch.tensor([*branch], device=device).repeat(len(rows), wide)], dim=1)
                kept = torch.cat([kept, torch.arange(width, ids.shape[1], device=device)])
            mask = self.cache.announce(slots, self.model.dtype, visible)
            inputs = {"attention_mask": mask, "past_key_values": self.cache, "use_cache": True}
        logits = self.model(input_ids=ids, position_ids=positions, logits_to_keep=kept, **inputs).logits
        straight, branches = logits.split([len(kept) - wide * len(branch), wide * len(branch)], dim=1)
        if all(column == first for column in last):
            straight = straight[:, :wide]
        else:
            columns = torch.tensor(last, device=device)[:, None] - first + torch.arange(wide, device=device)
            # Nothing reads beyond a row's own guesses. The module may be offloaded: its logits are then elsewhere.
            columns = columns.clamp(max=straight.shape[1] - 1).to(logits.device)
            straight = straight.gather(1, columns.unsqueeze(-1).expand(-1, -1, logits.shape[-1]))
        if not branch:
            return straight
        return torch.cat([straight[:, :, None], branches.unflatten(1, (wide, -1))], dim=2).flatten(1, 2)


def _with_branches(
    positions: torch.Tensor, last: torch.Tensor, limit: torch.Tensor, wide: int, length: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Slots [B, q], visible slots [B, q, span] and positions [B, q] of a forward over tokens at `positions` [B, width],
    then `wide` branches of `length` tokens, the j-th after position `last` [B, 1] + j.

    Branches lie behind all other slots, which later forwards overwrite. `limit` [B, 1]: the last position of a row's
    answer, beyond which no token is kept.
    """
    device, count, base = positions.device, len(positions), int(positions.max()) + 1
    after, step = torch.arange(wide, device=device).repeat_interleave(length), torch.arange(length, device=device)
    step = step.repeat(wide)
    slots = torch.cat([positions, (base + torch.arange(wide * length, device=device)).expand(count, -1)], dim=1)
    span = torch.arange(base + wide * length, device=device)
    own = (span >= base + (after * length)[:, None]) & (span <= (base + after * length + step)[:, None])
    shared = span <= (last + after)[..., None]  # [B, wide * length, span]
    visible = torch.cat([span <= positions[..., None], shared | own], dim=1)
    return slots, visible, torch.cat([positions, torch.minimum(last + after + 1 + step, limit)], dim=1)


def cacheable(model: nn.Module) -> bool:
    """Whether the cache works for the model: every layer attends to everything before. If not, warns once; ValueError
    if the model cannot run on such a cache at all."""
    name = type(model).__name__
    if problem := rolling_problem(model):
        raise ValueError(f"{name} {problem}, so its cache cannot drop wrong guesses; set use_cache=False (--no_cache "
                         "in the demo), which reads the full text in each forward.")  # fmt: skip
    if layer_kinds(model.config) == {FULL}:
        return True
    warn_once(f"{name} has layers without full attention: each forward reads the full text, without a cache")
    return False
