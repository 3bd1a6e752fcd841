"""Muon in float32 with equal shapes batched: torch.optim.Muon works in bfloat16, far slower on most CPUs."""

from collections.abc import Callable, Iterable

import torch
from torch import Tensor, nn

NEWTON_SCHULZ = (3.4445, -4.7750, 2.0315)
NEWTON_SCHULZ_STEPS = 5


class Muon(torch.optim.Optimizer):
    """Momentum whose update is orthogonalised (Jordan et al. 2024); for matrices only, without weight decay.

    `each` maps a function over the shapes, like the built-in: a thread pool's map takes them side by side.
    """

    def __init__(self, matrices: list[nn.Parameter], lr: float, momentum: float = 0.95,
                 each: Callable[..., Iterable] = map):
        wrong = [tuple(p.shape) for p in matrices if p.ndim != 2]
        if wrong:
            raise ValueError(f"Muon takes matrices, got shapes {wrong}; give the others to AdamW")
        super().__init__(matrices, {"lr": lr, "momentum": momentum})
        self.each = each

    def step(self) -> None:
        """One update; Nesterov momentum, scaled by sqrt(max(1, rows / columns))."""
        for group in self.param_groups:
            by_shape: dict[tuple[int, ...], list[nn.Parameter]] = {}
            for p in group["params"]:
                by_shape.setdefault(tuple(p.shape), []).append(p)
            list(self.each(lambda matrices, group=group: self._update(matrices, group), by_shape.values()))

    @torch.no_grad()
    def _update(self, matrices: list[nn.Parameter], group: dict) -> None:
        """Step matrices of one shape."""
        gradient = torch.stack([p.grad for p in matrices])
        state = self.state[matrices[0]]
        if "momentum" not in state:
            state["momentum"] = torch.zeros_like(gradient)
        state["momentum"].lerp_(gradient, 1 - group["momentum"])
        update = orthogonalise(gradient.lerp(state["momentum"], group["momentum"]))
        rows, columns = matrices[0].shape
        scale = group["lr"] * max(1.0, rows / columns) ** 0.5
        for p, u in zip(matrices, update, strict=True):
            p.sub_(u, alpha=scale)


def orthogonalise(x: Tensor) -> Tensor:
    """Nearest semi-orthogonal matrix of each, roughly, by Newton-Schulz. [N, R, C] -> [N, R, C]."""
    a, b, c = NEWTON_SCHULZ
    tall = x.shape[-2] > x.shape[-1]
    if tall:
        x = x.mT.contiguous()
    x = x / x.norm(dim=(-2, -1), keepdim=True).clamp_min(1e-7)
    for _ in range(NEWTON_SCHULZ_STEPS):
        gram = torch.bmm(x, x.mT)
        x = torch.baddbmm(x, torch.baddbmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return x.mT if tall else x
