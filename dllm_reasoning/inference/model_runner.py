"""Forwards of ragged rows through any causal model: with a key/value cache that rolls back, or without one."""

from collections.abc import Sequence

import torch
from torch import nn

from dllm_reasoning.inference.commit_rules import Row
from dllm_reasoning.utils.attention import FULL, layer_kinds, rolling_problem, warn_once
from verl.models.kv_cache import Prefills, RowCache


class ModelRunner:
    """Computes the logits that follow each row's last committed token and its guesses.

    With a cache, a forward takes only the last committed token, the guesses, and committed tokens before them that were
    not fed as such (a rule that is not lossless); it overwrites what a wrong guess left in the cache.
    """

    def __init__(self, model: nn.Module, rows: int, slots: int, pad_token_id: int, use_cache: bool) -> None:
        self.model, self.pad = model, pad_token_id
        layers = model.config.get_text_config().num_hidden_layers
        self.cache = RowCache(rows, slots, layers) if use_cache and cacheable(model) else None

    def prefill(self, rows: list[Row], n: int = 1, prefills: Prefills | None = None) -> float:
        """Read all but the last token of each n-th row into the cache, for it and the n - 1 rows after it, or copy what
        `prefills` holds of them; returns the seconds of that earlier reading, else 0.

        The runner must have been made for len(rows) / n rows; afterwards it serves all of them.
        """
        if self.cache is None:
            return 0.0
        seconds = 0.0
        prompts = [row.tokens[:-1] for row in rows[::n]]
        width = max(map(len, prompts))
        if width:
            ids = torch.tensor([ids + [self.pad] * (width - len(ids)) for ids in prompts], device=self.model.device)
            if prefills is None:
                self.cache.read(self.model, ids)
            else:
                seconds = prefills.fill(self.model, ids, self.cache)
        self.cache.repeat_interleave(n)
        for row in rows:
            row.cached = len(row.tokens) - 1
        return seconds

    def logits(self, rows: list[Row], branch: Sequence[int] = ()) -> torch.Tensor:
        """Logits after each row's last committed token and after each of its guesses: [B, w, V], w the most guesses of
        a row plus one; columns beyond a row's own guesses mean nothing.

        With `branch`, m tokens, a copy of it is fed after each of these w tokens: [B, w (1 + m), V], of which columns
        k (1 + m) to k (1 + m) + m are those after token k itself and after the m tokens of its branch. A branch sees
        the text up to its token, and itself. Raises ValueError for a branch without a cache.
        """
        if branch and self.cache is None:
            raise ValueError("refine_iter=branch needs a key/value cache; use verify instead.")
        device = self.model.device
        starts = [0 if self.cache is None else min(row.cached, len(row.tokens) - 1) for row in rows]
        fed = [row.tokens[start:] + row.guesses for row, start in zip(rows, starts, strict=True)]
        width = max(map(len, fed))
        ids = torch.tensor([tokens + [self.pad] * (width - len(tokens)) for tokens in fed], device=device)
        slots = torch.arange(width, device=device) + torch.tensor(starts, device=device)[:, None]  # [B, width]
        # What lies beyond a row's limit, padding too, is never read: its position must only be one that the model has.
        limits = torch.tensor([[row.prompt_length + row.limit - 1] for row in rows], device=device)
        positions = torch.minimum(slots, limits)
        # A row's logits are `count` columns from its last committed token on; the model computes those of every row.
        firsts = [len(row.tokens) - 1 - start for row, start in zip(rows, starts, strict=True)]
        count = max(len(row.guesses) for row in rows) + 1
        computed = torch.arange(min(firsts), min(width, max(firsts) + count), device=device)
        if self.cache is None:
            lengths = torch.tensor([len(tokens) for tokens in fed], device=device)
            inputs = {"attention_mask": (slots < lengths[:, None]).long(), "use_cache": False}
        else:
            visible = None
            if branch:
                committed = torch.tensor([[len(row.tokens) - 1] for row in rows], device=device)
                slots, visible, places = _with_branches(slots, committed, count, len(branch))
                positions = torch.cat([positions, torch.minimum(places, limits)], dim=1)
                ids = torch.cat([ids, torch.tensor([*branch], device=device).repeat(len(rows), count)], dim=1)
                computed = torch.cat([computed, torch.arange(width, ids.shape[1], device=device)])
            mask = self.cache.announce(slots, self.model.dtype, visible)
            inputs = {"attention_mask": mask, "past_key_values": self.cache, "use_cache": True}
        logits = self.model(input_ids=ids, position_ids=positions, logits_to_keep=computed, **inputs).logits
        main, branches = logits.split([len(computed) - count * len(branch), count * len(branch)], dim=1)
        main = _columns_from(main, [first - min(firsts) for first in firsts], count)
        if not branch:
            return main
        return torch.cat([main[:, :, None], branches.unflatten(1, (count, -1))], dim=2).flatten(1, 2)


def _columns_from(logits: torch.Tensor, first: list[int], count: int) -> torch.Tensor:
    """[B, w, V] -> [B, count, V]: of row b the columns from first[b] on, beyond the end the last one again."""
    if not any(first):
        return logits[:, :count]
    device = logits.device  # that of the ids, unless the module is offloaded
    columns = torch.tensor(first, device=device)[:, None] + torch.arange(count, device=device)
    columns = columns.clamp(max=logits.shape[1] - 1)
    return logits.gather(1, columns.unsqueeze(-1).expand(-1, -1, logits.shape[-1]))


def _with_branches(
    slots: torch.Tensor, committed: torch.Tensor, count: int, length: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Lay out a forward over tokens at int64 `slots` [B, width], then `count` branches of `length` tokens, the j-th
    after position `committed` [B, 1] + j.

    Returns int64 slots [B, q], bool visible slots [B, q, span], q = width + count * length, and int64 positions
    [B, count * length] of the branches. Their slots lie after all others; later forwards overwrite them.
    """
    device, base = slots.device, int(slots.max()) + 1
    parent = torch.arange(count, device=device).repeat_interleave(length)  # [count * length]: number of the branch
    step = torch.arange(length, device=device).repeat(count)  # place in the branch
    after = (base + torch.arange(count * length, device=device)).expand(len(slots), -1)
    span = torch.arange(base + count * length, device=device)
    first = (base + parent * length)[:, None]
    own = (span >= first) & (span <= first + step[:, None])  # [count * length, span]
    text = span <= (committed + parent)[..., None]  # [B, count * length, span]
    visible = torch.cat([span <= slots[..., None], text | own], dim=1)
    return torch.cat([slots, after], dim=1), visible, committed + parent + 1 + step


def cacheable(model: nn.Module) -> bool:
    """Whether the cache works for the model: every layer attends to everything before. If not, warns once; ValueError
    if the model cannot run on such a cache at all."""
    name = type(model).__name__
    if problem := rolling_problem(model):
        raise ValueError(f"{name} {problem}, so its cache cannot drop wrong guesses; set use_cache=False (--no_cache "
                         "in the demo), which reads the full text in each forward; in training another "
                         "actor_rollout_ref.rollout.name, such as hf.")  # fmt: skip
    if layer_kinds(model.config) == {FULL}:
        return True
    warn_once(f"{name} has layers without full attention: each forward reads the full text, without a cache")
    return False
