"""Lossless modes equal greedy decoding token for token: two architectures, batched, ragged, with a cache; statistics
are those of the forwards that a hook counts."""

import functools
import math
import types
from functools import partial

import pytest
import torch
import transformers

from dllm_reasoning.inference import generator, iterative_generate
from dllm_reasoning.inference.commit_rules import AdaptiveWindows, Branches, Row, Window
from tests.dllm_reasoning.models import EOS, PAD, VOCABULARY, captured_warnings, tiny
from verl.models.kv_cache import Prefills

details_of = partial(generator.iterative_generate, return_details=True)

LIMIT = 24


@functools.cache
def prompts(count=200):
    generator = torch.Generator().manual_seed(3)
    lengths = torch.randint(1, 14, (count,), generator=generator).tolist()
    return tuple(tuple(torch.randint(5, VOCABULARY, (n,), generator=generator).tolist()) for n in lengths)


@functools.cache
def model_of(architecture):
    return tiny(architecture, seed=1)


@functools.cache
def greedy(architecture):
    """Hugging Face's own greedy generate, prompts of one length at a time."""
    model, result = model_of(architecture), {}
    for length in {len(p) for p in prompts()}:
        group = [p for p in prompts() if len(p) == length]
        out = model.generate(torch.tensor(group), attention_mask=torch.ones(len(group), length, dtype=torch.int64),
                             max_new_tokens=LIMIT, do_sample=False, pad_token_id=PAD, eos_token_id=EOS)  # fmt: skip
        for prompt, row in zip(group, out[:, length:].tolist(), strict=True):
            result[prompt] = row[: row.index(EOS) + 1] if EOS in row else row
    return [result[p] for p in prompts()]


def test_ids_are_the_prompts_then_the_answers():
    short, long = sorted(prompts()[:20], key=len)[:: 19]
    expected = [greedy("llama")[prompts().index(prompt)] for prompt in (short, long)]
    width, longest = len(long), max(map(len, expected))
    settings = (model_of("llama"), EOS, PAD, 5, "slide", LIMIT)
    of_lists = iterative_generate(settings[0], [short, long], *settings[1:])
    assert of_lists.shape == (2, width + longest)
    before, after = [PAD] * (width - len(short)), [PAD] * (longest - len(expected[0]))
    assert of_lists[0].tolist() == [*before, *short, *expected[0], *after]
    padded, mask = of_lists[:, :width], torch.tensor([[0] * (width - len(short)) + [1] * len(short), [1] * width])
    assert torch.equal(iterative_generate(settings[0], padded, *settings[1:], attention_mask=mask), of_lists)
    output_ids = iterative_generate(settings[0], torch.tensor([long]), *settings[1:])
    assert output_ids[0, len(long) :].tolist() == expected[1]


def generate(architecture, inputs, **more):
    return details_of(model_of(architecture), inputs, EOS, PAD, max_new_tokens=LIMIT, **more)


@pytest.mark.parametrize("architecture", ["llama", "tied", "qwen3"])
@pytest.mark.parametrize("mode", ["converge", "slide", "verify", "branch"])
def test_lossless_modes_equal_greedy_generate_on_200_ragged_prompts(architecture, mode):
    expected = greedy(architecture)
    assert any(row[-1] == EOS and len(row) < LIMIT for row in expected) and any(len(row) == LIMIT for row in expected)
    result = []
    for start in range(0, 200, 50):
        result += generate(architecture, prompts()[start : start + 50], add_eos_length=5, refine_iter=mode).tokens
    assert result == expected


@pytest.mark.parametrize("mode", ["converge", "slide", "verify", "branch"])
def test_lossless_modes_one_prompt_at_a_time_and_without_a_cache(mode):
    expected = greedy("llama")[:12]
    if mode == "branch":
        with pytest.raises(ValueError, match="refine_iter=branch needs a key/value cache; use verify"):
            generate("llama", prompts()[:1], add_eos_length=7, refine_iter=mode, use_cache=False)
        results = [generate("llama", [p], add_eos_length=7, refine_iter=mode).tokens[0] for p in prompts()[:12]]
        assert results == expected
        return
    for more in ({}, {"use_cache": False}):
        result = [generate("llama", [p], add_eos_length=7, refine_iter=mode, **more) for p in prompts()[:12]]
        assert [f.tokens[0] for f in result] == expected
    batched = generate("llama", prompts()[:12], add_eos_length=7, refine_iter=mode, use_cache=False)
    assert batched.tokens == expected


@pytest.mark.parametrize("times", [0, 1, 3])
def test_fixed_rounds_equal_the_rule_written_out(times):
    model, width = model_of("llama"), 6
    for prompt in prompts()[:6]:
        text, new = list(prompt), []
        while len(new) < LIMIT and EOS not in new:
            fed = [EOS] * (min(width, LIMIT - len(new)) - 1)
            for _ in range(times + 1):
                logits = model(torch.tensor([text + fed])).logits[0, len(text) - 1 :]
                predicted = logits.argmax(-1).tolist()
                unchanged, fed = predicted[:-1] == fed, predicted[:-1]
                if unchanged:
                    break
            new += predicted[: predicted.index(EOS) + 1] if EOS in predicted else predicted
            text = list(prompt) + new
        assert generate("llama", [prompt], add_eos_length=width - 1, refine_iter=times).tokens[0] == new


def test_the_next_guesses_of_branches_are_those_of_a_forward_over_committed_tokens_and_noise(monkeypatch):
    model, length, steps = model_of("llama"), 3, []
    step = Branches.step

    def record(rule, row, predicted, log_probs):
        kept = step(rule, row, predicted, log_probs)
        room = row.remaining - len(kept)  # what is drafted beyond the limit is never fed
        steps.append((row.tokens + kept, row.guesses[: max(room, 0)], len(kept)))
        return kept

    monkeypatch.setattr(Branches, "step", record)
    result = generate("llama", prompts()[:12], add_eos_length=length, refine_iter="branch")
    assert result.tokens == greedy("llama")[:12]
    for text, guesses, _ in steps:
        # The branch starts before the token that its own forward commits: noise stands in its place.
        logits = model(torch.tensor([text[:-1] + [EOS] * length])).logits[0, len(text) - 1 :]
        assert guesses == logits.argmax(-1).tolist()[: len(guesses)]
    assert {count for *_, count in steps} >= {1, 2}  # forwards without and with a confirmed guess
    assert {len(guesses) for _, guesses, _ in steps} >= {0, length}


@pytest.mark.parametrize("mode", ["converge", "slide", "verify", "branch"])
def test_sampling_draws_the_same_in_every_lossless_mode(mode):
    options = dict(temperature=1.3, top_k=12, top_p=0.9, seed=7)
    plain = generate("llama", prompts()[:8], add_eos_length=0, **options)
    result = generate("llama", prompts()[:8], add_eos_length=5, refine_iter=mode, **options)
    assert result.tokens == plain.tokens != greedy("llama")[:8]
    other = generate("llama", prompts()[:8], add_eos_length=0, **{**options, "seed": 8})
    assert other.tokens != plain.tokens


def test_sampling_follows_the_probabilities():
    model, prompt = tiny("llama", seed=1, initializer_range=0.05), list(prompts()[0])
    with torch.no_grad():
        expected = model(torch.tensor([prompt])).logits[0, -1].softmax(-1)
    drawn = details_of(model, [prompt] * 3000, EOS, PAD, 0, 0, 1, temperature=1.0).tokens
    share = torch.bincount(torch.tensor([t[0] for t in drawn]), minlength=VOCABULARY) / 3000
    assert float((share - expected).abs().max()) < 0.02


def step(rule, row, predicted, probs=None):
    committed = rule.step(row, predicted, probs and [math.log(p) for p in probs])
    rule.prepare([row])
    return committed


def test_slide_commits_confirmed_guesses_by_hand():
    rule, row = AdaptiveWindows([Window(3)], 9), Row(0, [1], 1, 99, guesses=[5, 6, 9])
    assert step(rule, row, [5, 6, 7, 8]) == [5, 6, 7] and row.guesses == [8, 9, 9]
    row.guesses = [5, 6, 7]
    assert step(rule, row, [4, 3, 2, 1]) == [4] and row.guesses == [3, 2, 1]
    row.guesses = [5, 6, 7]
    sure = AdaptiveWindows([Window(3)], 9, threshold=0.9)
    assert step(sure, row, [4, 3, 2, 1], [0.1, 0.95, 0.91, 0.5]) == [4, 3, 2] and row.guesses == [1, 9, 9]


def test_max_length_counts_the_prompt_and_several_end_tokens_end():
    result = generate("llama", prompts()[:20], max_length=16, refine_iter="slide", add_eos_length=4)
    for prompt, new, expected in zip(prompts(), result.tokens, greedy("llama"), strict=False):
        assert new == expected[: 16 - len(prompt)]
    first = greedy("llama")[0][2]
    several = details_of(model_of("llama"), prompts()[:1], [EOS, first], PAD, 4, "slide", LIMIT).tokens[0]
    assert several == greedy("llama")[0][: greedy("llama")[0].index(first) + 1]


def test_the_window_of_the_model_is_the_default_and_a_longer_one_warns_once():
    model = tiny("llama", seed=1)
    model.config.dllm_window, model.config.dllm_noise_token_id = 4, 7
    with captured_warnings() as logged:
        result = details_of(model, prompts()[:1], EOS, PAD, refine_iter=0, max_new_tokens=12)
        assert len(result.stats.rounds[0]) == -(-len(result.tokens[0]) // 4) and not logged
        for _ in range(2):
            details_of(model, prompts()[:1], EOS, PAD, 15, 0, 12)
        [warning] = logged
    assert "blocks of 16 tokens, but the model was trained on windows of 4: expect wrong answers" in warning


@pytest.mark.parametrize(
    ("more", "message"),
    [({"refine_iter": "slde"}, "refine_iter='slde' is unknown; did you mean 'slide'"),
     ({"refine_iter": -1}, "refine_iter=-1 is unknown"),
     ({"refine_iter": "converge", "confidence_threshold": 0.9}, "confidence_threshold=0.9 needs refine_iter=slide"),
     ({"add_eos_length": -1}, "add_eos_length=-1 is below 0"),
     ({"refine_iter": "branch", "add_eos_length": 127}, "= 16384 tokens of a row per forward; set add_eos_length"),
     ({"max_length": 3}, "prompt 1 has 4 tokens; it needs at least one, and fewer than max_length=3"),
     ({"input_ids": []}, "input_ids holds no prompt")],
)  # fmt: skip
def test_bad_arguments_are_named(more, message):
    inputs = {"input_ids": [[5], [5, 6, 7, 8]], "add_eos_length": 3, **more}
    with pytest.raises(ValueError, match=message.replace("[", r"\[")):
        details_of(model_of("llama"), eos_token_id=EOS, pad_token_id=PAD, **inputs)


def made(kind, **shape):
    """A small model of another architecture, its matrices wide enough that the next token depends on all before it."""
    torch.manual_seed(0)
    config = getattr(transformers, f"{kind}Config")(vocab_size=VOCABULARY, pad_token_id=PAD, eos_token_id=EOS, **shape)
    model = transformers.AutoModelForCausalLM.from_config(config).eval()
    for parameter in model.parameters():
        if parameter.dim() == 2:
            torch.nn.init.normal_(parameter, 0, 0.35)
    return model


WINDOWED = {
    "Mistral": dict(hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
                    num_key_value_heads=2, sliding_window=6),
    "GPTNeo": dict(hidden_size=32, intermediate_size=48, num_layers=2, num_heads=4, window_size=6,
                   attention_types=[[["global", "local"], 1]]),
}  # fmt: skip


@pytest.mark.parametrize("kind", WINDOWED)
def test_layers_with_a_window_run_without_a_cache_and_warn_once(kind):
    model = made(kind, **WINDOWED[kind])
    with captured_warnings() as logged:
        for prompt in prompts()[2:5]:
            expected = model.generate(torch.tensor([prompt]), max_new_tokens=16, do_sample=False)[0, len(prompt) :]
            expected = expected.tolist()
            result = details_of(model, [list(prompt)], EOS, PAD, 4, "slide", 16).tokens[0]
            assert result == (expected[: expected.index(EOS) + 1] if EOS in expected else expected)
        [warning] = [text for text in logged if "full attention" in text]
    assert warning.startswith(f"{kind}ForCausalLM has layers without full attention")


def test_calls_on_the_same_prompts_read_them_once():
    model, inputs, reads = model_of("llama"), prompts()[:8], []
    longest = max(map(len, inputs))
    hook = model.register_forward_hook(
        lambda module, args, kwargs, output: reads.append(kwargs["input_ids"].shape[1]), with_kwargs=True
    )
    modes, prefills = (0, "slide", "verify", "branch", "converge"), Prefills()
    alone = [generate("llama", inputs, add_eos_length=2, refine_iter=mode) for mode in modes]
    reads.clear()
    results = [generate("llama", inputs, add_eos_length=2, refine_iter=mode, prefills=prefills) for mode in modes]
    hook.remove()
    assert reads.count(longest - 1) == 1 and max(reads) == longest - 1
    assert [r.tokens for r in results] == [a.tokens for a in alone]
    assert [r.stats.forwards for r in results] == [a.stats.forwards for a in alone]
    both = results[0] + results[1]
    assert both.tokens == results[0].tokens + results[1].tokens
    assert both.stats.batch_forwards == sum(r.stats.batch_forwards for r in results[:2])
    assert both.stats.seconds == results[0].stats.seconds + results[1].stats.seconds
    prefills.kept = {model: (states, 1000.0) for model, (states, _) in prefills.kept.items()}
    again = generate("llama", inputs, add_eos_length=2, refine_iter="slide", prefills=prefills)
    assert 1000 < again.stats.seconds < 1100  # of the reading that it did not repeat


@pytest.mark.parametrize("mode", ["slide", "verify", "branch"])
def test_ragged_rows_may_fill_all_positions_of_a_model(mode):
    model = made("GPT2", n_embd=32, n_layer=2, n_head=4, n_positions=24)  # learned positions: none beyond the last
    inputs = [list(prompt) for prompt in prompts()[:8]]
    plain = details_of(model, inputs, EOS, PAD, 0, 0, max_length=24)
    assert any(len(p) + len(t) == 24 for p, t in zip(inputs, plain.tokens, strict=True))
    assert len(set(map(len, inputs))) > 1
    assert details_of(model, inputs, EOS, PAD, 3, mode, max_length=24).tokens == plain.tokens


UNCACHED = {
    "Bloom": (dict(hidden_size=32, n_layer=2, n_head=4), "takes no position_ids, so"),
    "Falcon": (dict(hidden_size=32, num_hidden_layers=2, num_attention_heads=4, alibi=True), "computes its own bias"),
    "Mamba": (dict(hidden_size=32, state_size=4, num_hidden_layers=2), "takes no position_ids and no past_key_values"),
    "RecurrentGemma": (dict(hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
                            lru_width=32, attention_window_size=6), "carries a state from token to token"),
}  # fmt: skip


@pytest.mark.parametrize("kind", UNCACHED)
def test_a_model_that_cannot_use_the_cache_is_refused_and_runs_without_one(kind):
    shape, message = UNCACHED[kind]
    model, prompt = made(kind, **shape), list(prompts()[3])
    with pytest.raises(ValueError, match=f"{kind}ForCausalLM {message}.*set use_cache=False .--no_cache.* such as hf"):
        details_of(model, [prompt], EOS, PAD, 4, "slide", 8)
    plain = details_of(model, [prompt], EOS, PAD, 0, 0, 8, use_cache=False).tokens
    assert details_of(model, [prompt], EOS, PAD, 4, "slide", 8, use_cache=False).tokens == plain


def test_a_ragged_batch_near_its_limit_fits_into_the_cache():
    slide = {"refine_iter": "slide", "confidence_threshold": 0.2}
    result = generate("llama", prompts()[70:80], add_eos_length=7, **slide)
    alone = [generate("llama", [prompt], add_eos_length=7, **slide).tokens[0] for prompt in prompts()[70:80]]
    assert result.tokens == alone


WIDTH = 6
MODES = {"greedy": (0, 1), "refine 0": (0, WIDTH), "refine 1": (1, WIDTH), "refine 2": (2, WIDTH),
         "converge": ("converge", WIDTH), "slide": ("slide", WIDTH), "verify": ("verify", WIDTH)}  # fmt: skip


def counted(mode, *prompts, **more):
    """(statistics, number of forwards that the model made) of a batch of prompts."""
    model, calls = model_of("llama"), []
    hook = model.register_forward_hook(lambda *_: calls.append(1))
    rounds, width = MODES[mode]
    try:
        results = details_of(model, prompts, EOS, PAD, width - 1, rounds, LIMIT, **more)
    finally:
        hook.remove()
    return results.stats, len(calls)


@pytest.mark.parametrize("use_cache", [True, False], ids=["cached", "uncached"])
@pytest.mark.parametrize("mode", MODES)
def test_every_forward_of_the_model_is_counted(mode, use_cache):
    for prompt in prompts()[:6]:
        stats, calls = counted(mode, prompt, use_cache=use_cache)
        assert stats.forwards == [calls] and stats.batch_forwards == calls > 0
        assert stats.tokens_per_forward == stats.tokens[0] / calls
        assert mode not in ("slide", "verify") or stats.rounds == [[]]  # every forward commits


@pytest.mark.parametrize("mode", ["refine 0", "refine 1", "refine 2", "converge"])
def test_rounds_are_the_forwards_after_each_blocks_first(mode):
    several = 0
    for prompt in prompts()[:6]:
        stats, calls = counted(mode, prompt)
        blocks = -(-stats.tokens[0] // WIDTH)
        assert len(stats.rounds[0]) == blocks and sum(stats.rounds[0]) == calls - blocks
        assert mode != "refine 1" or set(stats.rounds[0]) <= {0, 1}
        several += blocks > 1
    assert several and (mode != "converge" or sum(stats.rounds[0]) > 2 * blocks)


def test_a_batch_makes_the_forwards_of_its_longest_row(monkeypatch):
    alone = [counted("converge", prompt)[0] for prompt in prompts()[:5]]
    clock = iter([10.0, 14.0])
    monkeypatch.setattr(generator, "time", types.SimpleNamespace(perf_counter=lambda: next(clock)))
    stats, calls = counted("converge", *prompts()[:5])
    assert stats.forwards == [one.forwards[0] for one in alone] and stats.tokens == [one.tokens[0] for one in alone]
    assert stats.batch_forwards == calls == max(stats.forwards) < sum(stats.forwards)
    assert stats.tokens_per_forward == sum(stats.tokens) / sum(stats.forwards)
    assert stats.seconds == 4.0
