"""Random inputs of the policy losses, with the parts that all their references are made of."""

import math
from collections.abc import Callable
from dataclasses import dataclass, field, replace

import pytest
import torch
from hypothesis import strategies as st
from torch import Tensor

from tests.helpers.algo_batches import counted, junk_outside, masks, normal, seeds
from verl.algos.aggregation import LOSS_AGG_MODES, StepCounts
from verl.algos.policy_loss import LossInputs, get_loss_fn
from verl.workers.config import ActorConfig, PolicyLossConfig


@dataclass
class Batch:
    """One mini-batch in float64 [B, T], junk where `mask` is 0, and the settings of the update."""

    old: Tensor
    log_prob: Tensor
    advantages: Tensor
    mask: Tensor
    weights: Tensor | None
    mode: str
    counts: StepCounts
    config: ActorConfig
    positions: list[list[int]] = field(init=False)
    places: list[tuple[int, int]] = field(init=False)

    def __post_init__(self):
        self.positions = counted(self.mask)
        self.places = [(i, t) for i, ts in enumerate(self.positions) for t in ts]

    def loss(self, name: str, log_prob: Tensor) -> Tensor:
        """The registered loss at `log_prob` [B, T]."""
        torch.manual_seed(0)  # clip_cov draws tokens
        return self.loss_and_metrics(name, log_prob)[0]

    def loss_and_metrics(self, name: str, log_prob: Tensor) -> tuple[Tensor, dict]:
        inputs = LossInputs(
            log_prob, self.old, self.advantages, self.mask, self.counts, rollout_is_weights=self.weights
        )
        return get_loss_fn(name)(inputs, replace(self.config, loss_agg_mode=self.mode))

    def aggregated(self, losses: dict, mode: str | None = None) -> Tensor:
        """One number from a loss a place: {(i, t): loss} -> scalar."""
        rows = [[losses[i, t] for t in ts] for i, ts in enumerate(self.positions)]
        width = self.counts.loss_scale_factor or self.mask.shape[1]
        return aggregated(rows, mode or self.mode, width)

    def each(self, rule: Callable[[int, int], Tensor]) -> dict:
        """The rule's loss at every counted place, times the rollout's importance weight there."""
        return {(i, t): rule(i, t) * (1.0 if self.weights is None else self.weights[i, t]) for i, t in self.places}


def aggregated(rows: list[list], mode: str, width: int) -> Tensor:
    """token-mean: DAPO (2503.14476, "token-level loss"); seq-mean-token-mean: GRPO (2402.03300, eq. 3);
    seq-mean-token-sum: the log-probability of a whole answer, as in RLOO (2402.14740); seq-mean-token-sum-norm:
    Dr. GRPO (2503.20783), sums over a constant; token-sum: no divisor. A row without a counted token is no answer."""
    rows = [row for row in rows if row]
    if not rows:
        return torch.zeros((), dtype=torch.float64)
    if mode == "token-sum":
        return sum(sum(row) for row in rows)
    if mode == "token-mean":
        return sum(sum(row) for row in rows) / sum(len(row) for row in rows)
    divisor = {"seq-mean-token-sum": lambda row: 1, "seq-mean-token-mean": len}.get(mode, lambda row: width)
    return sum(sum(row) / divisor(row) for row in rows) / len(rows)


def clip(x, low, high):
    return max(low, min(x, high))


def away_from(values: Tensor, kinks: list[float]) -> Tensor:
    """`values`, none of them within 1e-3 of a kink, where a difference quotient is no derivative."""
    for kink in kinks:
        values = torch.where((values - kink).abs() < 1e-3, values + 4e-3, values)
    return values


def value_and_gradient(function, log_prob: Tensor) -> tuple[float, Tensor]:
    """Value at `log_prob`, and the gradient there: 0 where nothing depends on it."""
    leaf = log_prob.clone().requires_grad_()
    value = function(leaf)
    if not value.requires_grad:
        return float(value), torch.zeros_like(leaf)
    return value.item(), torch.autograd.grad(value, leaf)[0]


def assert_agree(function, reference, at: Tensor) -> None:
    """Both functions have the same value and the same gradient at `at`."""
    got, gradient = value_and_gradient(function, at)
    want, expected = value_and_gradient(reference, at)
    assert got == pytest.approx(want, rel=1e-10, abs=1e-10)
    torch.testing.assert_close(gradient, expected, rtol=1e-9, atol=1e-10)


shares = st.sampled_from([0.0002, 0.25, 0.5])


@st.composite
def batches(draw, row_advantages: bool | None = None, row_weights: bool = False) -> Batch:
    """`row_advantages`: one advantage a row (None: either); `row_weights`: one importance weight a row, if any."""
    mask = draw(masks())
    seed = draw(seeds)
    low, high = draw(st.floats(0.05, 0.4)), draw(st.floats(0.05, 0.6))
    dual = draw(st.floats(1.8, 4.0))
    kinks = [math.log(1 - low), math.log(1 + high), math.log(dual), -low, high, 0.0]
    log_ratio = away_from(normal(seed, *mask.shape, scale=draw(st.sampled_from([0.1, 0.7]))), kinks)
    # a row's mean ratio is what GSPO clips: kept off the kinks as a whole
    means = (log_ratio * mask).sum(-1, keepdim=True) / mask.sum(-1, keepdim=True).clamp(min=1)
    log_ratio = away_from(log_ratio + away_from(means, kinks) - means, kinks)
    old = junk_outside(-normal(seed + 1, *mask.shape).abs(), mask)
    advantages = normal(seed + 2, *mask.shape)
    if draw(st.booleans()) if row_advantages is None else row_advantages:
        advantages = advantages[:, :1].expand(mask.shape).clone()
        advantages[draw(st.integers(0, mask.shape[0])) :] = 0.0  # a group without a spread
    weights = None
    if draw(st.booleans()):
        weights = normal(seed + 3, *mask.shape).exp()
        weights = weights[:, :1].expand(mask.shape) if row_weights else weights
    return Batch(
        old, old + junk_outside(log_ratio, mask), junk_outside(advantages, mask), mask, weights,
        draw(st.sampled_from(LOSS_AGG_MODES)),
        StepCounts(loss_scale_factor=draw(st.sampled_from([None, 7]))),
        ActorConfig(
            strategy="fsdp", ppo_micro_batch_size_per_gpu=1, rollout_n=1, clip_ratio_low=low, clip_ratio_high=high,
            clip_ratio_c=dual, tau_pos=draw(st.floats(0.5, 2.0)), tau_neg=draw(st.floats(0.5, 2.0)),
            policy_loss=PolicyLossConfig(
                clip_cov_lb=draw(st.sampled_from([-0.5, 0.1])), clip_cov_ub=draw(st.sampled_from([0.8, 5.0])),
                clip_cov_ratio=draw(shares), kl_cov_ratio=draw(shares), ppo_kl_coef=draw(st.floats(0.0, 1.0)),
            ),
        ),
    )  # fmt: skip
