"""Muon for the matrices inside the layers, AdamW for everything else, as one optimizer of a trainer's config:

    optim.optimizer_impl=examples.muon optim.optimizer=MuonWithAdamW optim.lr=0.02

Muon: Jordan et al. 2024, https://kellerjordan.github.io/posts/muon. In float32: torch.optim.Muon works in bfloat16, far
slower on most CPUs, and takes matrices alone.
"""

from collections.abc import Callable, Iterable
from functools import partial

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.optim.adamw import adamw

NEWTON_SCHULZ = (3.4445, -4.7750, 2.0315)
NEWTON_SCHULZ_STEPS = 5
OUTSIDE = ("embed", "lm_head", "score")  # parts of the names of matrices outside the layers


class MuonWithAdamW(torch.optim.Optimizer):
    """Nesterov momentum, orthogonalised and scaled by sqrt(max(1, rows / columns)), for matrices; AdamW at `adamw_lr`
    for embeddings, output head and vectors. A schedule scales both rates alike.

    Sharded matrices (DTensor) are gathered for the step, each by all ranks. `each` maps a function over the shapes,
    like the built-in: a thread pool's map takes them side by side.
    """

    def __init__(
        self, named_parameters: Iterable[tuple[str, nn.Parameter]], lr: float = 0.02, weight_decay: float = 0.0,
        betas: tuple[float, float] = (0.9, 0.95), adamw_lr: float = 2e-3, momentum: float = 0.95,
        each: Callable[..., Iterable] = map,
    ) -> None:  # fmt: skip
        pairs = list(named_parameters)
        inside = [p for name, p in pairs if p.ndim == 2 and not any(part in name for part in OUTSIDE)]
        chosen = {id(p) for p in inside}
        others = [p for _, p in pairs if id(p) not in chosen]
        groups = [{"params": inside, "lr": lr, "muon": True, "momentum": momentum},
                  {"params": others, "lr": adamw_lr, "muon": False, "betas": tuple(betas)}]  # fmt: skip
        super().__init__([g for g in groups if g["params"]], {"lr": lr, "weight_decay": weight_decay})
        self.each = each

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:
        """One update of every parameter that has a gradient."""
        loss = None if closure is None else torch.enable_grad()(closure)()
        for group in self.param_groups:
            (self._muon if group["muon"] else self._adamw)(group)
        return loss

    def _muon(self, group: dict) -> None:
        by_shape: dict[tuple[int, ...], list[nn.Parameter]] = {}
        for p in group["params"]:
            if p.grad is not None:
                by_shape.setdefault(tuple(p.shape), []).append(p)
        list(self.each(partial(self._step_alike, group), by_shape.values()))

    @torch.no_grad()  # in each thread
    def _step_alike(self, group: dict, matrices: list[nn.Parameter]) -> None:
        """Step matrices of one shape, stacked: one call of each product for all."""
        update = orthogonalise(torch.stack([self._direction(p, group["momentum"]) for p in matrices]))
        rows, columns = matrices[0].shape
        scale = group["lr"] * max(1.0, rows / columns) ** 0.5
        for p, u in zip(matrices, update, strict=True):
            p.mul_(1 - group["lr"] * group["weight_decay"])
            p.sub_(_like(u, p), alpha=scale)

    def _direction(self, p: nn.Parameter, momentum: float) -> Tensor:
        """The full gradient with Nesterov momentum, [rows, columns]."""
        state = self.state[p]
        if not state:
            state["momentum_buffer"] = torch.zeros_like(p.grad)
        state["momentum_buffer"].lerp_(p.grad, 1 - momentum)
        ahead = p.grad.lerp(state["momentum_buffer"], momentum)
        return ahead.full_tensor() if isinstance(ahead, DTensor) else ahead

    def _adamw(self, group: dict) -> None:
        params = [p for p in group["params"] if p.grad is not None]
        for p in params:
            if not (state := self.state[p]):
                state.update(step=torch.zeros(()), exp_avg=torch.zeros_like(p), exp_avg_sq=torch.zeros_like(p))
        states = [[self.state[p][name] for p in params] for name in ("exp_avg", "exp_avg_sq", "step")]
        adamw(params, [p.grad for p in params], states[0], states[1], [], states[2], amsgrad=False,
              beta1=group["betas"][0], beta2=group["betas"][1], lr=group["lr"], weight_decay=group["weight_decay"],
              eps=1e-8, maximize=False)  # fmt: skip


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


def _like(full: Tensor, p: Tensor) -> Tensor:
    """A full matrix, sharded over the ranks like `p`."""
    if not isinstance(p, DTensor):
        return full
    return distribute_tensor(full, p.device_mesh, p.placements)
