"""The heads of a scorer: one logit for each judged draft token."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn

MARGIN_MAX = 100.0  # of a finite feature for a forbidden draft token, whose logit is -inf
LOGIT_FEATURES, MARGIN = 2, 1  # number of `logit_features`, and which of them is the margin
MARGIN_WEIGHT = -0.2  # of the margin in a new LayerHead


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
    the one that predicted t_i), the embeddings of d_i and t_i, then `more` further states (0 or 1).

    With tied embeddings h * (d - t) sums to the logit difference of d_i and t_i, which linear layers learn slowly.
    `values`: numbers of each position (see `logit_features`) that follow the states.
    """

    def __init__(self, hidden_size: int, width: int, more: int = 0, values: int = 0) -> None:
        super().__init__()
        self.more, self.values = more, values
        self.first = nn.Linear((4 + more) * hidden_size + values, width)
        self.second = nn.Linear(width, width)
        self.out = nn.Linear(width, 1)

    def forward(
        self, hidden: torch.Tensor, draft: torch.Tensor, target: torch.Tensor, *more: torch.Tensor,
        values: torch.Tensor | None = None,
    ) -> torch.Tensor:  # fmt: skip
        """Three or more of [B, g, H], and values [B, g, V] -> [B, g]; states beyond `more` are ignored.

        All are normalised: embeddings may be far smaller than states.
        """
        dtype = self.first.weight.dtype
        h, d, t, *rest = (F.layer_norm(x.to(dtype), x.shape[-1:]) for x in (hidden, draft, target, *more[: self.more]))
        given = [] if values is None else [values.to(dtype)]
        features = torch.cat([h, d, t, h * (d - t), *rest, *given], dim=-1)
        return self.out(F.gelu(self.second(F.gelu(self.first(features))))).squeeze(-1)


class LayerHead(nn.Module):
    """3 H + values -> W -> 1 over the target's state over d_i after its last layer, and over the token before d_i and
    over d_i after an inner one, each normalised; plus a linear function of the values.

    The linear part starts as the margin rule, which a layer over thousands of states does not learn from a few thousand
    labels.
    """

    def __init__(self, hidden_size: int, width: int, values: int = 0) -> None:
        super().__init__()
        self.values = values
        self.first = nn.Linear(3 * hidden_size + values, width)
        self.out = nn.Linear(width, 1)
        self.direct = nn.Linear(values, 1, bias=False) if values else None
        if self.direct is not None:
            nn.init.zeros_(self.direct.weight)
            self.direct.weight.data[0, MARGIN] = MARGIN_WEIGHT

    def forward(
        self, hidden: torch.Tensor, draft: torch.Tensor, target: torch.Tensor, next_hidden: torch.Tensor,
        layer: torch.Tensor, next_layer: torch.Tensor, values: torch.Tensor | None = None,
    ) -> torch.Tensor:  # fmt: skip
        """Six of [B, g, H], of which the first three are ignored, and values [B, g, V] -> [B, g]."""
        dtype = self.first.weight.dtype
        parts = [F.layer_norm(x.to(dtype), x.shape[-1:]) for x in (next_hidden, layer, next_layer)]
        parts += [] if values is None else [values.to(dtype)]
        z = self.out(F.gelu(self.first(torch.cat(parts, dim=-1))))
        return (z if self.direct is None else z + self.direct(values.to(dtype))).squeeze(-1)


def logit_features(logits: torch.Tensor, draft_ids: torch.Tensor) -> torch.Tensor:
    """log(1 + x) of the target's entropy in nats, and of its largest logit less the draft token's.

    logits [..., V], draft_ids [...] -> [..., LOGIT_FEATURES] float32; a forbidden token's logit may be -inf.
    """
    logits = logits.float()
    entropy = torch.special.entr(logits.softmax(-1)).sum(-1)
    own = logits.gather(-1, draft_ids[..., None]).squeeze(-1)
    margin = (logits.amax(-1) - own).clamp(max=MARGIN_MAX)
    return torch.stack([entropy, margin], dim=-1).log1p()
