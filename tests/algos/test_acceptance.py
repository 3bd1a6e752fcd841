"""Lenient acceptance on enumerable vocabularies: its behaviour distribution, and unbiased policy gradients under it."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import AutoModelForCausalLM

from tests.helpers.engines import make_actor, make_engine, weights_of
from tests.helpers.models import save_tiny_llama
from verl.algos.acceptance import LenientAcceptance
from verl.algos.rollout_correction import compute_rollout_correction_and_add_to_batch
from verl.config.algorithm import RolloutCorrectionConfig
from verl.protocol import DataProto


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


def gradient_of_an_update(path, batch, level):
    """What the actor's update subtracts from its weights at learning rate 1, with weights of `level` or none."""
    engine = make_engine(path, optim={"optimizer": "SGD", "lr": 1.0, "weight_decay": 0.0, "clip_grad": 1e6})
    actor = make_actor(engine, mini=len(batch), micro=9, grad_clip=1e6, loss_agg_mode="seq-mean-token-sum")
    batch.batch["old_log_probs"], _ = actor.compute_log_prob(batch)
    settings = RolloutCorrectionConfig(rollout_is=level, rollout_is_threshold=1e6)
    batch, _ = compute_rollout_correction_and_add_to_batch(batch, settings)
    before = weights_of(engine)
    actor.update_policy(batch)
    return {name: before[name] - weight for name, weight in weights_of(engine).items()}


@pytest.mark.parametrize("lenience", [1.0, 1.5, 4.0])
def test_importance_weights_make_the_update_that_of_the_exact_policy_gradient(tmp_path, lenience):
    """All answers of two tokens over 8 words, each counted as often as the behaviour emits it, through the rollout
    correction and the actor's update; against the gradient of the expected reward, in double precision.

    Weights of tokens leave the first tokens as the behaviour draws them: they are exact for answers of one token only.
    """
    words, generator = 8, torch.Generator().manual_seed(5)
    path = save_tiny_llama(tmp_path, vocab_size=words)
    model = AutoModelForCausalLM.from_pretrained(path)
    with torch.no_grad():
        model.lm_head.weight.mul_(8.0)  # uneven probabilities
    model.save_pretrained(path)
    model = model.double()
    prompt, answers = torch.tensor([5, 6, 7]), torch.cartesian_prod(*[torch.arange(words)] * 2)
    ids = torch.cat([prompt.expand(len(answers), -1), answers], 1)
    reward = 0.1 * torch.randn(len(answers), generator=generator, dtype=torch.float64)
    log_p = model(input_ids=ids).logits[:, 2:4].log_softmax(-1)  # [64, 2, 8]
    drafts = torch.randn(1 + words, words, generator=generator, dtype=torch.float64).softmax(-1)
    drafts = torch.stack([drafts[:1].expand(len(answers), -1), drafts[1 + answers[:, 0]]], 1)
    rule = LenientAcceptance.of(log_p.detach().exp().flatten(0, 1), drafts.flatten(0, 1), lenience)
    log_b = rule.behaviour.log().view_as(log_p).gather(-1, answers[..., None])[..., 0]
    answer = log_p.gather(-1, answers[..., None])[..., 0].sum(-1)
    (-(answer.exp() * reward).sum()).backward()
    exact = {name: parameter.grad.numpy() for name, parameter in model.named_parameters()}
    counted = len(answers) * log_b.sum(-1).exp() * reward  # the loss is a mean over the rows
    ones = torch.ones_like(ids)

    def error(level):
        batch = DataProto.from_dict(
            tensors={"input_ids": ids, "attention_mask": ones, "position_ids": ones.cumsum(-1) - 1,
                     "responses": answers, "response_mask": ones[:, 3:], "rollout_log_probs": log_b.float(),
                     "advantages": counted[:, None].expand(-1, 2).float()},
            meta_info={"temperature": 1.0},
        )  # fmt: skip
        gradient = gradient_of_an_update(path, batch, level)
        return max(abs(gradient[name] - exact[name]).max() for name in exact)

    assert max(abs(part).max() for part in exact.values()) > 0.02
    assert error("sequence") < 1e-6
    for level in ("token", None):  # exact only where b = p
        assert error(level) < 1e-6 if lenience == 1 else error(level) > 1e-4


def test_equal_distributions_keep_every_draft_and_lenience_is_checked():
    target, _ = distributions(3)
    rule = LenientAcceptance.of(target, target, 1.0)
    assert torch.equal(rule.accept, torch.ones_like(target)) and torch.allclose(rule.behaviour, target)
    with pytest.raises(ValueError, match="lenience=0.5 is below 1"):
        LenientAcceptance.of(target, target, 0.5)
