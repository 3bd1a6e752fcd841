"""Gradients of the rounds: each by itself equals the sum; shared keys equal repeated ones; no gradient in step 3."""

import pytest
import torch
import torch.nn.functional as F

from dllm_reasoning.losses.iterative_loss import IterativeLoss, sharing
from dllm_reasoning.losses.layouts import IGNORED, NoiseSettings, build_layout
from tests.dllm_reasoning.models import samples, tiny

BATCH = samples([6, 3, 9], [5, 8, 4])
SEEDS = [11, 12, 13]


def layout_of(pattern, split):
    noise = NoiseSettings(pattern, "uniform", 0.2, 0.8, width=4, windows=3, token=2)
    return build_layout(BATCH, SEEDS, noise, progress=0.0, split=split)


def gradients(model, layout, *, rounds=2, share=False, ar=0.5, weights=None, at_once=True, warm_up=0):
    model.zero_grad()
    loss = IterativeLoss(weights or [1.0, 0.7, 0.4][:rounds], ar, share=share)
    held = []

    def backward(value, is_last):
        value.backward() if at_once else held.append(value)

    told = loss.run(model, layout, backward, scale=0.1, ar_scale=0.05, warm_up=warm_up)
    if held:
        sum(held).backward()
    return told, {name: p.grad.clone() for name, p in model.named_parameters()}


def furthest(a, b):
    return max(float((a[name] - b[name]).abs().max()) for name in a)


def naive(model, *, weights, ar):
    """The method's text on whole rows of the iid pattern, one summed graph: (losses, gradients)."""
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


@pytest.mark.parametrize("architecture", ["llama", "qwen3"])
def test_rounds_equal_the_method_written_out(architecture):
    model = tiny(architecture)
    losses, clean, wanted = naive(model, weights=[1.0, 0.7, 0.4], ar=0.5)
    for split, share in ((False, False), (True, False), (True, True)):
        told, found = gradients(model, layout_of("iid", split), rounds=3, share=share)
        assert torch.allclose(torch.stack(told.rounds), torch.stack(losses).detach(), atol=1e-3)
        assert float(told.ar) == pytest.approx(clean.item(), abs=1e-3) and told.counted == 17
        scale = max(float(g.abs().max()) for g in wanted.values())
        assert furthest(found, wanted) / scale < 1e-5


@pytest.mark.parametrize("pattern", ["suffix", "packed"])
def test_a_backward_pass_each_round_equals_the_summed_loss(pattern):
    model = tiny("llama", initializer_range=0.1)
    layout = layout_of(pattern, False)
    _, at_once = gradients(model, layout, rounds=3)
    _, summed = gradients(model, layout, rounds=3, at_once=False)
    assert furthest(at_once, summed) < 1e-6


@pytest.mark.parametrize("architecture", ["llama", "qwen3"])
@pytest.mark.parametrize("pattern", ["block", "packed"])
def test_shared_keys_give_the_gradients_of_repeated_ones(architecture, pattern):
    model = tiny(architecture, initializer_range=0.1)
    layout = layout_of(pattern, True)
    one, repeated = gradients(model, layout, rounds=3)
    two, shared = gradients(model, layout, rounds=3, share=True)
    assert torch.allclose(torch.stack(one.rounds), torch.stack(two.rounds), rtol=1e-5)
    assert float(one.ar) == pytest.approx(float(two.ar), rel=1e-5)
    assert furthest(shared, repeated) < 1e-4


def test_the_clean_text_counts_once_in_packed():
    model = tiny("llama")
    layout = layout_of("packed", True)
    told, _ = gradients(model, layout, rounds=2, weights=[0.0, 0.0], ar=1.0)
    with torch.no_grad():
        logits = model(input_ids=BATCH["input_ids"], attention_mask=BATCH["attention_mask"]).logits
    labels = layout.prefix.labels.flatten()
    wanted = F.cross_entropy(logits.flatten(0, 1), labels, ignore_index=IGNORED, reduction="sum")
    assert float(told.ar) == pytest.approx(float(wanted), rel=1e-5) and told.ar_counted == 17


def test_warm_up_rounds_start_from_the_models_own_guesses():
    model = tiny("llama")
    layout = layout_of("block", False)
    plain, _ = gradients(model, layout, rounds=2)
    warmed, _ = gradients(model, layout, rounds=1, warm_up=1)
    assert float(warmed.rounds[0]) == pytest.approx(float(plain.rounds[1]), rel=1e-5)


def test_measuring_leaves_no_gradient():
    model = tiny("llama")
    layout = layout_of("packed", True)
    loss = IterativeLoss([1.0, 1.0], 1.0, share=True)
    with torch.no_grad():
        told = loss.run(model, layout, None, scale=1.0, ar_scale=1.0)
    assert all(p.grad is None for p in model.parameters())
    trained, _ = gradients(model, layout, rounds=2, share=True)
    assert torch.allclose(torch.stack(told.rounds), torch.stack(trained.rounds))


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
    assert not sharing(model, "on", 4, True)
    model.train()
    layout = layout_of("packed", True)
    _, checkpointed = gradients(model, layout, rounds=2)
    model.gradient_checkpointing_disable()
    _, plain = gradients(model, layout, rounds=2, share=True)
    assert furthest(checkpointed, plain) / max(float(g.abs().max()) for g in plain.values()) < 1e-5
