"""Statistics of a generation against the forwards that a hook counts, and a fake clock."""

import types
from functools import partial

import pytest

from dllm_reasoning.inference import generator
from tests.dllm_reasoning.models import EOS, PAD
from tests.dllm_reasoning.test_generator import LIMIT, model_of, prompts

details_of = partial(generator.iterative_generate, return_details=True)

WIDTH = 6
MODES = {"greedy": (0, 1), "refine 0": (0, WIDTH), "refine 1": (1, WIDTH), "refine 2": (2, WIDTH),
         "converge": ("converge", WIDTH), "slide": ("slide", WIDTH), "verify": ("verify", WIDTH)}  # fmt: skip


def counted(mode, prompt, **more):
    """(statistics, number of forwards that the model made) of one prompt."""
    model, calls = model_of("llama"), []
    hook = model.register_forward_hook(lambda *_: calls.append(1))
    rounds, width = MODES[mode]
    try:
        results = details_of(model, [prompt], EOS, PAD, width - 1, rounds, LIMIT, **more)
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
    model, calls = model_of("llama"), []
    hook = model.register_forward_hook(lambda *_: calls.append(1))
    clock = iter([10.0, 14.0])
    monkeypatch.setattr(generator, "time", types.SimpleNamespace(perf_counter=lambda: next(clock)))
    stats = details_of(model, prompts()[:5], EOS, PAD, WIDTH - 1, "converge", LIMIT).stats
    hook.remove()
    assert stats.forwards == [one.forwards[0] for one in alone] and stats.tokens == [one.tokens[0] for one in alone]
    assert stats.batch_forwards == len(calls) == max(stats.forwards) < sum(stats.forwards)
    assert stats.tokens_per_forward == sum(stats.tokens) / sum(stats.forwards)
    assert stats.seconds == 4.0 and stats.tokens_per_second == sum(stats.tokens) / 4
