"""Random batches for the references of the algorithms: shapes, masks and numbers in double."""

import torch
from hypothesis import strategies as st
from torch import Tensor


@st.composite
def masks(draw, rows: int | None = None, max_rows: int = 4, max_width: int = 4) -> Tensor:
    """[B, T] int64, 1 = counted: ragged answers or holes anywhere; some rows count nothing."""
    rows = draw(st.integers(1, max_rows)) if rows is None else rows
    width = draw(st.integers(1, max_width))
    if draw(st.booleans()):
        lengths = draw(st.lists(st.integers(0, width), min_size=rows, max_size=rows))
        return torch.tensor([[int(t < n) for t in range(width)] for n in lengths])
    bits = st.lists(st.integers(0, 1), min_size=width, max_size=width)
    return torch.tensor(draw(st.lists(bits, min_size=rows, max_size=rows)))


seeds = st.integers(0, 10**6)


def normal(seed: int, *shape: int, scale: float = 1.0) -> Tensor:
    """Normal numbers, float64 `shape`."""
    return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed)) * scale


def counted(mask: Tensor) -> list[list[int]]:
    """The counted positions of each row, in order."""
    return [[t for t in range(mask.shape[1]) if mask[i, t]] for i in range(mask.shape[0])]


def junk_outside(values: Tensor, mask: Tensor) -> Tensor:
    """`values` with large numbers where `mask` is 0: code that reads there fails the test. [B, T] -> [B, T]."""
    return torch.where(mask.bool(), values, 40.0 * values.sign() + 3.0)
