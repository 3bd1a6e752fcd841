"""Sequence parallelism: attention over exchanged heads equals full attention, with its gradients."""

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F

from tests.helpers.ranks import run_ranks
from verl.utils import ulysses as u

B, T, HEADS, WIDTH = 2, 6, 4, 3


def inputs():
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(B, T, HEADS, WIDTH, generator=generator, dtype=torch.float64) for _ in range(4)]


def attention(q, k, v):
    """[B, T, H, D] each."""
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    return F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2)


def of_ranks(rank, world_size):
    u.set_ulysses_sequence_parallel_group(dist.group.WORLD)
    assert u.get_ulysses_sequence_parallel_rank() == rank
    assert u.get_ulysses_sequence_parallel_world_size() == world_size
    *qkv, weight = inputs()
    qkv = [x.requires_grad_() for x in qkv]
    parts = [u.slice_input_tensor(x, 1) for x in qkv]
    full = [u.gather_seq_scatter_heads(x, seq_dim=1, head_dim=2, unpadded_dim_size=T) for x in parts]
    assert full[0].shape == (B, T, HEADS // world_size, WIDTH)
    output = u.gather_heads_scatter_seq(attention(*full), head_dim=2, seq_dim=1)
    pads = -T % world_size
    assert output.shape == (B, (T + pads) // world_size, HEADS, WIDTH)
    together = u.gather_outputs_and_unpad(output, gather_dim=1, unpad_dim=1, padding_size=pads)
    ((together * weight).sum() / world_size).backward()  # the mean over ranks of the full loss
    gradients = [x.grad for x in qkv]
    for gradient in gradients:  # each rank has that of its positions
        dist.all_reduce(gradient)
    own = torch.full((2, 1 + rank), float(rank))  # parts of different width
    uneven = u.Gather.apply(dist.group.WORLD, own, 1)
    later = u.all_to_all_tensor(torch.arange(world_size) + 10 * rank, 0, 0, async_op=True)()
    cut = u.ulysses_pad_and_slice_inputs(torch.arange(1, 6)[None], torch.arange(5)[None], world_size)
    whole = u.ulysses_pad_and_slice_inputs(torch.arange(1, 6)[None], torch.arange(5)[None], world_size, True)[1]
    check_gradients_of_exchanges(rank, world_size)
    check_refusals(world_size)
    u.set_ulysses_sequence_parallel_group(None)
    x = torch.arange(world_size)  # a process group alone shares no sequence
    assert u.all_to_all_tensor(x, 0, 0) is x
    assert torch.equal(u.Gather.apply(None, x, 0), x) and torch.equal(u.SeqAllToAll.apply(None, x, 0, 0), x)
    results = [together.detach(), *gradients, uneven, later, cut[0], cut[1], whole]
    return [r.tolist() for r in results] + [cut[2]]


def check_gradients_of_exchanges(rank, world_size):
    for scaled in (True, False):
        x = torch.ones(2, 3, requires_grad=True)
        weight = torch.arange(6.0 * world_size).reshape(2 * world_size, 3)
        (u.Gather.apply(None, x, 0, scaled) * weight).sum().backward()  # None: the default group
        assert torch.equal(x.grad, weight[2 * rank : 2 * rank + 2] * (world_size if scaled else 1))
    x = torch.zeros(world_size, requires_grad=True)
    (u.SeqAllToAll.apply(dist.group.WORLD, x, 0, 0, True) * (rank + 1.0)).sum().backward()
    assert x.grad.tolist() == [r + 1.0 for r in range(world_size)]  # element r went to rank r, which weighs it r + 1


def check_refusals(world_size):
    odd = torch.zeros(world_size + 1)
    for call in (lambda: u.slice_input_tensor(odd, 0, padding=False), lambda: u.all_to_all_tensor(odd, 0, 0)):
        with pytest.raises(ValueError, match=f"{world_size} ranks cannot share dimension 0 of "):
            call()
    with pytest.raises(ValueError, match=f"sp_size=3, but {world_size} ranks share a sequence"):
        u.ulysses_pad_and_slice_inputs(torch.ones(1, 3), sp_size=3)


@pytest.mark.process
@pytest.mark.parametrize("ranks", [2, 4])
def test_attention_over_exchanged_heads_equals_full_attention(ranks):
    *qkv, weight = inputs()
    qkv = [x.requires_grad_() for x in qkv]
    output = attention(*qkv)
    (output * weight).sum().backward()
    results = run_ranks(of_ranks, ranks)
    for rank, (together, *rest) in enumerate(results):
        torch.testing.assert_close(torch.tensor(together, dtype=torch.float64), output)
        for got, x in zip(rest[:3], qkv, strict=True):
            torch.testing.assert_close(torch.tensor(got, dtype=torch.float64), x.grad)
        uneven, later, ids, positions, whole, pads = rest[3:]
        assert uneven == [[float(r) for r in range(ranks) for _ in range(r + 1)]] * 2
        assert later == [rank + 10 * r for r in range(ranks)]
        share, padded = (5 + pads) // ranks, [1, 2, 3, 4, 5] + [0] * pads
        assert pads == -5 % ranks and ids == [padded[rank * share : (rank + 1) * share]]
        expected = [0, 1, 2, 3, 4, *range(pads)]
        assert positions == [expected[rank * share : (rank + 1) * share]] and whole == [expected]


def test_without_a_group_nothing_changes():
    x = torch.arange(24.0).reshape(1, 3, 2, 4)
    assert u.gather_seq_scatter_heads(x, 1, 2) is x and u.gather_heads_scatter_seq(x, 2, 1) is x
    assert u.gather_outpus_and_unpad(x, 1, 1, 2) is x and torch.equal(u.slice_input_tensor(x, 1), x)
    ids, positions, pads = u.ulysses_pad_and_slice_inputs(torch.ones(1, 3), torch.zeros(3, 1, 3))
    assert (ids.shape, positions.shape, pads) == ((1, 3), (3, 1, 3), 0)
    assert u.ulysses_pad(torch.ones(1, 3), torch.zeros(3, 1, 3), 2)[1].shape == (3, 1, 4)


def test_heads_that_cannot_be_shared_are_refused():
    u.validate_ulysses_config(8, 4)
    with pytest.raises(AssertionError, match="ulysses_sequence_parallel_size=3 does not divide the model's 8"):
        u.validate_ulysses_config(8, 3)
