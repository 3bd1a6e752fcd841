"""Lenient acceptance on enumerable vocabularies: its behaviour distribution, and unbiased policy gradients under it."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from verl.algos.acceptance import LenientAcceptance


def distributions(seed, rows=1, vocabulary=5):
    generator = torch.Generator().manual_seed(seed)
    logits = 2 * torch.randn(2, rows, vocabulary, generator=generator, dtype=torch.float64)
    return logits[0].softmax(-1), logits[1].softmax(-1)


def test_by_hand():
    target, draft = torch.tensor([[0.5, 0.3, 0.2]]), torch.tensor([[0.2, 0.2, 0.6]])
    exact = LenientAcceptance.of(target, draft, 1.0)
    torch.testing.assert_close(exact.accept, torch.tensor([[1.0, 1.0, 1 / 3]]))
    torch.testing.assert_close(exact.residual, torch.tensor([[0.75, 0.25, 0.0]]))
    torch.testing.assert_close(exact.behaviour, target)
    # q a = (0.2, 0.2, 0.4); the missing 0.2 goes to the first two tokens by 3 to 1
    lenient = LenientAcceptance.of(target, draft, 2.0)
    torch.testing.assert_close(lenient.accept, torch.tensor([[1.0, 1.0, 2 / 3]]))
    torch.testing.assert_close(lenient.behaviour, torch.tensor([[0.35, 0.25, 0.4]]))


@settings(max_examples=60)
@given(seed=st.integers(0, 10**6), lenience=st.floats(1, 50))
def test_the_behaviour_is_what_the_procedure_emits(seed, lenience):
    """Summed over every draft token, kept or replaced by every residual token."""
    target, draft = distributions(seed)
    rule, emitted = LenientAcceptance.of(target, draft, lenience), torch.zeros(5, dtype=torch.float64)
    for x in range(5):
        emitted[x] += draft[0, x] * rule.accept[0, x]
        emitted += draft[0, x] * (1 - rule.accept[0, x]) * rule.residual[0]
    torch.testing.assert_close(rule.behaviour[0], emitted, atol=1e-12, rtol=0)
    assert emitted.sum() == pytest.approx(1, abs=1e-12)
    kept, exact = ((draft * LenientAcceptance.of(target, draft, value).accept).sum() for value in (lenience, 1.0))
    assert kept >= exact - 1e-12


@pytest.mark.parametrize("lenience", [1.0, 1.5, 4.0])
def test_importance_weights_make_the_policy_gradient_unbiased(lenience):
    """Answers of two tokens over a vocabulary of 4, enumerated: the mean of the weighted estimator under the behaviour
    equals the gradient of the expected reward under the policy."""
    generator = torch.Generator().manual_seed(5)
    logits = torch.randn(5, 4, generator=generator, dtype=torch.float64).requires_grad_()  # rows: first, then by token
    drafts = torch.randn(5, 4, generator=generator, dtype=torch.float64).softmax(-1)
    reward = torch.randn(4, 4, generator=generator, dtype=torch.float64)
    log_p = logits.log_softmax(-1)
    joint = log_p[0][:, None] + log_p[1:]  # [first, second]
    exact = torch.autograd.grad((joint.exp() * reward).sum(), logits, retain_graph=True)[0]
    behaviour = LenientAcceptance.of(log_p.detach().exp(), drafts, lenience).behaviour
    b = behaviour[0][:, None] * behaviour[1:]
    weights = joint.detach().exp() / b
    estimate = torch.autograd.grad((b * weights * reward * joint).sum(), logits, retain_graph=True)[0]
    torch.testing.assert_close(estimate, exact, atol=1e-6, rtol=0)
    without = torch.autograd.grad((b * reward * joint).sum(), logits)[0]
    biased = (without - exact).abs().max() > 1e-2
    assert bool(biased) == (lenience > 1)  # leaving the weights out is exact only where b = p


def test_equal_distributions_keep_every_draft_and_lenience_is_checked():
    target, _ = distributions(3)
    rule = LenientAcceptance.of(target, target, 1.0)
    assert torch.equal(rule.accept, torch.ones_like(target)) and torch.allclose(rule.behaviour, target)
    with pytest.raises(ValueError, match="lenience=0.5 is below 1"):
        LenientAcceptance.of(target, target, 0.5)
