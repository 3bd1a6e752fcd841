"""An own scorer with a key/value cache scores every round of real decoding as one forward over the whole text does."""

import pytest
import torch
from transformers import AutoModelForCausalLM, MistralConfig, MistralForCausalLM

from recipe.spd.rollout.decoder import speculative_generate
from recipe.spd.scorer.cached_scorer import CachedScorer
from scripts.spd_evaluation import rules
from spd_scorer import AutoModelForSPDScoring, ScoringModelConfig, SPDInputData
from tests.helpers.models import save_tiny_llama

PROMPTS = [[5, 6, 7, 8], [9, 10], [11, 12, 13], [14] * 9, [20, 21, 22]]
TOKENS = {"sep_token_id": 3, "pad_token_id": 0}


@pytest.fixture(scope="module")
def pair(tmp_path_factory):
    root = tmp_path_factory.mktemp("pair")
    paths = [save_tiny_llama(root / name, seed=seed) for seed, name in enumerate(("target", "draft"))]
    return [AutoModelForCausalLM.from_pretrained(path).eval() for path in paths]


@pytest.mark.parametrize("kind", [
    {"attention": "causal"}, {"attention": "spd", "head_inputs": "pair"}, {"attention": "hybrid"},
    {"attention": "causal", "head_inputs": "pair", "lora_rank": 2},
], ids=lambda kind: "-".join(map(str, kind.values())))  # fmt: skip
def test_every_round_has_the_scores_of_a_whole_forward(pair, tiny_llama, kind):
    target, draft = pair
    config = ScoringModelConfig(base_model_path=tiny_llama, backbone="own", **kind)
    model = AutoModelForSPDScoring.from_config(config).eval()
    if config.lora_rank:  # new adapters change nothing
        for name, weight in model.backbone.named_parameters():
            if "lora_B" in name:
                torch.nn.init.normal_(weight, std=0.3)
    cached = CachedScorer(model, **TOKENS)
    fed, compared = [], 0
    model.backbone.register_forward_pre_hook(
        lambda module, args, kwargs: fed.append(kwargs["input_ids"].shape[1]), with_kwargs=True)

    def judge(block):
        nonlocal compared
        rows = block.rows.tolist()
        drafts, targets = block.draft_ids.tolist(), block.target_ids.tolist()
        drafts = [ids[: 2 + row % 3] for row, ids in zip(rows, drafts, strict=True)]  # as after an end token
        targets = [ids[: len(d) + 1] for ids, d in zip(targets, drafts, strict=True)]
        z = cached(rows, block.context_ids, drafts, targets, torch.device("cpu"))
        whole = model(**SPDInputData.from_blocks(block.context_ids, drafts, targets, **TOKENS).as_kwargs())
        torch.testing.assert_close(z, whole, atol=1e-5, rtol=1e-5)
        compared += int((z < 50).sum())
        # Rows advance, and end, at different rounds.
        return torch.tensor([[(row + i + len(c)) % 3 > 0 for i in range(4)] for row, c in
                             zip(rows, block.context_ids, strict=True)])

    limits = {"gamma": 4, "max_new_tokens": 30, "eos_token_id": [2, 30, 31], "batch_size": 3}
    speculative_generate(target, draft, PROMPTS, judge, **limits)
    assert compared > 50
    cached_calls = fed[::2]
    assert min(cached_calls) <= 4 + 5 + 3 + 5 < max(fed)  # what is new, not the whole text


def test_a_sliding_window_that_would_cut_a_context_is_refused(tmp_path):
    shape = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1,
             "num_attention_heads": 2, "num_key_value_heads": 1}
    MistralForCausalLM(MistralConfig(**shape, sliding_window=16)).save_pretrained(tmp_path)
    blocks = ([0], [list(range(5, 15))], [[7]], [[8, 9]], torch.device("cpu"))
    for attention in ("causal", "spd"):
        config = ScoringModelConfig(base_model_path=str(tmp_path), backbone="own", attention=attention)
        cached = CachedScorer(AutoModelForSPDScoring.from_config(config).eval(), **TOKENS)
        assert cached(*blocks).shape == (1, 1)  # 15 tokens
        longer = ([1], [list(range(5, 25))], *blocks[2:])
        if attention == "spd":  # its mask lets every token see the complete context
            assert cached(*longer).shape == (1, 1)
        else:
            with pytest.raises(ValueError, match="sliding window of 16 tokens"):
                cached(*longer)


def test_the_judge_of_the_evaluation_gives_the_text_of_the_uncached_one(pair, tiny_llama, monkeypatch):
    target, draft = pair
    model = AutoModelForSPDScoring.from_config(ScoringModelConfig(base_model_path=tiny_llama, backbone="own")).eval()
    limits = {"gamma": 4, "max_new_tokens": 40, "eos_token_id": 2, "batch_size": 3}
    texts = []
    for threshold in (-0.2, 0.0):
        for context_tokens in (0, 500):  # more than any context: the same inputs, without a cache
            monkeypatch.setattr(model.config, "context_tokens", context_tokens)
            judge = rules.scorer(model, threshold, end_ids=frozenset([2]), **TOKENS)
            texts.append(speculative_generate(target, draft, PROMPTS, judge, **limits).tokens)
    assert texts[0] == texts[1] and texts[2] == texts[3]


def test_contexts_of_other_questions_and_longer_ones_are_read_anew(tiny_llama):
    model = AutoModelForSPDScoring.from_config(ScoringModelConfig(base_model_path=tiny_llama, backbone="own")).eval()
    cached = CachedScorer(model, **TOKENS)
    for rows, contexts in (
        ([0, 1], [[5, 6], [7, 8, 9]]), ([0, 1], [[5, 6, 10], [7, 8, 9, 11, 12]]), ([0, 1], [[6, 6, 10, 4], [7, 8]]),
        ([1], [[7, 8, 13]]), ([2, 1], [[5], [7, 8, 13]]), ([2, 1], [[5] * 300, [7, 8, 13]]),
    ):  # fmt: skip
        drafts, targets = [[20, 21]] * len(rows), [[20, 22, 23]] * len(rows)
        z = cached(rows, contexts, drafts, targets, torch.device("cpu"))
        whole = model(**SPDInputData.from_blocks(contexts, drafts, targets, **TOKENS).as_kwargs())
        torch.testing.assert_close(z, whole, atol=1e-5, rtol=1e-5)
