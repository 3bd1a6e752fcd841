"""Draws accept/reject actions for drafted blocks and builds the hybrid contexts that they lead to."""

from collections.abc import Collection, Sequence
from dataclasses import dataclass

import numpy as np
import torch


def effective_lengths(accepted: torch.Tensor) -> torch.Tensor:
    """Leading accepts: bool [..., g] -> int64 [...]."""
    return accepted.long().cumprod(-1).sum(-1)


def sample_actions(z: torch.Tensor, draws: torch.Tensor | None, temperature: float) -> torch.Tensor:
    """Actions 0/1 int64 [B, n, g] from z [B, g]: Bernoulli(sigmoid(z / T)) by uniform draws [B, n, g].

    Without draws greedy: z > 0, [B, 1, g].
    """
    if draws is None:
        return (z > 0).long()[:, None]
    return (draws < torch.sigmoid(z / temperature)[:, None]).long()


def uniform_draws(
    seed: int, global_steps: int, sample_indices: Sequence[int], draft_lens: Sequence[int], n: int, width: int
) -> torch.Tensor:
    """Uniform numbers [B, n, width] float32 from (seed, step, sample_index) only: the same on any number of ranks."""
    # 1 is never below a probability: beyond the draft of a row all actions are 0.
    draws = np.ones((len(sample_indices), n, width), dtype=np.float32)
    for row, (index, g) in enumerate(zip(sample_indices, draft_lens, strict=True)):
        generator = np.random.Generator(np.random.Philox(np.random.SeedSequence([seed, global_steps, index])))
        draws[row, :, :g] = generator.random((n, g), dtype=np.float32)
    return torch.from_numpy(draws)


@dataclass(frozen=True)
class Hybrid:
    """H = context + d_1..d_L + t_{L+1}; cut at an accepted end token."""

    effective_len: int  # L
    tokens: tuple[int, ...]  # d_1..d_L and t_{L+1}, without an end token
    ended: bool  # an end token was reached: the answer needs no completion
    on_target_path: bool  # only matches were accepted: the target would have generated the same
    reached: int  # draft positions whose action affects H: up to and including the first rejection


def hybrid_of(
    draft_ids: Sequence[int], target_ids: Sequence[int], actions: Sequence[int], eos: Collection[int]
) -> Hybrid:
    """The hybrid of one judged block; target_ids has one id more than draft_ids, actions at least as many.

    Matches count as accepted whatever their action. Tokens after an accepted end token are dropped.
    """
    taken: list[int] = []
    on_path, reached, correction = True, len(draft_ids), target_ids[len(draft_ids)]
    for i, (drafted, chosen) in enumerate(zip(draft_ids, target_ids, strict=False)):
        if drafted != chosen:
            if not actions[i]:
                reached, correction = i + 1, chosen
                break
            on_path = False
        if drafted in eos:
            return Hybrid(len(taken) + 1, tuple(taken), True, on_path, i + 1)
        taken.append(drafted)
    ended = correction in eos
    return Hybrid(len(taken), tuple(taken if ended else [*taken, correction]), ended, on_path, reached)


def counted_positions(
    draft_ids: Sequence[int], target_ids: Sequence[int], reached: int, loss_positions: str
) -> list[int]:
    """1 where a position counts in the loss, [g]: mismatches up to the first rejection (`judged`), or `all`."""
    last = {"judged": reached, "all": len(draft_ids)}[loss_positions]
    return [int(i < last and d != t) for i, (d, t) in enumerate(zip(draft_ids, target_ids, strict=False))]
