"""Masks and positions of [Context] SEP [Draft] SEP [Target] SEP, by hand on a sequence of 11 tokens."""

import pytest
import torch

from spd_scorer import create_hybrid_attention_mask, create_position_ids, create_spd_attention_mask

# one padding column, context of 2, draft of 2:  p c c S d d S t t t S
#                                                0 1 2 3 4 5 6 7 8 9 10
MASK = torch.tensor([[0] + [1] * 10])
LAYOUT = torch.tensor([[1, 2, 4, 2, 7]])

SPD = """
 1 0 0 0 0 0 0 0 0 0 0
 0 1 0 0 0 0 0 0 0 0 0
 0 1 1 0 0 0 0 0 0 0 0
 0 1 1 1 0 0 0 0 0 0 0
 0 1 1 1 1 0 0 0 0 0 0
 0 1 1 1 1 1 0 0 0 0 0
 0 1 1 1 1 1 1 0 0 0 0
 0 1 1 1 1 0 0 1 0 0 0
 0 1 1 1 1 1 0 1 1 0 0
 0 1 1 1 1 1 0 1 1 1 0
 0 1 1 1 1 1 0 1 1 1 1
"""
HYBRID = """
 1 0 0 0 0 0 0 0 0 0 0
 0 1 0 0 0 0 0 0 0 0 0
 0 1 1 0 0 0 0 0 0 0 0
 0 1 1 1 0 0 0 0 0 0 0
 0 1 1 1 1 1 0 1 1 1 0
 0 1 1 1 1 1 0 1 1 1 0
 0 1 1 1 1 1 1 0 0 0 0
 0 1 1 1 1 1 0 1 1 1 0
 0 1 1 1 1 1 0 1 1 1 0
 0 1 1 1 1 1 0 1 1 1 0
 0 1 1 1 1 1 0 1 1 1 1
"""


def by_hand(text: str) -> torch.Tensor:
    return torch.tensor([[int(x) for x in line.split()] for line in text.strip().splitlines()]).bool()


@pytest.mark.parametrize("make, expected", [(create_spd_attention_mask, SPD), (create_hybrid_attention_mask, HYBRID)])
def test_mask_is_the_one_written_by_hand(make, expected):
    mask = make(MASK, LAYOUT)
    assert mask.shape == (1, 1, 11, 11)
    assert torch.equal(mask[0, 0] == 0, by_hand(expected))
    assert (mask[0, 0][~by_hand(expected)] == torch.finfo(torch.float32).min).all()


def test_positions_by_hand():
    assert create_position_ids(MASK, LAYOUT).tolist() == [[0, 0, 1, 2, 3, 4, 5, 6, 7, 8, 9]]
    # SEP 2, d 3 4, second SEP 5, t 3 4 5, third SEP 6
    for attention in ("spd", "hybrid"):
        assert create_position_ids(MASK, LAYOUT, attention).tolist() == [[0, 0, 1, 2, 3, 4, 5, 3, 4, 5, 6]]
