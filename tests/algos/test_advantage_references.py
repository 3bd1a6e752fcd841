"""Every advantage estimator against its paper's formula, written out sample by sample and token by token.

The references know nothing of tensors: they read numbers, one sample and one token at a time. Conventions that no
paper fixes, taken from the estimators' docstrings: a sample alone in its group has baseline 0; a token that is not
counted (a tool's answer within the response) is no step of the trajectory; standard deviations are the unbiased ones.
"""

import math
from dataclasses import dataclass, field
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from tests.helpers.algo_batches import counted, junk_outside, masks, normal, seeds
from verl.trainer.ppo.core_algos import AdvantageEstimator, estimate_advantages

# What keeps a division by a deviation of 0 apart, in no paper's formula: added to a group's deviation, and to a batch's
# variance under the root.
EPSILON = 1e-6
WHITEN = 1e-8


@dataclass
class Case:
    """One batch: rewards, mask, values [B, T]; groups, greedy [B]; numbers of the algorithm."""

    rewards: Tensor
    mask: Tensor
    values: Tensor
    groups: list[int]
    by_uid: bool
    greedy: Tensor
    gamma: float
    lam: float
    by_std: bool
    positions: list[list[int]] = field(init=False)
    scores: list[float] = field(init=False)

    def __post_init__(self):
        self.positions = counted(self.mask)
        self.scores = [sum(float(self.rewards[i, t]) for t in ts) for i, ts in enumerate(self.positions)]

    def others(self, i: int) -> list[int]:
        """Samples of i's group without i."""
        return [j for j, group in enumerate(self.groups) if group == self.groups[i] and j != i]

    def group(self, i: int) -> list[int]:
        return [j for j, group in enumerate(self.groups) if group == self.groups[i]]

    def inputs(self) -> dict:
        return {
            "token_level_rewards": self.rewards, "response_mask": self.mask, "gamma": self.gamma, "lam": self.lam,
            "values": self.values, "reward_baselines": self.greedy, "norm_adv_by_std_in_grpo": self.by_std,
            "config": SimpleNamespace(gamma=self.gamma), "old_log_probs": self.rewards, "ref_log_prob": self.values,
            "index": np.array([f"u{g}" for g in self.groups], dtype=object) if self.by_uid else np.array(self.groups),
        }  # fmt: skip


@st.composite
def cases(draw, pairs: bool = False) -> Case:
    """`pairs`: every group has at least two samples."""
    if pairs:
        sizes = draw(st.lists(st.integers(2, 4), min_size=1, max_size=3))
        groups = draw(st.permutations([g for g, size in enumerate(sizes) for _ in range(size)]))
    else:
        groups = draw(st.lists(st.integers(0, 2), min_size=1, max_size=7))
    mask = draw(masks(rows=len(groups)))
    rewards = normal(draw(seeds), *mask.shape)
    if draw(st.booleans()):  # a verdict of 0 or 1 on the last counted token: ties, and groups without a spread
        rewards = torch.zeros_like(rewards)
        for i, positions in enumerate(counted(mask)):
            if positions:
                rewards[i, positions[-1]] = draw(st.integers(0, 1))
    unit = st.floats(0.0, 1.0)
    return Case(
        rewards * mask, mask, junk_outside(normal(draw(seeds), *mask.shape), mask), groups,
        draw(st.booleans()), normal(draw(seeds), len(groups)), draw(unit), draw(unit), draw(st.booleans()),
    )  # fmt: skip


def mean(numbers: list[float]) -> float:
    return sum(numbers) / len(numbers)


def deviation(numbers: list[float]) -> float:
    """Unbiased standard deviation."""
    centre = mean(numbers)
    return math.sqrt(sum((x - centre) ** 2 for x in numbers) / (len(numbers) - 1))


def on_every_token(case: Case, per_sample: list[float]) -> dict:
    return {(i, t): value for i, value in enumerate(per_sample) for t in case.positions[i]}


def normalised(tokens: dict) -> dict:
    """(A - mean(A)) / std(A) over all tokens of the batch; fewer than two tokens have no deviation."""
    values = list(tokens.values())
    if len(values) < 2:
        return dict.fromkeys(tokens, 0.0)
    centre, spread = mean(values), math.sqrt(deviation(values) ** 2 + WHITEN)
    return {place: (value - centre) / spread for place, value in tokens.items()}


def gae(case: Case) -> tuple[dict, dict]:
    """Eq. 16 of 1506.02438: A_t = sum_l (gamma lam)^l delta_{t+l}, delta_t = r_t + gamma V_{t+1} - V_t, V = 0 at
    the end; the value target is A_t + V_t; PPO normalises the advantages of a batch."""
    advantages, returns = {}, {}
    for i, ts in enumerate(case.positions):
        r, v = [float(case.rewards[i, t]) for t in ts], [float(case.values[i, t]) for t in ts] + [0.0]
        delta = [r[k] + case.gamma * v[k + 1] - v[k] for k in range(len(ts))]
        for k, t in enumerate(ts):
            discount = [(case.gamma * case.lam) ** step for step in range(len(ts) - k)]
            advantages[i, t] = sum(d * delta[k + step] for step, d in enumerate(discount))
            returns[i, t] = advantages[i, t] + v[k]
    return normalised(advantages), returns


def group_centred(case: Case) -> list[float]:
    """r_i - mean(r of the group)."""
    return [s - (mean([case.scores[j] for j in case.group(i)]) if case.others(i) else 0.0)
            for i, s in enumerate(case.scores)]  # fmt: skip


def grpo(case: Case) -> dict:
    """Section 4.1.2 of 2402.03300: A_it = (r_i - mean(r)) / std(r) over the group; epsilon guards the division.
    Without the deviation it is Dr. GRPO (2503.20783, eq. 1 less its std)."""
    out = []
    for i, centred in enumerate(group_centred(case)):
        guarded = deviation([case.scores[j] for j in case.group(i)]) + EPSILON if case.others(i) else 1.0
        out.append(centred / guarded if case.by_std else centred)
    return on_every_token(case, out)


def grpo_passk(case: Case) -> dict:
    """2503.19595, pass@k with k = the group's size: the reward of a group is its best sample's, and without sample i
    it is the best of the rest. So A_i = max(r) - max(r without i): the leader's lead, 0 for all others."""
    out = []
    for i, score in enumerate(case.scores):
        lead = max(case.scores[j] for j in case.group(i)) - max(case.scores[j] for j in case.others(i))
        spread = deviation([case.scores[j] for j in case.group(i)]) + EPSILON
        out.append(lead / spread if case.by_std else lead)
        assert lead == 0 or score == max(case.scores[j] for j in case.group(i))
    return on_every_token(case, out)


def rloo(case: Case) -> dict:
    """Section 3.3 of 2402.14740: r_i - 1/(k-1) sum over j != i of r_j."""
    return on_every_token(case, [
        score - (mean([case.scores[j] for j in case.others(i)]) if case.others(i) else 0.0)
        for i, score in enumerate(case.scores)
    ])  # fmt: skip


def opo(case: Case) -> dict:
    """2505.23585: the baseline of least variance, b = sum(l_j r_j) / sum(l_j) over the group, l = length."""
    out = []
    for i, score in enumerate(case.scores):
        lengths = {j: len(case.positions[j]) for j in case.group(i)}
        total = sum(lengths.values())
        alone = not case.others(i) or total == 0
        out.append(score - (0.0 if alone else sum(n * case.scores[j] for j, n in lengths.items()) / total))
    return on_every_token(case, out)


def gpg(case: Case) -> dict:
    """2504.02546: A_i = (r_i - mean(r)) / F_norm with F_norm = 1, and the accurate gradient estimate scales by
    alpha = B / (B - M), M = samples without a gradient (their group is all right or all wrong)."""
    silent = sum(abs(centred) < 1e-12 for centred in group_centred(case))
    alpha = len(case.scores) / max(len(case.scores) - silent, 1)
    return on_every_token(case, [alpha * centred for centred in group_centred(case)])


def reinforce_plus_plus(case: Case) -> tuple[dict, dict]:
    """2501.03262: the return of a token is what it and the later tokens earn (the score at the end less the KL of
    each), discounted; normalised by mean and deviation of the full batch."""
    returns = {}
    for i, ts in enumerate(case.positions):
        for k, t in enumerate(ts):
            returns[i, t] = sum(case.gamma**step * float(case.rewards[i, u]) for step, u in enumerate(ts[k:]))
    return normalised(returns), returns


def reinforce_plus_plus_baseline(case: Case) -> dict:
    """2501.03262, the variant with a baseline: r_i - mean(r of its group), normalised over the full batch."""
    return normalised(on_every_token(case, group_centred(case)))


def remax(case: Case) -> tuple[dict, dict]:
    """Algorithm 1 of 2310.10505: reward-to-go less the reward of the greedy answer to the same prompt."""
    returns = {(i, t): sum(float(case.rewards[i, u]) for u in ts if u >= t)
               for i, ts in enumerate(case.positions) for t in ts}  # fmt: skip
    return {place: value - float(case.greedy[place[0]]) for place, value in returns.items()}, returns


def opd(case: Case) -> dict:
    """2306.13649 with student samples: log teacher - log student of each sampled token."""
    return {(i, t): float(case.values[i, t] - case.rewards[i, t]) for i, ts in enumerate(case.positions) for t in ts}


REFERENCES = {
    "gae": gae, "grpo": grpo, "grpo_vectorized": grpo, "grpo_passk": grpo_passk, "rloo": rloo,
    "rloo_vectorized": rloo, "opo": opo, "gpg": gpg, "reinforce_plus_plus": reinforce_plus_plus,
    "reinforce_plus_plus_baseline": reinforce_plus_plus_baseline, "remax": remax, "opd": opd,
}  # fmt: skip


def test_every_estimator_has_a_reference():
    by_hand = {"gdpo", "optimal_token_baseline", "tir_optimal_token_baseline"}  # tests/algos/test_later_algorithms.py
    assert {*REFERENCES, *by_hand} == {estimator.value for estimator in AdvantageEstimator}


@pytest.mark.parametrize("name", sorted(REFERENCES))
@settings(max_examples=60)
@given(data=st.data())
def test_estimator_agrees_with_its_papers_formula(name, data):
    """Counted tokens hold the reference's numbers; the others have no advantage."""
    case = data.draw(cases(pairs=name == "grpo_passk"))
    expected = REFERENCES[name](case)
    advantages, returns = estimate_advantages(name, case.inputs())
    assert advantages.dtype == returns.dtype == torch.float64
    assert torch.isfinite(advantages).all() and advantages[case.mask == 0].abs().sum() == 0
    pairs = zip((advantages, returns), expected if isinstance(expected, tuple) else (expected, expected), strict=True)
    for got, want in pairs:
        assert {place: got[place].item() for place in want} == pytest.approx(want, rel=1e-10, abs=1e-10)


@pytest.mark.parametrize(("name", "expected"), [("remax", [1.5, 1.0]), ("reinforce_plus_plus", [1.0, 1.0])])
def test_rewards_of_uncounted_tokens_are_no_part_of_a_return(name, expected):
    inputs = {
        "token_level_rewards": torch.tensor([[0.5, 7.0, 1.0]]), "response_mask": torch.tensor([[1, 0, 1]]),
        "reward_baselines": torch.tensor([0.5]), "config": SimpleNamespace(gamma=0.5),
    }  # fmt: skip
    advantages, returns = estimate_advantages(name, inputs)
    assert returns[0, ::2].tolist() == expected and advantages[0, 1] == 0


def test_what_an_estimator_cannot_do_without_is_named():
    groups = np.array(["a", "a", "b"], dtype=object)
    inputs = {"token_level_rewards": torch.ones(3, 2), "response_mask": torch.ones(3, 2), "index": groups}
    with pytest.raises(ValueError, match="rollout.n >= 2"):
        estimate_advantages("grpo_passk", inputs)
    with pytest.raises(ValueError, match="adv_estimator='gae' needs values"):
        estimate_advantages("gae", {**inputs, "gamma": 1.0, "lam": 1.0})
