"""Acceptance of draft tokens that changes the sampled distribution in a known way.

A draft token x ~ q is kept with probability a(x); otherwise a token is drawn from the residual r. The emitted token has
the behaviour distribution b(x) = q(x) a(x) + (1 - sum_y q(y) a(y)) r(x), which is known for every x, so that
importance weights p(x) / b(x) make estimates under the target p unbiased.

With lenience l >= 1, a(x) = min(1, l p(x) / q(x)) and r = max(p - q, 0) / sum_y max(p(y) - q(y), 0). l = 1 is exact
speculative sampling (arXiv 2211.17192, theorem 1), where b = p; larger l keeps more drafts.
"""

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class LenientAcceptance:
    """The rule for rows of target and draft probabilities, p and q: [N, V] float, each row sums to 1.

    accept [N, V]: probability of keeping a draft token; residual [N, V]: distribution of what replaces it; behaviour
    [N, V]: distribution of the emitted token.
    """

    accept: Tensor
    residual: Tensor
    behaviour: Tensor

    @classmethod
    def of(cls, target: Tensor, draft: Tensor, lenience: float) -> "LenientAcceptance":
        """ValueError for a lenience below 1, which would reject what exact sampling keeps."""
        if lenience < 1:
            raise ValueError(f"lenience={lenience} is below 1; 1 is exact speculative sampling.")
        kept = torch.minimum(draft, lenience * target)  # q a
        missing = (target - draft).clamp(min=0)
        total = missing.sum(-1, keepdim=True)
        residual = torch.where(total > 0, missing / total.clamp(min=torch.finfo(total.dtype).tiny), target)
        accept = torch.where(draft > 0, kept / draft.clamp(min=torch.finfo(draft.dtype).tiny), 1.0)
        behaviour = kept + (1 - kept.sum(-1, keepdim=True)).clamp(min=0) * residual
        return cls(accept, residual, behaviour)
