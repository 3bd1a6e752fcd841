"""Judges for the speculative decoder: each decides which mismatches between draft and target are accepted.

A judge maps a Block to a bool tensor [B, g], True = accept. It rules on every position as if all before it had been
accepted; the decoder keeps the leading accepts and accepts matches whatever the judge says.
"""

import math
import re
from collections.abc import Callable
from typing import Any

import torch

from recipe.spd.data.blocks import Block, Judge
from recipe.spd.scorer.model import ScoringActor

NEVER = -1e9  # a statistic below every threshold, and a number in JSON
TYPICAL = 0.3  # eps / delta, as in the published pair: eps 0.09, delta 0.3
FIGURE = re.compile(r"[\d+*/=<>^%×÷−-]")


def exact() -> Judge:
    """Reject every mismatch: the target's own greedy text."""
    return lambda block: torch.zeros_like(block.mismatch)


def accept_all() -> Judge:
    """Accept every mismatch: the draft's text with a target token every gamma + 1."""
    return lambda block: torch.ones_like(block.mismatch)


def random_share(share: float, seed: int) -> Judge:
    """Accept each mismatch with probability `share`; equal seeds give equal runs."""
    if not 0.0 <= share <= 1.0:
        raise ValueError(f"share={share} is not a probability; expected 0 to 1")
    generator = torch.Generator().manual_seed(seed)

    def judge(block: Block) -> torch.Tensor:
        draw = torch.rand(block.draft_ids.shape, generator=generator)
        return (draw < share).to(block.draft_ids.device)

    return judge


def margin(threshold: float) -> Judge:
    """Accept if the target's largest logit exceeds the draft token's by at most `threshold`."""

    return lambda block: _gap(block) <= threshold


def top_rank(count: int, gap: float = math.inf) -> Judge:
    """Accept if the draft token is among the target's `count` most likely, its logit within `gap` of the largest."""
    within = margin(gap)

    return lambda block: (_rank(block) < count) & within(block)


def deferred(entropy: float, window: int, end_ids: frozenset[int] = frozenset()) -> Judge:
    """FLy's rule (Li et al. 2025): accept where the target's entropy in nats exceeds `entropy`, and the target then
    agrees with the next `window` drafted tokens; at the end of a block with those that are left, as before an end token
    of the draft.
    """
    return above(deferred_entropy(window, end_ids), entropy)


def deferred_entropy(window: int, end_ids: frozenset[int] = frozenset()) -> Callable[[Block], torch.Tensor]:
    """What `deferred` compares with its entropy, [B, g] of a Block."""

    def value(block: Block) -> torch.Tensor:
        ended = torch.isin(block.draft_ids, torch.tensor(sorted(end_ids), device=block.draft_ids.device)).cumsum(-1) > 0
        differs, later = block.mismatch.clone(), torch.zeros_like(block.mismatch)
        differs[:, 1:] &= ~ended[:, :-1]  # what follows an end token is never read
        for step in range(1, window + 1):
            later[:, :-step] |= differs[:, step:]
        return _entropy(block).masked_fill(later, NEVER)

    return value


def typical(eps: float, delta: float) -> Judge:
    """Typical acceptance (Cai et al. 2024, Medusa): accept if p_target(d) > min(eps, delta * exp(-entropy))."""

    def judge(block: Block) -> torch.Tensor:
        limit = (delta * torch.exp(-_entropy(block))).clamp(max=eps)
        return _at(block.target_logits[:, :-1].softmax(-1), block.draft_ids) > limit

    return judge


def divergence(threshold: float, *, strict: bool = False, confident: float = 0.9) -> Judge:
    """Accept if KL(draft || target) in nats is below `threshold`.

    `strict` demands an exact match wherever the target's most likely token has a probability above `confident`.
    """

    def judge(block: Block) -> torch.Tensor:
        accept = _divergence(block) < threshold
        if strict:
            accept &= ~_is_confident(block, confident)
        return accept

    return judge


def entropy(threshold: float) -> Judge:
    """Accept where the target's entropy in nats exceeds `threshold`: FLy's rule (see `deferred`) without a window."""
    return deferred(threshold, 0)


def words(figures: torch.Tensor) -> Judge:
    """Accept where neither the draft's token nor the target's is one of `figures` (bool [V], see `figure_ids`)."""

    def judge(block: Block) -> torch.Tensor:
        table = figures.to(block.draft_ids.device)
        return ~table[block.draft_ids] & ~table[block.target_ids[:, :-1]]

    return judge


def figure_ids(tokenizer: Any, size: int) -> torch.Tensor:
    """Bool [size]: tokens with a digit or an operator, and special tokens, such as the end of a turn."""
    special = {*tokenizer.all_special_ids, *tokenizer.added_tokens_decoder}
    texts = (tokenizer.decode([i]) if i < len(tokenizer) else "" for i in range(size))
    return torch.tensor([i in special or FIGURE.search(text) is not None for i, text in enumerate(texts)])


def _gap(block: Block) -> torch.Tensor:
    logits = block.target_logits[:, :-1]  # [B, g, V]
    return logits.amax(-1) - _at(logits, block.draft_ids)


def _rank(block: Block) -> torch.Tensor:
    logits = block.target_logits[:, :-1]
    return (logits > _at(logits, block.draft_ids)[..., None]).sum(-1)


def _entropy(block: Block) -> torch.Tensor:
    return torch.special.entr(block.target_logits[:, :-1].softmax(-1)).sum(-1)


def _is_confident(block: Block, confident: float = 0.9) -> torch.Tensor:
    return block.target_logits[:, :-1].softmax(-1).amax(-1) > confident


def _divergence(block: Block) -> torch.Tensor:
    log_p, log_q = block.target_logits[:, :-1].log_softmax(-1), block.draft_logits.log_softmax(-1)
    return (log_q.exp() * (log_q - log_p)).sum(-1)


def _typical(block: Block) -> torch.Tensor:
    """The largest eps with which `typical` accepts, where delta is eps / TYPICAL."""
    limit = (torch.exp(-_entropy(block)) / TYPICAL).clamp(max=1.0)
    return _at(block.target_logits[:, :-1].softmax(-1), block.draft_ids) / limit


STATISTICS: dict[str, Callable[[Block], torch.Tensor]] = {
    "margin": lambda block: -_gap(block),
    "probability": lambda block: _at(block.target_logits[:, :-1].log_softmax(-1), block.draft_ids),
    "typical": _typical,
    "top_rank": lambda block: -_rank(block).float(),
    "rank_margin": lambda block: -_gap(block).masked_fill(_rank(block) >= 3, -NEVER),
    "entropy": _entropy,
    "divergence": lambda block: -_divergence(block),
    "divergence_strict": lambda block: -_divergence(block).masked_fill(_is_confident(block), -NEVER),
}
"""What the rules above compare with a threshold, as [B, g] of a Block, larger where a rule rather accepts. The
thresholds of the rules in FALLING are its negative."""
FALLING = frozenset({"margin", "top_rank", "rank_margin", "divergence", "divergence_strict"})


def scorer(model: ScoringActor, threshold: float, **tokens: Any) -> Judge:
    """Accept where a scorer's z lies above `threshold`; `tokens` as `block_scores` takes them."""
    return above(model.block_scores(**tokens), threshold)


def above(z_of: Callable[[Block], torch.Tensor], threshold: float) -> Judge:
    """Accept where z [B, g] lies above `threshold`."""
    return lambda block: z_of(block) > threshold


def _at(values: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    """values [B, g, V] at ids [B, g] -> [B, g]."""
    return values.gather(-1, ids[..., None]).squeeze(-1)
