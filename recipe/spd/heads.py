"""The heads that give a drafted token its logit."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn

from recipe.spd.scoring_config import ScoringModelConfig


class ScoreHead(nn.Module):
    """LayerNorm -> Linear(H, H/4) -> GELU -> Linear(H/4, 1): a logit from the `own` backbone's state over t_i."""

    def __init__(self, hidden_size: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(hidden_size)
        self.inner = nn.Linear(hidden_size, hidden_size // 4)
        self.out = nn.Linear(hidden_size // 4, 1)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        """[B, g, H] -> [B, g]."""
        hidden = hidden.to(self.norm.weight.dtype)
        return self.out(F.gelu(self.inner(self.norm(hidden)))).squeeze(-1)


class PairHead(nn.Module):
    """H (4 + more) -> W -> W -> 1 over [h, d, t, h * (d - t), ...]: the state over the token before d_i (in the target
    the one that predicted t_i), the embeddings of d_i and t_i, then `more` further states.

    With tied embeddings the product sums to the logit of d_i over t_i, which a sum of layers learns slowly.
    """

    def __init__(self, hidden_size: int, width: int, more: int = 0) -> None:
        super().__init__()
        self.first = nn.Linear((4 + more) * hidden_size, width)
        self.second = nn.Linear(width, width)
        self.out = nn.Linear(width, 1)

    def forward(
        self, hidden: torch.Tensor, draft: torch.Tensor, target: torch.Tensor, *more: torch.Tensor
    ) -> torch.Tensor:
        """Three or more of [B, g, H] -> [B, g]. Each part at unit scale: embeddings may be far smaller than states."""
        dtype = self.first.weight.dtype
        h, d, t, *rest = (F.layer_norm(x.to(dtype), x.shape[-1:]) for x in (hidden, draft, target, *more))
        read = torch.cat([h, d, t, h * (d - t), *rest], dim=-1)
        return self.out(F.gelu(self.second(F.gelu(self.first(read))))).squeeze(-1)


def make_head(config: ScoringModelConfig) -> nn.Module:
    """A head of the kind and widths that `config` names."""
    return head_of(config.backbone, config.head_inputs, config.hidden_size, config.head_size)


def head_of(backbone: str, inputs: str, hidden_size: int, width: int) -> nn.Module:
    """The head of a backbone (own, target) that reads `inputs` (state, pair)."""
    if backbone == "target":
        return PairHead(hidden_size, width)
    return PairHead(hidden_size, width, more=1) if inputs == "pair" else ScoreHead(hidden_size)
