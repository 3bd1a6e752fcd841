"""Claims on the speculative decoder: exact match is greedy decoding, and its caches equal a plain forward."""

import gc
import weakref
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM, MistralConfig, MistralForCausalLM

from recipe.spd.rollout import decoder as decode
from recipe.spd.rollout.decoder import greedy_generate, speculative_generate
from scripts.spd_evaluation import rules
from verl.models import kv_cache
from verl.models.kv_cache import Prefills

VOCAB = 23
reject_all, accept_all = rules.exact(), rules.accept_all()


def tiny_llama(seed: int, layers: int = 2, attention: str = "sdpa", kv_heads: int = 2) -> LlamaForCausalLM:
    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=VOCAB, hidden_size=32, intermediate_size=48, num_hidden_layers=layers, num_attention_heads=2,
        num_key_value_heads=kv_heads, max_position_embeddings=96, initializer_range=0.3, tie_word_embeddings=False,
        attn_implementation=attention,
    )
    return LlamaForCausalLM(config).eval()


def noisy_copy(model: torch.nn.Module, scale: float, seed: int) -> torch.nn.Module:
    """A draft that agrees with its target about half the time, so that every length of accepted block occurs."""
    generator = torch.Generator().manual_seed(seed)
    copy = type(model)(model.config).eval()
    copy.load_state_dict(model.state_dict())
    with torch.no_grad():
        for parameter in copy.parameters():
            parameter.add_(torch.randn(parameter.shape, generator=generator) * scale * parameter.std())
    return copy


def ragged_prompts(count: int, seed: int = 0) -> list[list[int]]:
    generator = torch.Generator().manual_seed(seed)
    lengths = torch.randint(1, 14, (count,), generator=generator).tolist()
    return [torch.randint(3, VOCAB, (length,), generator=generator).tolist() for length in lengths]


def hf_greedy(model, prompt: list[int], new_tokens: int, eos: list[int]) -> list[int]:
    """One row through Hugging Face's own generate: the reference no line of ours takes part in."""
    output = model.generate(
        torch.tensor([prompt]), attention_mask=torch.ones(1, len(prompt)), do_sample=False,
        max_new_tokens=new_tokens, eos_token_id=eos, pad_token_id=0,
    )
    return output[0, len(prompt) :].tolist()


@pytest.mark.parametrize("draft_kind", ["noisy", "stranger"])
def test_exact_match_is_the_targets_greedy_text_token_for_token(draft_kind):
    target = tiny_llama(0)
    draft = noisy_copy(target, 0.08, 1) if draft_kind == "noisy" else tiny_llama(5, layers=1)
    prompts = ragged_prompts(24)
    eos = [1, 2, 7]
    result = speculative_generate(
        target, draft, prompts, reject_all, gamma=4, max_new_tokens=30, eos_token_id=eos, batch_size=10
    )
    expected = [hf_greedy(target, prompt, 30, eos) for prompt in prompts]
    assert result.tokens == expected
    assert result.finished == [tokens[-1] in eos for tokens in expected]
    assert {True, False} == set(result.finished)  # the case holds both kinds of ending
    assert sum(result.accepted_mismatches) == 0
    if draft_kind == "noisy":
        share = sum(result.accepted) / sum(result.rounds)
        assert 0.5 < share < 3.5  # neither all nor nothing was rolled back


@pytest.mark.parametrize("kind", ["eager", "grouped_heads", "gpt2"])
def test_other_attention_and_other_architectures_decode_alike(kind):
    if kind == "gpt2":
        torch.manual_seed(0)
        config = GPT2Config(vocab_size=VOCAB, n_embd=32, n_layer=2, n_head=2, n_positions=44, initializer_range=0.3)
        target = GPT2LMHeadModel(config).eval()
    else:
        target = tiny_llama(0, attention="eager" if kind == "eager" else "sdpa", kv_heads=1)
    draft = noisy_copy(target, 0.08, 1)
    prompts = ragged_prompts(8)
    result = speculative_generate(target, draft, prompts, reject_all, gamma=5, max_new_tokens=30, eos_token_id=None)
    assert result.tokens == [hf_greedy(target, prompt, 30, [VOCAB + 5]) for prompt in prompts]


@pytest.mark.parametrize("target_first", [False, True])
def test_accepting_everything_gives_the_drafts_words_and_the_targets_bonus(target_first):
    target, draft = tiny_llama(0), tiny_llama(1)
    prompts = ragged_prompts(5)
    result = speculative_generate(
        target, draft, prompts, accept_all, gamma=3, max_new_tokens=8, eos_token_id=None, target_first=target_first
    )
    assert (result.rounds, result.accepted) == ([3 if target_first else 2] * 5, [6] * 5)
    for prompt, tokens in zip(prompts, result.tokens, strict=True):
        context = list(prompt)
        for step in range(8):
            speaker = target if step % 4 == (0 if target_first else 3) else draft
            with torch.no_grad():
                context.append(int(speaker(torch.tensor([context])).logits[0, -1].argmax()))
        assert tokens == context[len(prompt) :]


def test_blocks_equal_a_plain_forward_after_rounds_with_rejections():
    target = tiny_llama(0)
    draft = noisy_copy(target, 0.08, 1)
    prompts = ragged_prompts(9)
    generator = torch.Generator().manual_seed(0)
    seen = []

    def coin(block):
        return torch.rand(block.draft_ids.shape, generator=generator) < 0.5

    def check(block, accepted):
        for k, question in enumerate(block.rows.tolist()):
            context, drafted = block.context_ids[k], block.draft_ids[k].tolist()
            assert context[: len(prompts[question])] == prompts[question]
            ids = torch.tensor([context + drafted])
            with torch.no_grad():
                plain = target(ids, output_hidden_states=True)
                draft_logits = draft(ids).logits[0, len(context) - 1 : -1]
            logits = plain.logits[0, len(context) - 1 :]
            torch.testing.assert_close(block.target_logits[k], logits, rtol=1e-4, atol=1e-4)
            hidden = plain.hidden_states[-1][0, len(context) - 1 :]
            torch.testing.assert_close(block.target_hidden[k], hidden, rtol=1e-4, atol=1e-4)
            torch.testing.assert_close(target.lm_head(block.target_hidden[k]), logits, rtol=1e-4, atol=1e-4)
            torch.testing.assert_close(block.draft_logits[k], draft_logits, rtol=1e-4, atol=1e-4)
            assert block.draft_ids[k].tolist() == draft_logits.argmax(-1).tolist()
            chosen = logits[:-1].argmax(-1).tolist()
            assert block.mismatch[k].tolist() == [d != t for d, t in zip(drafted, chosen, strict=True)]
        seen.extend(accepted.tolist())

    speculative_generate(
        target, draft, prompts, coin, gamma=4, max_new_tokens=24, eos_token_id=[1, 2, 7], batch_size=5, on_block=check
    )
    assert set(seen) == {0, 1, 2, 3, 4}  # every length of accepted block occurred


def test_replay_shows_the_same_block_as_decoding_did():
    target = tiny_llama(0)
    draft = noisy_copy(target, 0.08, 1)
    recorded = []
    speculative_generate(
        target, draft, ragged_prompts(6), reject_all, gamma=4, max_new_tokens=12, eos_token_id=None,
        on_block=lambda block, accepted: recorded.append(block),
    )
    contexts = [context for block in recorded for context in block.context_ids]
    drafts = [tokens for block in recorded for tokens in block.draft_ids.tolist()]
    hidden = torch.cat([block.target_hidden for block in recorded])
    logits = torch.cat([block.draft_logits for block in recorded])
    chosen = torch.cat([block.target_ids for block in recorded])
    short = [tokens[:2] for tokens in drafts]  # another draft length in the same call
    for block in decode.replay_blocks(target, draft, contexts * 2, drafts + short, batch_size=7):
        width = block.draft_ids.shape[1]
        places = block.rows % len(contexts)
        torch.testing.assert_close(block.target_hidden, hidden[places, : width + 1], rtol=1e-4, atol=1e-4)
        torch.testing.assert_close(block.draft_logits, logits[places, :width], rtol=1e-4, atol=1e-4)
        assert torch.equal(block.target_ids, chosen[places, : width + 1])


@pytest.mark.parametrize(
    ("drafted", "chosen", "accepted", "before", "tokens", "counts", "finished", "done"),
    [
        # The mismatch at 1 is accepted, the one at 3 is not; 3 would be the bonus token.
        ([5, 6, 7, 8], [5, 9, 7, 4, 3], 3, [], [5, 6, 7, 4], (3, 2, 1), False, False),
        # What follows an end token in the draft is dropped from text and counts.
        ([5, 2, 7, 8], [5, 9, 7, 4, 3], 3, [], [5, 2], (2, 1, 1), True, True),
        # An end token as correction is no accepted token.
        ([5, 6], [5, 2, 3], 1, [], [5, 2], (1, 1, 0), True, True),
        # The limit cuts inside a block.
        ([5, 6, 7], [5, 6, 7, 8], 3, [1, 1, 1], [1, 1, 1, 5, 6], (2, 0, 0), False, True),
    ],
)
def test_a_block_is_committed_by_hand(drafted, chosen, accepted, before, tokens, counts, finished, done):
    """`counts`: accepted tokens, mismatches judged and accepted; at most five tokens, 2 ends a text."""
    result = decode.SpecResult.empty(1)
    result.tokens[0] = list(before)
    mismatch = [d != t for d, t in zip(drafted, chosen[:-1], strict=True)]
    block = SimpleNamespace(
        rows=torch.tensor([0]), draft_ids=torch.tensor([drafted]), target_ids=torch.tensor([chosen]),
        mismatch=torch.tensor([mismatch]),
    )
    assert decode._commit(block, torch.tensor([accepted]), {0: []}, result, 5, frozenset([2])) == [done]
    assert (result.tokens[0], result.rounds, result.finished) == (tokens, [1], [finished])
    assert (result.accepted[0], result.judged_mismatches[0], result.accepted_mismatches[0]) == counts
    if tokens == [5, 6, 7, 4]:
        assert result.origin[0] == [decode.FROM_MATCH, decode.FROM_MISMATCH, decode.FROM_MATCH, decode.FROM_TARGET]


def test_decodings_of_the_same_prompts_read_them_once(monkeypatch):
    target = tiny_llama(0)
    models, prompts = (target, noisy_copy(target, 0.5, seed=1)), ragged_prompts(7)
    limits = {"max_new_tokens": 20, "eos_token_id": 2}
    passes = [0, 0]
    for number, model in enumerate(models):
        def count(module, args, kwargs, number=number):
            passes[number] += kwargs["position_ids"].shape[1] > 5  # the longest draft has 4 tokens

        model.base_model.register_forward_pre_hook(count, with_kwargs=True)

    def decoded(prefills=None, texts=prompts):
        results = [speculative_generate(*models, texts, judge, gamma=4, prefills=prefills, **limits)
                   for judge in (reject_all, accept_all, rules.margin(1.0))]
        return [*results, greedy_generate(target, texts, prefills=prefills, **limits)]

    expected, others = decoded(), decoded(texts=prompts[3:])
    assert passes == [8, 6]
    prefills = Prefills()
    results = decoded(prefills) + decoded(prefills, prompts[3:]) + decoded(prefills)
    assert passes == [8 + 3, 6 + 3]
    for ours, theirs in zip(results, [*expected, *others, *expected], strict=True):
        assert replace(ours, seconds=0.0) == replace(theirs, seconds=0.0)
    monkeypatch.setattr(prefills, "kept", {model: (states, 1000.0) for model, (states, _) in prefills.kept.items()})
    spent = speculative_generate(*models, prompts, reject_all, gamma=4, prefills=prefills, **limits).seconds
    assert 2000 < spent < 2100  # of both models, although neither read the prompts


def test_a_common_prefix_is_read_once_and_little_padding(monkeypatch):
    target = tiny_llama(0, kv_heads=1)
    prompts = [[3, 4, 5, 6, *tokens] for tokens in ragged_prompts(8)]
    monkeypatch.setattr(kv_cache, "READ_TOKENS", 16)  # two columns of eight rows
    fed = []
    hook = target.base_model.register_forward_pre_hook(
        lambda module, args, kwargs: fed.append(tuple(kwargs["position_ids"].shape)), with_kwargs=True
    )
    result = greedy_generate(target, prompts, max_new_tokens=6, eos_token_id=None)
    hook.remove()
    assert result.tokens == [hf_greedy(target, prompt, 6, [VOCAB + 5]) for prompt in prompts]
    read = [len(prompt) - 1 for prompt in prompts]
    blocks = [(sum(length > start for length in read), min(2, max(read) - start)) for start in range(4, max(read), 2)]
    assert fed == [(1, 4), *blocks, *[(8, 1)] * 6]


def test_models_are_left_as_they_were():
    target, draft = tiny_llama(0, kv_heads=1).train(), tiny_llama(1)
    greedy_generate(target, [[3, 4]], max_new_tokens=2, eos_token_id=None)
    speculative_generate(target, draft, [[3, 4]], reject_all, max_new_tokens=2, eos_token_id=None)
    assert target.training and not draft.training and target.config._attn_implementation == "sdpa"


def test_wrong_input_is_named():
    target, draft = tiny_llama(0), tiny_llama(1)
    with pytest.raises(ValueError, match="prompt 1 is empty"):
        greedy_generate(target, [[3], []], max_new_tokens=2, eos_token_id=None)
    with pytest.raises(ValueError, match="90 new ones do not fit into the 96 positions of LlamaForCausalLM"):
        greedy_generate(target, [[3] * 8], max_new_tokens=90, eos_token_id=None)
    with pytest.raises(TypeError, match="the judge returned torch.float32"):
        speculative_generate(target, draft, [[3]], lambda b: b.mismatch.float(), max_new_tokens=2, eos_token_id=None)


def test_exact_match_samples_from_the_targets_own_distribution():
    target, draft = tiny_llama(0), noisy_copy(tiny_llama(0), 0.5, 1)
    prompts, options = [[3, 4, 5]] * 20_000, {"max_new_tokens": 2, "eos_token_id": None, "batch_size": 20_000}
    with torch.no_grad():
        first = (target(torch.tensor([[3, 4, 5]])).logits[0, -1] / 0.7).softmax(-1)  # [V]
        after = torch.tensor([[3, 4, 5, token] for token in range(VOCAB)])
        second = (target(after).logits[:, -1] / 0.7).softmax(-1)
    wanted = first[:, None] * second  # [V, V], of the two tokens together

    def distance(result) -> float:
        pairs = torch.tensor(result.tokens)
        counts = torch.bincount(pairs[:, 0] * VOCAB + pairs[:, 1], minlength=VOCAB**2).view(VOCAB, VOCAB)
        return 0.5 * (counts / len(pairs) - wanted).abs().sum().item()

    plain = greedy_generate(target, prompts, temperature=0.7, seed=1, **options)
    exact = speculative_generate(target, draft, prompts, reject_all, gamma=2, temperature=0.7, seed=2, **options)
    lenient = speculative_generate(target, draft, prompts, accept_all, gamma=2, temperature=0.7, seed=3, **options)
    noise = distance(plain)  # of 20,000 draws from the distribution itself
    assert distance(exact) < 1.3 * noise < 0.2 and distance(lenient) > 2 * noise
    assert sum(exact.accepted) > 0 and sum(exact.judged_mismatches) > 0
    again = speculative_generate(target, draft, prompts[:50], reject_all, gamma=2, temperature=0.7, seed=2, **options)
    same = speculative_generate(target, draft, prompts[:50], reject_all, gamma=2, temperature=0.7, seed=2, **options)
    assert again.tokens == same.tokens


def wider_copy(model, vocabulary: int):
    """The same function with a padded embedding, whose padded logits are never the largest."""
    wide = type(model)(type(model.config)(**{**model.config.to_dict(), "vocab_size": vocabulary})).eval()
    weights = model.state_dict()
    for name in ("model.embed_tokens.weight", "lm_head.weight"):
        weights[name] = torch.cat([weights[name], torch.zeros(vocabulary - VOCAB, 32)])
    wide.load_state_dict(weights)
    return wide


@pytest.mark.parametrize(("target_width", "draft_width"), [(VOCAB + 9, VOCAB + 2), (VOCAB + 2, VOCAB + 9)])
def test_padded_embeddings_of_other_sizes_change_nothing(target_width, draft_width):
    target, draft = tiny_llama(0), noisy_copy(tiny_llama(0), 0.08, 1)
    prompts = ragged_prompts(6)
    plain = greedy_generate(target, prompts, max_new_tokens=20, eos_token_id=2).tokens
    wide = wider_copy(target, target_width), wider_copy(draft, draft_width)
    judges = (reject_all, rules.divergence(1.0), rules.typical(0.09, 0.3))
    options = {"gamma": 4, "max_new_tokens": 20, "eos_token_id": 2}
    results = [speculative_generate(*wide, prompts, judge, **options).tokens for judge in judges]
    assert results[0] == plain and results[1] != plain


def test_a_sliding_window_is_refused_by_name_where_a_row_exceeds_it():
    torch.manual_seed(0)
    sizes = dict(hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=2)
    config = MistralConfig(vocab_size=VOCAB, num_key_value_heads=1, sliding_window=16, initializer_range=0.3, **sizes)
    target = MistralForCausalLM(config).eval()
    options = {"gamma": 4, "eos_token_id": None}
    within = speculative_generate(target, target, [[3, 4, 5]], reject_all, max_new_tokens=13, **options)
    assert within.tokens == [hf_greedy(target, [3, 4, 5], 13, [VOCAB + 5])]
    with pytest.raises(ValueError, match="MistralForCausalLM .* sliding window of 16 .* of 17 tokens exceed.*rounds"):
        speculative_generate(target, target, [[3, 4, 5]], reject_all, max_new_tokens=14, **options)


def test_a_finished_batch_leaves_no_cache(monkeypatch):
    made = []

    class Watched(decode.RowCache):
        def __init__(self, *args):
            super().__init__(*args)
            made.append(weakref.ref(self))

    monkeypatch.setattr(decode, "RowCache", Watched)
    model = tiny_llama(0)
    gc.disable()  # a cycle of references would wait for it
    try:
        speculative_generate(
            model, model, [[5, 6], [7]], lambda block: block.mismatch, gamma=2, max_new_tokens=4, eos_token_id=2
        )
        assert len(made) == 2 and [ref() for ref in made] == [None, None]
    finally:
        gc.enable()
