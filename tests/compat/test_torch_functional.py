"""Tensor helpers against hand numbers, PyTorch's own functions and finite differences."""

import math

import pytest
import torch

from tests.helpers.models import make_tokenizer
from tests.helpers.ranks import run_ranks
from verl.utils import torch_functional as F


@pytest.mark.parametrize("dtype, tolerance", [(torch.float64, 1e-12), (torch.float32, 1e-6), (torch.bfloat16, 2e-2)])
@pytest.mark.parametrize("inplace", [True, False])
def test_label_log_probs_agree_with_log_softmax_in_value_and_gradient(dtype, tolerance, inplace, monkeypatch):
    monkeypatch.setattr(F, "_ROWS", 3)  # several chunks, the last one short
    torch.manual_seed(0)
    leaf = torch.randn(2, 4, 11, dtype=dtype, requires_grad=True)
    twin = leaf.detach().clone().requires_grad_()
    labels, weight = torch.randint(0, 11, (2, 4)), torch.randn(2, 4)
    ours = F.logprobs_from_logits(leaf * 1, labels, inplace_backward=inplace)
    plain = F.logprobs_from_logits_naive(twin.to(ours.dtype), labels)
    (ours * weight).sum().backward()
    (plain * weight).sum().backward()
    torch.testing.assert_close(ours, plain, atol=tolerance, rtol=0)
    torch.testing.assert_close(leaf.grad, twin.grad, atol=tolerance, rtol=0)


def test_a_leafs_own_values_survive_the_backward():
    leaf = torch.randn(3, 5, requires_grad=True)
    before = leaf.detach().clone()
    F.logprobs_from_logits(leaf, torch.tensor([0, 1, 2])).sum().backward()
    assert torch.equal(leaf, before)


def test_overwriting_logits_that_the_entropy_still_needs_is_an_error_not_a_wrong_gradient():
    logits = torch.randn(3, 5, requires_grad=True) * 1
    entropy = F.entropy_from_logits(logits).sum()
    F.logprobs_from_logits(logits, torch.tensor([0, 1, 2])).sum().backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        entropy.backward()


def test_entropy_by_hand_and_in_chunks():
    logits = torch.log(torch.tensor([[0.25, 0.75], [0.5, 0.5]]))
    expected = [-(0.25 * math.log(0.25) + 0.75 * math.log(0.75)), math.log(2)]
    assert F.entropy_from_logits(logits).tolist() == pytest.approx(expected)
    assert F.entropy_from_logits_with_chunking(logits, chunk_size=1).tolist() == pytest.approx(expected)


def test_masked_exchanged_by_hand_with_nan_at_masked_positions():
    values = torch.tensor([[1.0, 3.0, float("nan")], [5.0, float("inf"), 7.0]])
    mask = torch.tensor([[1, 1, 0], [1, 0, 1]])
    assert F.masked_sum(values, mask).item() == 16 and F.masked_sum(values, mask, axis=1).tolist() == [4, 12]
    assert F.masked_mean(values, mask, axis=-1).tolist() == pytest.approx([2, 6])
    assert F.masked_mean(values, torch.zeros_like(mask)).item() == 0
    clean, ones = torch.tensor([1.0, 3.0, 5.0, 7.0]), torch.ones(4)
    assert F.masked_var(clean, ones).item() == pytest.approx(20 / 3)
    assert F.masked_var(clean, ones, unbiased=False).item() == pytest.approx(5)
    assert F.masked_whiten(clean, ones).tolist() == pytest.approx([(x - 4) / math.sqrt(20 / 3) for x in (1, 3, 5, 7)])
    assert F.masked_whiten(clean, ones, shift_mean=False).mean().item() == pytest.approx(4)
    with pytest.raises(ValueError, match="needs two unmasked values, the mask has 1"):
        F.masked_var(clean, torch.tensor([1.0, 0, 0, 0]))


def test_response_mask_ends_with_the_first_end_token():
    ids = torch.tensor([[5, 2, 9, 2], [5, 6, 7, 8], [3, 5, 2, 5]])
    assert F.get_response_mask(ids, 2).tolist() == [[1, 1, 0, 0], [1, 1, 1, 1], [1, 1, 1, 0]]
    assert F.get_response_mask(ids, [2, 3]).tolist()[2] == [1, 0, 0, 0]


def test_padding_and_truncation_on_each_side():
    assert F.pad_2d_list_to_length([[1], [2, 3]], 0).tolist() == [[1, 0], [2, 3]]
    assert F.pad_2d_list_to_length([[1]], 9, max_length=3).tolist() == [[1, 9, 9]]
    x = torch.tensor([[1, 2]])
    assert F.pad_sequence_to_length(x, 4, 0, left_pad=True).tolist() == [[0, 0, 1, 2]]
    assert F.pad_sequence_to_length(x, 1, 0) is x
    ids, ones = torch.arange(5)[None], torch.ones(1, 5, dtype=torch.int64)
    cut = {side: F.postprocess_data(ids, ones, 3, 0, truncation=side)[0][0].tolist() for side in ("left", "right")}
    assert cut == {"left": [2, 3, 4], "right": [0, 1, 2]}
    assert F.postprocess_data(ids, ones, 3, 0, truncation="middle")[0].tolist() == [[0, 3, 4]]
    with pytest.raises(ValueError, match="5 tokens exceeds max_length=3"):
        F.postprocess_data(ids, ones, 3, 0)


def test_a_prompt_is_tokenised_without_special_tokens_and_left_padded():
    tokenizer = make_tokenizer()
    ids, mask = F.tokenize_and_postprocess_data("1 + 2", tokenizer, 5, tokenizer.pad_token_id)
    words = tokenizer.convert_tokens_to_ids(["1", "+", "2"])
    assert ids[0, 2:].tolist() == words and mask.tolist() == [[0, 0, 1, 1, 1]]


def rates(make, steps, **kwargs):
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=1.0)
    schedule = make(optimizer, **kwargs)
    out = []
    for _ in range(steps):
        out.append(schedule.get_last_lr()[0])
        optimizer.step()
        schedule.step()
    return out


def test_schedules_by_hand():
    assert rates(F.get_constant_schedule_with_warmup, 4, num_warmup_steps=2) == [0, 0.5, 1, 1]
    assert rates(F.get_constant_schedule_with_warmup, 2, num_warmup_steps=-1) == [1, 1]
    cosine = rates(F.get_cosine_schedule_with_warmup, 6, num_warmup_steps=1, num_training_steps=5, min_lr_ratio=0.2)
    falling = [0.2 + 0.4 * (1 + math.cos(math.pi * i / 4)) for i in range(5)]
    assert cosine == pytest.approx([0, *falling])
    warm = rates(F.get_cosine_schedule_with_warmup, 2, num_warmup_steps=2, num_training_steps=4, init_lr_ratio=0.5)
    assert warm == [0.5, 0.75]
    wsd = rates(F.get_wsd_schedule_with_warmup, 8, num_warmup_steps=2, num_training_steps=6, stable_ratio=0.5)
    assert wsd == pytest.approx([0, 0.5, 1, 1, 1, 0.5, 0, 0])
    for decay, halfway in (("exponential", 2 * 0.5**0.5 - 1), ("linear", 0.5), ("minus_sqrt", 1 - 0.5**0.5)):
        steps = {"num_warmup_steps": 1, "num_training_steps": 6, "decay_steps": 2, "min_lr_ratio": 0.2}
        falling = rates(F.get_wsd_schedule_with_warmup, 8, decay=decay, **steps)
        assert falling == pytest.approx([0, 1, 1, 1, 1, 0.2 + 0.8 * halfway, 0.2, 0.2])


def _exchanged(rank, world):
    local = torch.tensor([1.0, 2.0]) if rank == 0 else torch.tensor([3.0, 6.0])
    gathered = F.allgather_dict_tensors({"x": local}, world, None)["x"].tolist()
    shared = {"x": local.clone()}
    F.broadcast_dict_tensor(shared, src=1, group=None)
    return gathered, shared["x"].tolist()


@pytest.mark.process
def test_tensors_of_ranks_are_gathered_and_sent():
    for gathered, shared in run_ranks(_exchanged, 2):
        assert gathered == [1, 2, 3, 6] and shared == [3, 6]
