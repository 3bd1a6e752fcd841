"""Limits of the metrics `health/*`, the same for every run, and estimates of pass@k and best@k for these metrics."""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import groupby

import numpy as np


@dataclass(frozen=True)
class Rule:
    """A metric's limits. A value beyond them in `patience` logged steps in a row is a warning with the remedy."""

    metric: str
    meaning: str
    remedy: str
    low: float = -math.inf
    high: float = math.inf
    patience: int = 1

    def is_broken_by(self, value: float) -> bool:
        """Whether a value is beyond the limits; NaN is."""
        return not self.low <= value <= self.high

    @property
    def limits(self) -> str:
        """The limits in words."""
        bounds = {"at least": self.low, "at most": self.high}
        return " and ".join(f"{words} {bound:g}" for words, bound in bounds.items() if math.isfinite(bound))

    def warning(self, value: float) -> str:
        """One line for the log."""
        steps = f" for {self.patience} steps" if self.patience > 1 else ""
        return f"{self.meaning}: {self.metric}={value:.3g}{steps}, expected {self.limits}. {self.remedy}"

    def broken_steps(self, steps: Sequence[int], values: Iterable[float]) -> list[tuple[int, int]]:
        """(first, last) of each stretch of at least `patience` logged steps with values beyond the limits."""
        grouped = groupby(zip(steps, values, strict=True), lambda pair: self.is_broken_by(pair[1]))
        stretches = [[step for step, _ in pairs] for broken, pairs in grouped if broken]
        return [(stretch[0], stretch[-1]) for stretch in stretches if len(stretch) >= self.patience]


RULES = (
    Rule("health/groups_without_variance", "Most prompts have samples of equal reward, which give no gradient",
         "Use prompts of another difficulty, raise rollout.n, or leave such groups out, as DAPO does.", high=0.8,
         patience=5),
    Rule("health/pass_change", "Fewer prompts are solved by any of their samples than at the start of the run",
         "Samples have lost variety, or prompts are harder now: lower the learning rate, raise rollout.n, or raise "
         "actor.entropy_coeff.", low=-0.15, patience=5),
    Rule("health/first_ratio", "Before the first optimizer step the policy's ratio is not 1 on average",
         "The rollout's log-probs are those of another distribution (top_p, top_k, penalties) or of other weights: see "
         "docs/trust.md.", low=0.95, high=1.05),
    Rule("health/outside_clip_range", "Tokens are outside of the clip range before the first optimizer step",
         "Compute in the same precision in rollout and trainer, or use algorithm.rollout_correction.", high=0.05),
    Rule("health/effective_sample_size", "Few tokens carry most of the importance weight",
         "Rollout and trainer differ: see training/rollout_probs_diff_*, or use algorithm.rollout_correction.",
         low=0.5, patience=3),
    Rule("health/kept_mass", "top_p and top_k cut away much of the policy's probability",
         "Raise rollout.top_p or rollout.top_k: what is trained is the policy with these filters.", low=0.8,
         patience=3),
    Rule("health/staleness", "Samples come from older weights than those of the last update",
         "Turn rollout.skip_rollout off; look for a rollout that keeps its weights.", high=0),
    Rule("health/entropy_ratio", "The policy's entropy has collapsed",
         "Lower the learning rate, raise actor.entropy_coeff, or raise actor.clip_ratio_high.", low=0.1, patience=5),
    Rule("health/length_without_reward", "Answers grow while their reward does not",
         "Use actor.loss_agg_mode=token-mean, or let the reward penalise long answers.", high=1.5, patience=5),
    Rule("health/truncated", "Many answers are cut at the token limit, mostly without a reward",
         "Raise data.max_response_length, rollout.max_model_len if it is set, or leave cut answers out of the loss.",
         high=0.5, patience=5),
    Rule("health/repeated_answers_reward", "High rewards go to answers that several prompts have in common",
         "Read such samples in the report: the reward function may accept an answer that ignores the prompt.",
         high=0.5, patience=3),
    Rule("health/grad_norm_ratio", "The gradient is far larger than in the steps before",
         "Lower actor.optim.lr or actor.grad_clip; look at the step's samples (trainer.rollout_data_dir).", high=10),
    Rule("health/kl_ref_k3", "The policy is far from the reference policy",
         "Raise actor.kl_loss_coef or algorithm.kl_ctrl.kl_coef, or lower the learning rate.", high=0.5, patience=5),
)  # fmt: skip


def best_of(values: np.ndarray, k: int) -> np.ndarray:
    """Expected maximum of k different samples out of n: values [..., n], k <= n -> [...].

    Each of the n-choose-k subsets counts once: for values 0 and 1 this is pass@k = 1 - C(n-c, k) / C(n, k) with c
    ones. Drawing with replacement, or taking the maximum of all n, would be biased.
    """
    n = values.shape[-1]
    if not 1 <= k <= n:
        raise ValueError(f"best_of {k} of {n} samples: k must be 1 to {n}")
    # The i-th smallest value, i from 0, is the maximum of C(i, k-1) subsets.
    subsets = math.comb(n, k)
    weights = np.array([math.comb(i, k - 1) / subsets for i in range(n)])
    return np.sort(np.asarray(values, dtype=np.float64), axis=-1) @ weights


def best_of_groups(groups: Iterable[np.ndarray]) -> dict[int, float]:
    """{k: mean of `best_of` k over the groups [n] with at least k samples} for k = 1, 2, 4, ... and the largest n."""
    listed = list(groups)
    largest = max(map(len, listed), default=0)
    powers = {2**i for i in range(largest.bit_length())}  # those up to `largest`
    sizes = sorted(powers | {largest}) if largest else []
    return {k: float(np.mean([best_of(g, k) for g in listed if len(g) >= k])) for k in sizes}
