"""Gradients of the rounds: one backward pass each equals the sum; shared keys equal repeated ones."""

import pytest
import torch
import torch.nn.functional as F
from transformers import Gemma2Config, Gemma2ForCausalLM, MistralConfig, MistralForCausalLM

from dllm_reasoning.config.iterative import IterativeConfig
from dllm_reasoning.losses import iterative_loss
from dllm_reasoning.losses.iterative_loss import IterativeLoss, prefix_problem, sharing
from dllm_reasoning.losses.layouts import IGNORED, build_layout
from tests.dllm_reasoning.models import VOCABULARY, captured_warnings, samples, tiny
from tests.models.families import model_of
from verl.training.policy.attention import NAME_OF_FLASH

BATCH = samples([6, 3, 9], [5, 8, 4])
SEEDS = [11, 12, 13]


def layout_of(pattern, split, batch=BATCH):
    noise = IterativeConfig(noise_pattern=pattern, noise_min=0.2, noise_max=0.8, block_length=4, windows_per_sample=3)
    return build_layout(batch, SEEDS[: len(batch["input_ids"])], noise, 2, split=split)


def gradients(model, layout, *, rounds=2, share=False, ar=0.5, weights=None, warm_up=0):
    model.zero_grad()
    loss = IterativeLoss(weights or [1.0, 0.7, 0.4][:rounds], ar, share=share)
    output = loss.run(model, layout, lambda value, _: value.backward(), scale=0.1, ar_scale=0.05, warm_up=warm_up)
    return output, {name: p.grad.clone() for name, p in model.named_parameters()}


def furthest(a, b):
    return max(float((a[name] - b[name]).abs().max()) for name in a)


def assert_equal(one, two, furthest_apart=1e-5):
    """Two results of `gradients` have the same losses, and gradients at most `furthest_apart`."""
    (a, first), (b, second) = one, two
    torch.testing.assert_close(torch.stack(a.rounds), torch.stack(b.rounds), rtol=1e-5, atol=1e-8)
    assert float(a.ar) == pytest.approx(float(b.ar), rel=1e-5) and a.counted == b.counted
    assert furthest(first, second) < furthest_apart


def naive(model, *, weights, ar):
    """The method written out for full rows of the iid pattern, one summed graph: (losses, clean loss, gradients)."""
    layout = layout_of("iid", False)
    labels, ids = layout.tail.labels, layout.tail.ids
    losses = []

    def ce(tokens):
        logits = model(input_ids=tokens, attention_mask=BATCH["attention_mask"]).logits
        return F.cross_entropy(logits.flatten(0, 1), labels.flatten(), ignore_index=IGNORED, reduction="sum"), logits

    for _ in weights:
        loss, logits = ce(ids)
        losses.append(loss)
        ids = ids.clone()
        ids[:, 1:] = torch.where(layout.region[:, 1:], logits[:, :-1].argmax(-1), ids[:, 1:])
    clean, _ = ce(BATCH["input_ids"])
    model.zero_grad()
    (sum(w * 0.1 * x for w, x in zip(weights, losses, strict=True)) + ar * 0.05 * clean).backward()
    return losses, clean, {name: p.grad.clone() for name, p in model.named_parameters()}


@pytest.mark.parametrize("architecture", ["llama", "tied", "qwen3"])
def test_rounds_equal_the_method_written_out(architecture):
    model = tiny(architecture)
    losses, clean, expected = naive(model, weights=[1.0, 0.7, 0.4], ar=0.5)
    for split, share in ((False, False), (True, False), (True, True)):
        output, actual = gradients(model, layout_of("iid", split), rounds=3, share=share)
        assert torch.allclose(torch.stack(output.rounds), torch.stack(losses).detach(), atol=1e-3)
        assert float(output.ar) == pytest.approx(clean.item(), abs=1e-3) and output.counted == 17
        scale = max(float(g.abs().max()) for g in expected.values())
        assert furthest(actual, expected) / scale < 1e-5


@pytest.mark.parametrize("architecture", ["llama", "tied", "qwen3"])
@pytest.mark.parametrize("pattern", ["block", "packed"])
def test_shared_keys_give_the_gradients_of_repeated_ones(architecture, pattern):
    model = tiny(architecture, initializer_range=0.1)
    layout = layout_of(pattern, True)
    assert_equal(gradients(model, layout, rounds=3), gradients(model, layout, rounds=3, share=True), 1e-4)


def test_instructions_of_one_token_share_as_they_repeat():
    model, batch = tiny("llama", initializer_range=0.1), samples([1, 1], [5, 3])
    repeated = gradients(model, layout_of("iid", False, batch))
    assert_equal(repeated, gradients(model, layout_of("iid", True, batch), share=True))


@pytest.mark.parametrize(("pattern", "share"), [("iid", True), ("packed", True), ("packed", False)])
def test_flash_attention_gets_packings_in_place_of_masks(pattern, share):
    """Its own kernels need a GPU; a packing runs without them."""
    model, layout = tiny("llama", initializer_range=0.1), layout_of(pattern, True)
    masked = gradients(model, layout, rounds=2, share=share)
    model.set_attn_implementation(NAME_OF_FLASH)
    assert_equal(masked, gradients(model, layout, rounds=2, share=share))


SHAPE = dict(vocab_size=VOCABULARY, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
             num_key_value_heads=2, head_dim=8, initializer_range=0.2, sliding_window=6, pad_token_id=0,
             eos_token_id=2)  # fmt: skip


def windowed():
    torch.manual_seed(0)
    return MistralForCausalLM(MistralConfig(**SHAPE)).eval()


def test_rounds_that_share_keep_the_models_sliding_window():
    model = windowed()
    repeated = gradients(model, layout_of("block", False), rounds=2)
    for share in (False, True):
        assert_equal(repeated, gradients(model, layout_of("block", True), rounds=2, share=share))
    model.config.sliding_window = None
    far, _ = gradients(model, layout_of("block", False), rounds=2)
    assert abs(float(far.rounds[0]) - float(repeated[0].rounds[0])) > 1e-2  # the window does hide something here


@pytest.mark.parametrize("share", [False, True])
def test_packed_windows_keep_the_models_sliding_window(share):
    model, layout = windowed(), layout_of("packed", True)
    output, actual = gradients(model, layout, rounds=1, share=share, ar=0.5)
    model.zero_grad()
    losses, ids, starts = [], BATCH["input_ids"], layout.tail.positions[:, ::4]
    for row in range(len(ids)):  # each window after its own text, under the model's own mask
        for window, start in enumerate(starts[row].tolist()):
            block = slice(4 * window, 4 * window + 4)
            text = torch.cat([ids[row, :start], layout.tail.ids[row, block]])[None]
            logits = model(input_ids=text).logits[0, -4:]
            losses.append(F.cross_entropy(logits, layout.tail.labels[row, block], reduction="sum"))
    logits = model(input_ids=ids, attention_mask=BATCH["attention_mask"]).logits.flatten(0, 1)
    clean = F.cross_entropy(logits, layout.prefix.labels.flatten(), ignore_index=IGNORED, reduction="sum")
    (0.1 * sum(losses) + 0.5 * 0.05 * clean).backward()
    assert float(output.rounds[0]) == pytest.approx(sum(losses).item(), rel=1e-5)
    assert float(output.ar) == pytest.approx(clean.item(), rel=1e-5)
    assert max(float((actual[name] - p.grad).abs().max()) for name, p in model.named_parameters()) < 1e-5


def test_layers_that_mix_tokens_otherwise_are_found_by_their_log_probs(monkeypatch):
    assert prefix_problem(tiny("llama")) is None
    monkeypatch.setattr(iterative_loss, "mask_problem", lambda model: None)  # as if the config said nothing of them
    with pytest.raises(ValueError, match="noise_pattern=packed does not work with .*(other log-probs|masks made here)"):
        sharing(model_of("LFM2"), "off", 2, True)


def test_layers_of_mixed_kinds_fall_back_and_are_refused_for_packed():
    model = Gemma2ForCausalLM(Gemma2Config(**SHAPE)).eval()
    with captured_warnings() as logged:
        assert [sharing(model, "auto", 2, False) for _ in range(3)] == [False] * 3
        assert not sharing(model, "off", 2, False)
        [warning] = logged
    assert "a window of 6 tokens, full attention): every round recomputes the instruction" in warning
    with pytest.raises(ValueError, match="noise_pattern=packed does not work with the model of model.partial"):
        sharing(model, "off", 2, True)
    with pytest.raises(ValueError, match="Gemma2ForCausalLM has layers that attend in ways .*: rounds cannot share"):
        gradients(model, layout_of("block", True))
    gradients(model, layout_of("block", False))


def test_a_micro_batch_that_counts_nothing_makes_the_forwards_of_others(monkeypatch):
    calls, inner = [], iterative_loss.call_as_forward
    monkeypatch.setattr(iterative_loss, "call_as_forward", lambda *given: (calls.append(1), inner(*given))[1])
    filler = {**BATCH, "response_mask": torch.zeros_like(BATCH["response_mask"])}
    for pattern, split in (("iid", False), ("iid", True), ("packed", True)):
        made = []
        for batch in (BATCH, filler):
            calls.clear()
            output = IterativeLoss([1.0, 1.0], 0.5, share=split).run(
                tiny("llama"), layout_of(pattern, split, batch), None, scale=1.0, ar_scale=1.0
            )
            made.append(len(calls))
        assert made[0] == made[1] and output.counted == 0 and float(sum(output.rounds)) == float(output.ar) == 0


def test_warm_up_rounds_start_from_the_models_own_guesses():
    model = tiny("llama")
    layout = layout_of("block", False)
    plain, _ = gradients(model, layout, rounds=2)
    warmed, _ = gradients(model, layout, rounds=1, warm_up=1)
    assert float(warmed.rounds[0]) == pytest.approx(float(plain.rounds[1]), rel=1e-5)


@pytest.mark.parametrize("pattern", ["trajectory", "packed"])
def test_warm_up_rounds_share_the_instruction(pattern, monkeypatch):
    model = tiny("llama", initializer_range=0.1)
    repeated = gradients(model, layout_of(pattern, pattern == "packed"), rounds=2, warm_up=2)
    layout, widths = layout_of(pattern, True), []
    inner = iterative_loss.call_as_forward
    monkeypatch.setattr(iterative_loss, "call_as_forward", lambda model, function, tokens, *rest: (
        widths.append(tokens.ids.shape[1]), inner(model, function, tokens, *rest))[1])  # fmt: skip
    shared = gradients(model, layout, rounds=2, share=True, warm_up=2)
    forwards = 4 + (pattern != "packed")  # two of warm-up, two rounds, the clean text where it is not the prefix
    assert widths == [layout.prefix.ids.shape[1]] + [layout.tail.ids.shape[1]] * forwards
    assert_equal(repeated, shared, 1e-4)


def test_only_the_last_backward_is_called_last():
    model = tiny("llama")
    for pattern, split, share, count in (("iid", 0, 0, 3), ("iid", 1, 1, 4), ("packed", 1, 1, 3), ("packed", 1, 0, 2)):
        for is_last in (True, False):
            calls = []
            IterativeLoss([1.0, 1.0], 0.5, share=share).run(
                model, layout_of(pattern, split), lambda loss, last, calls=calls: (loss.backward(), calls.append(last)),
                scale=1.0, ar_scale=1.0, is_last=is_last,
            )  # fmt: skip
            assert calls[-1] is is_last and not any(calls[:-1]) and len(calls) == count


def test_sharing_where_it_pays_and_not_under_gradient_checkpointing():
    model = tiny("llama")
    assert sharing(model, "auto", 2, False) and sharing(model, "auto", 1, True) and sharing(model, "on", 1, False)
    assert not sharing(model, "auto", 1, False) and not sharing(model, "off", 4, True)
    model.gradient_checkpointing_enable()
    with captured_warnings() as logged:
        assert [sharing(model, "on", 4, True) for _ in range(2)] == [False, False]
        [warning] = logged
        assert warning.startswith("model.enable_gradient_checkpointing=true drops the cache")
    with captured_warnings() as logged, pytest.MonkeyPatch.context() as patched:
        patched.setenv("RANK", "1")
        assert not sharing(model, "on", 4, True) and not logged
    model.train()
    layout = layout_of("packed", True)
    _, checkpointed = gradients(model, layout, rounds=2)
    model.gradient_checkpointing_disable()
    _, plain = gradients(model, layout, rounds=2, share=True)
    assert furthest(checkpointed, plain) / max(float(g.abs().max()) for g in plain.values()) < 1e-5
