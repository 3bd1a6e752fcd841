"""Each rule against numbers worked out by hand."""

import math
from types import SimpleNamespace

import pytest
import torch

from recipe.spd.data.blocks import Block
from recipe.spd.scorer.auto import SCORERS
from scripts.spd_evaluation import rules
from tests.helpers.models import make_tokenizer


def block_of(target_p, draft_ids, draft_p=None, contexts=None):
    """One row or more: target_p [B, g + 1, V] and draft_p [B, g, V] probabilities, draft_ids [B, g]."""
    target_logits = torch.tensor(target_p).log()
    draft_ids = torch.tensor(draft_ids)
    batch, gamma = draft_ids.shape
    target_ids = target_logits.argmax(-1)
    draft_logits = torch.tensor(draft_p).log() if draft_p else torch.zeros(batch, gamma, target_logits.shape[-1])
    return Block(
        context_ids=contexts or [[1]] * batch,
        draft_ids=draft_ids,
        target_ids=target_ids,
        target_logits=target_logits + 3.0,  # a shift of all logits changes no rule
        draft_logits=draft_logits - 1.0,
        target_layers=[torch.arange(batch * (gamma + 1) * 2.0).view(batch, gamma + 1, 2)],
        mismatch=draft_ids != target_ids[:, :-1],
        rows=torch.arange(batch),
    )


# Position 0: t = 0, d = 1. Position 1: t = 2, d = 0. Position 2 is the bonus token's.
PROBABILITIES = [[[0.6, 0.3, 0.1], [0.02, 0.03, 0.95], [1 / 3, 1 / 3, 1 / 3]]]
BLOCK = block_of(PROBABILITIES, [[1, 0]])


@pytest.mark.parametrize(
    ("threshold", "expected"),
    [(0.69, [False, False]), (0.70, [True, False]), (3.86, [True, False]), (3.87, [True, True])],
)
def test_margin_is_the_logit_gap(threshold, expected):
    # log(.6 / .3) = 0.6931, log(.95 / .02) = 3.8607
    assert rules.margin(threshold)(BLOCK).tolist() == [expected]


def test_typical_acceptance_by_hand():
    # Entropies 0.898 and 0.232, so delta * exp(-H) = 0.3 * 0.4074 = 0.122 and 0.3 * 0.793 = 0.238: eps 0.09 decides.
    assert rules.typical(0.09, 0.3)(BLOCK).tolist() == [[True, False]]
    # With eps out of the way: 0.3 > 0.7 * 0.4074 = 0.285, not > 0.75 * 0.4074 = 0.306; 0.02 < both.
    assert rules.typical(1.0, 0.70)(BLOCK).tolist() == [[True, False]]
    assert rules.typical(1.0, 0.75)(BLOCK).tolist() == [[False, False]]
    # 0.02 > 0.025 * 0.793 = 0.0198, not > 0.026 * 0.793 = 0.0206
    assert rules.typical(1.0, 0.025)(BLOCK).tolist() == [[True, True]]
    assert rules.typical(1.0, 0.026)(BLOCK).tolist() == [[True, False]]
    assert rules.entropy(0.5)(BLOCK).tolist() == [[True, False]]
    assert rules.STATISTICS["probability"](BLOCK)[0].tolist() == pytest.approx([math.log(0.3), math.log(0.02)])


@pytest.mark.parametrize(("count", "gap", "expected"), [
    (1, math.inf, [False, False]), (2, math.inf, [True, False]), (3, math.inf, [True, True]),
    (3, 0.70, [True, False]), (2, 0.69, [False, False])])
def test_ranks_and_gaps_of_the_target_by_hand(count, gap, expected):
    # 0.3 is the second of 0.6, 0.3, 0.1; 0.02 the third of 0.95, 0.03, 0.02; gaps 0.693 and 3.861
    assert rules.top_rank(count, gap)(BLOCK).tolist() == [expected]


def test_a_mismatch_waits_for_the_target_to_agree_again():
    even = [0.5, 0.3, 0.2]  # entropy 1.03
    sure = [0.98, 0.01, 0.01]  # 0.11
    block = block_of([[even, even, sure, even, even, even]] * 2, [[1, 0, 1, 0, 1], [1, 0, 0, 0, 2]])
    assert block.mismatch.tolist() == [[True, False, True, False, True], [True, False, False, False, True]]
    # The window of 2 after the first token holds a mismatch in the first row only; the third token's target is sure.
    verdict = [[False, False, False, False, True], [True, True, False, False, True]]
    assert rules.deferred(0.5, 2)(block).tolist() == verdict
    assert rules.deferred(0.1, 1)(block)[0].tolist() == [True, False, True, False, True]
    assert rules.deferred(0.1, 9)(block)[:, 0].tolist() == [False, False]
    # The draft ends at its second token: only that one still counts in the window.
    assert rules.deferred(0.5, 2, frozenset([0]))(block)[0].tolist() == [True, True, False, True, True]


def test_divergence_is_kl_from_draft_to_target():
    drafted = [[[0.25, 0.5, 0.25], [0.9, 0.05, 0.05]]]
    block = block_of(PROBABILITIES, [[1, 0]], drafted)
    first = 0.25 * math.log(0.25 / 0.6) + 0.5 * math.log(0.5 / 0.3) + 0.25 * math.log(0.25 / 0.1)  # 0.2656
    second = 0.9 * math.log(0.9 / 0.02) + 0.05 * math.log(0.05 / 0.03) + 0.05 * math.log(0.05 / 0.95)  # 3.3043
    assert (round(first, 4), round(second, 4)) == (0.2656, 3.3043)
    for threshold, expected in [(0.265, [False, False]), (0.267, [True, False]), (3.305, [True, True])]:
        assert rules.divergence(threshold)(block).tolist() == [expected]
    # Strict: the target is .95 sure of its token at the second position.
    assert rules.divergence(9.0, strict=True)(block).tolist() == [[True, False]]
    assert rules.divergence(9.0, strict=True, confident=0.96)(block).tolist() == [[True, True]]


def test_what_rules_compare_decides_as_they_do():
    even, sure = [0.5, 0.3, 0.2], [0.98, 0.015, 0.005]
    block = block_of([[even, even, sure, even, even, even]], [[1, 2, 1, 0, 1]], [[[0.3, 0.3, 0.4]] * 5])
    values = {**rules.STATISTICS, "deferred": rules.deferred_entropy(1)}
    made = {"margin": rules.margin, "typical": lambda eps: rules.typical(eps, eps / 0.3), "top_rank": rules.top_rank,
            "rank_margin": lambda gap: rules.top_rank(3, gap), "entropy": rules.entropy,
            "deferred": lambda entropy: rules.deferred(entropy, 1), "divergence": rules.divergence,
            "divergence_strict": lambda nats: rules.divergence(nats, strict=True)}  # fmt: skip
    assert {*made, "probability"} == set(values) and rules.FALLING < set(made)
    for rule, judge in made.items():
        for threshold in (0.05, 0.25, 0.4, 0.6, 1.5, 2.5):
            accepts = values[rule](block) > (-threshold if rule in rules.FALLING else threshold)
            assert judge(threshold)(block).tolist() == accepts.tolist(), (rule, threshold)


def test_random_share_is_met_and_repeatable():
    big = SimpleNamespace(draft_ids=torch.zeros(1000, 10, dtype=torch.long))
    first, second = rules.random_share(0.3, seed=1)(big), rules.random_share(0.3, seed=1)(big)
    assert torch.equal(first, second)
    assert abs(first.float().mean().item() - 0.3) < 0.02  # 4 standard errors
    assert not torch.equal(first, rules.random_share(0.3, seed=2)(big))
    with pytest.raises(ValueError, match="share=1.5"):
        rules.random_share(1.5, seed=1)


class SpyScorer(torch.nn.Module):
    """Returns given scores, and keeps what it was asked."""

    def __init__(self, backbone, z):
        super().__init__()
        self.config = SimpleNamespace(backbone=backbone, context_tokens=500, state_layer=None)  # 500: without a cache
        self.z = torch.tensor(z)
        self.seen = None

    def block_scores(self, **tokens):
        return SCORERS[self.config.backbone].block_scores(self, **tokens)

    def score_features(self, hidden, draft_ids, target_ids, logits):
        self.seen = (hidden, draft_ids, target_ids)
        return self.z

    def forward(self, **inputs):
        self.seen = inputs
        return self.z


def test_head_scorer_reads_the_state_that_predicted_each_target_token():
    model = SpyScorer("target", [[1.5, 2.5]])
    judge = rules.scorer(model, 2.0, sep_token_id=0, pad_token_id=0, end_ids=frozenset())
    assert judge(BLOCK).tolist() == [[False, True]]
    hidden, draft_ids, target_ids = model.seen
    assert hidden.tolist() == [[[0.0, 1.0], [2.0, 3.0], [4.0, 5.0]]]  # the last is the state over draft token 2
    assert draft_ids.tolist() == [[1, 0]]
    assert target_ids.tolist() == [[0, 2]]


def test_text_scorer_reads_context_draft_and_target_by_hand():
    model = SpyScorer("own", [[1.0, -1.0], [-1.0, 1.0]])
    block = block_of(PROBABILITIES * 2, [[1, 0], [2, 2]], contexts=[[5, 6, 7], [8]])
    accept = rules.scorer(model, 0.0, sep_token_id=9, pad_token_id=4, end_ids=frozenset())(block)
    assert accept.tolist() == [[True, False], [False, True]]
    assert model.seen["input_ids"].tolist() == [
        [5, 6, 7, 9, 1, 0, 9, 0, 2, 0, 9],
        [4, 4, 8, 9, 2, 2, 9, 0, 2, 0, 9],
    ]
    assert model.seen["attention_mask"].tolist() == [[1] * 11, [0, 0] + [1] * 9]
    assert model.seen["position_ids"].tolist() == [list(range(11)), [0, 0] + list(range(9))]
    assert model.seen["spd_layout"].tolist() == [[0, 3, 4, 2, 7], [2, 1, 4, 2, 7]]


def test_text_scorer_shows_a_draft_up_to_its_end_token():
    model = SpyScorer("own", [[1.0, 1.0], [1.0, 1.0]])
    block = block_of(PROBABILITIES * 2, [[1, 0], [2, 2]], contexts=[[5, 6, 7], [8]])
    rules.scorer(model, 0.0, sep_token_id=9, pad_token_id=4, end_ids=frozenset([1]))(block)
    assert model.seen["input_ids"].tolist() == [[5, 6, 7, 9, 1, 9, 0, 2, 9], [8, 9, 2, 2, 9, 0, 2, 0, 9]]
    assert model.seen["spd_layout"].tolist() == [[0, 3, 4, 1, 6], [0, 1, 2, 2, 5]]
    # Every draft of the batch ends early: the scorer answers for one position, the decoder asks for two.
    short = SpyScorer("own", [[1.0]])
    judge = rules.scorer(short, 0.0, sep_token_id=9, pad_token_id=4, end_ids=frozenset([1]))
    assert judge(block_of(PROBABILITIES, [[1, 0]])).tolist() == [[True, False]]


def test_words_rejects_where_either_token_has_a_figure():
    # drafts 1 and 0 for targets 0 and 2
    assert rules.words(torch.tensor([False, False, True]))(BLOCK).tolist() == [[True, False]]
    assert rules.words(torch.tensor([True, False, False]))(BLOCK).tolist() == [[False, False]]


def test_figures_are_digits_operators_and_special_tokens():
    tokenizer = make_tokenizer()
    figures = rules.figure_ids(tokenizer, 70)
    flagged = {tokenizer.decode([i]) for i in range(len(tokenizer)) if figures[i]}
    assert {"7", "+", tokenizer.eos_token} <= flagged and not {"a", "b"} & flagged
    assert not figures[len(tokenizer) :].any()  # padding of the embeddings
