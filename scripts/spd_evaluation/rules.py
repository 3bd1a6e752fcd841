"""Judges for the speculative decoder: each decides which mismatches between draft and target are accepted.

A judge maps a Block to a bool tensor [B, g], True = accept. It rules on every position as if all before it had been
accepted; the decoder keeps the leading accepts and accepts matches whatever the judge says.
"""

from functools import partial
from typing import Any

import torch
from torch import nn

from recipe.spd.dataset import SPDInputData, cut_at_end
from recipe.spd.decoder import Block, Judge


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
    """Accept if the target's logit of its own token t exceeds the draft token's by at most `threshold`."""

    def judge(block: Block) -> torch.Tensor:
        logits = block.target_logits[:, :-1]  # [B, g, V]
        gap = logits.amax(-1) - _at(logits, block.draft_ids)
        return gap <= threshold

    return judge


def typical(eps: float, delta: float) -> Judge:
    """Typical acceptance (Cai et al. 2024, Medusa): accept if p_target(d) > min(eps, delta * exp(-entropy))."""

    def judge(block: Block) -> torch.Tensor:
        log_p = block.target_logits[:, :-1].log_softmax(-1)  # [B, g, V]
        entropy = -(log_p.exp() * log_p).sum(-1)
        limit = (delta * torch.exp(-entropy)).clamp(max=eps)
        return _at(log_p, block.draft_ids).exp() > limit

    return judge


def divergence(threshold: float, *, strict: bool = False, confident: float = 0.9) -> Judge:
    """Accept if KL(draft || target) in nats is below `threshold`.

    `strict` demands an exact match wherever the target's most likely token has a probability above `confident`.
    """

    def judge(block: Block) -> torch.Tensor:
        log_p = block.target_logits[:, :-1].log_softmax(-1)  # [B, g, V]
        log_q = block.draft_logits.log_softmax(-1)
        accept = (log_q.exp() * (log_q - log_p)).sum(-1) < threshold
        if strict:
            accept &= log_p.amax(-1).exp() <= confident
        return accept

    return judge


def head_scorer(model: nn.Module, threshold: float) -> Judge:
    """Accept where a `target` backbone scorer's z lies above `threshold`: it reads the verification's hidden states."""

    def judge(block: Block) -> torch.Tensor:
        z = model.score_features(block.target_hidden[:, :-1], block.draft_ids, block.target_ids[:, :-1])
        return z > threshold

    return judge


def text_scorer(
    model: nn.Module, threshold: float, *, sep_token_id: int, pad_token_id: int, end_ids: frozenset[int]
) -> Judge:
    """Accept where an `own` backbone scorer's z lies above `threshold`: one more forward over the full text."""

    def judge(block: Block) -> torch.Tensor:
        inputs = scorer_inputs(block, sep_token_id=sep_token_id, pad_token_id=pad_token_id, end_ids=end_ids)
        z = model(**inputs)  # [B, longest draft]
        verdict = torch.zeros_like(block.mismatch)
        verdict[:, : z.shape[1]] = z > threshold
        return verdict

    return judge


def scorer(model: nn.Module, threshold: float, **tokens: Any) -> Judge:
    """The judge that fits a loaded scorer's backbone (`model.config.backbone`); `tokens` as text_scorer takes them."""
    judges = {"target": head_scorer, "own": partial(text_scorer, **tokens)}
    if model.config.backbone not in judges:
        raise ValueError(f"the scorer's config says backbone={model.config.backbone!r}; known: {sorted(judges)}")
    return judges[model.config.backbone](model, threshold)


def scorer_inputs(
    block: Block, *, sep_token_id: int, pad_token_id: int, end_ids: frozenset[int]
) -> dict[str, torch.Tensor]:
    """[Context] SEP [Draft] SEP [Target] SEP of every row, left-padded to the longest.

    A draft is shown up to its first end token, as in the training data: nobody reads what follows. Returns the fields
    of SPDInputData.
    """
    pairs = zip(block.draft_ids.tolist(), block.target_ids.tolist(), strict=True)
    drafts, targets = zip(*(cut_at_end(draft, target, end_ids) for draft, target in pairs), strict=True)
    return SPDInputData.from_blocks(
        block.context_ids,
        drafts,
        targets,
        sep_token_id=sep_token_id,
        pad_token_id=pad_token_id,
        device=block.draft_ids.device,
    ).as_kwargs()


def _at(values: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    """values [B, g, V] at ids [B, g] -> [B, g]."""
    return values.gather(-1, ids[..., None]).squeeze(-1)
