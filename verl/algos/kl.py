"""Estimators of the KL divergence from log-probabilities, together with the controllers of its coefficient."""

from collections.abc import Callable, Mapping

import torch

from verl.utils.registry import Registry


def _k2(diff: torch.Tensor) -> torch.Tensor:
    return 0.5 * diff.square()


def _k3(diff: torch.Tensor) -> torch.Tensor:
    """exp(-d) - 1 + d, d clamped to +-20 and the result to 10, so that one outlier token cannot dominate the batch."""
    negative = (-diff).clamp(-20, 20)
    return (negative.exp() - negative - 1).clamp(-10, 10)


_ESTIMATORS: Registry[str, Callable[[torch.Tensor], torch.Tensor]] = Registry(
    "kl_penalty", "Each may be followed by '+' (gradient of k2)."
)
_ESTIMATORS |= {
    "kl": torch.clone, "k1": torch.clone, "abs": torch.abs, "mse": _k2, "k2": _k2, "low_var_kl": _k3, "k3": _k3,
}  # fmt: skip


def kl_penalty_forward(logprob: torch.Tensor, ref_logprob: torch.Tensor, kl_penalty: str) -> torch.Tensor:
    """Per-token estimate of KL(pi || ref) from samples of pi, d = logprob - ref_logprob. [B, T] x2 -> [B, T].

    k1 (`kl`): d; `abs`: |d|; k2 (`mse`): d^2 / 2; k3 (`low_var_kl`): exp(-d) - 1 + d
    (J. Schulman, Approximating KL Divergence, 2020).
    """
    if kl_penalty == "full":
        raise ValueError(
            "kl_penalty='full' needs the log-probabilities of the full vocabulary, which are never held here "
            "([tokens, vocab]); use 'low_var_kl', the low-variance estimate from the sampled tokens."
        )
    return _ESTIMATORS.find(kl_penalty)(logprob - ref_logprob)


def kl_penalty(logprob: torch.Tensor, ref_logprob: torch.Tensor, kl_penalty: str) -> torch.Tensor:
    """`kl_penalty_forward`; a name that ends in '+' keeps its value and takes the gradient of k2. [B, T] x2 -> [B, T].

    The expected gradient of k2 is that of the reverse KL; those of k1 (zero in expectation) and k3 are not.
    """
    if not kl_penalty.endswith("+"):
        return kl_penalty_forward(logprob, ref_logprob, kl_penalty)
    value = kl_penalty_forward(logprob, ref_logprob, kl_penalty[:-1]).detach()
    k2 = _k2(logprob - ref_logprob)
    return value + k2 - k2.detach()


class FixedKLController:
    """A coefficient that stays as it is."""

    def __init__(self, kl_coef: float) -> None:
        self.value = kl_coef

    def update(self, current_kl: float, n_steps: int) -> None:
        """Nothing to do; the trainer need not know which controller it holds."""

    def state_dict(self) -> dict[str, float]:
        return {"value": self.value}

    def load_state_dict(self, state: Mapping[str, float]) -> None:
        """The configured coefficient rules, also after a resume."""


class AdaptiveKLController(FixedKLController):
    """Moves the coefficient so that the measured KL stays near `target_kl` (arXiv 1909.08593, section 2.2)."""

    def __init__(self, init_kl_coef: float, target_kl: float, horizon: int) -> None:
        super().__init__(init_kl_coef)
        self.target = target_kl
        self.horizon = horizon

    def update(self, current_kl: float, n_steps: int) -> None:
        """value *= 1 + clip(current / target - 1, -0.2, 0.2) * n_steps / horizon."""
        error = min(max(current_kl / self.target - 1, -0.2), 0.2)
        self.value *= 1 + error * n_steps / self.horizon

    def load_state_dict(self, state: Mapping[str, float]) -> None:
        self.value = state["value"]


def get_kl_controller(kl_ctrl) -> FixedKLController:
    """The controller that `algorithm.kl_ctrl` names (fields type, kl_coef, target_kl, horizon)."""
    if kl_ctrl.type == "fixed":
        return FixedKLController(kl_coef=kl_ctrl.kl_coef)
    if kl_ctrl.type != "adaptive":
        raise ValueError(f"algorithm.kl_ctrl.type={kl_ctrl.type!r} is unknown. Known: fixed, adaptive.")
    for field in ("horizon", "target_kl"):
        if getattr(kl_ctrl, field) <= 0:
            raise ValueError(f"algorithm.kl_ctrl.{field}={getattr(kl_ctrl, field)} must be above 0 for type=adaptive.")
    return AdaptiveKLController(init_kl_coef=kl_ctrl.kl_coef, target_kl=kl_ctrl.target_kl, horizon=kl_ctrl.horizon)
