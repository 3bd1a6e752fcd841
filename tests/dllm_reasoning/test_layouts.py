"""Shift, masks and windows of a six-token sample by hand."""

import pytest
import torch

from dllm_reasoning.config.iterative import IterativeConfig
from dllm_reasoning.losses import layouts
from dllm_reasoning.losses.layouts import IGNORED, build_layout
from tests.dllm_reasoning.models import samples

NOISE = 40
# instruction 10 11, response 12 13 14 EOS(2)
BATCH = {
    "input_ids": torch.tensor([[10, 11, 12, 13, 14, 2]]),
    "attention_mask": torch.ones(1, 6, dtype=torch.int64),
    "position_ids": torch.arange(6)[None],
    "response_mask": torch.tensor([[0, 0, 1, 1, 1, 1]]),
}


def settings(pattern, low=1.0, high=1.0, width=3, windows=2):
    return IterativeConfig(noise_pattern=pattern, noise_min=low, noise_max=high, block_length=width,
                           windows_per_sample=windows)  # fmt: skip


def bits(mask):
    return ["".join(str(int(x)) for x in row) for row in mask]


def test_rows_by_hand():
    layout = build_layout(BATCH, [0], settings("iid"), NOISE, split=False)
    assert layout.tail.ids.tolist() == [[10, 11, 40, 40, 40, 40]]
    assert layout.tail.labels.tolist() == [[IGNORED, 12, 13, 14, 2, IGNORED]]
    assert bits(layout.region) == ["001111"] and layout.prefix is None and layout.noised == 4


def test_packed_by_hand(monkeypatch):
    monkeypatch.setattr(layouts, "window_starts", lambda *drawn, **more: [0, 2])
    layout = build_layout(BATCH, [0], settings("packed"), NOISE, split=True)
    assert torch.equal(layout.prefix.ids, BATCH["input_ids"])
    assert layout.prefix.labels.tolist() == [[IGNORED, 12, 13, 14, 2, IGNORED]]
    # first window: last committed 11 at position 1; second: last committed 13 at position 3
    assert layout.tail.ids.tolist() == [[11, 40, 40, 13, 40, 40]]
    assert layout.tail.positions.tolist() == [[1, 2, 3, 3, 4, 5]]
    assert layout.tail.labels.tolist() == [[12, 13, 14, 14, 2, IGNORED]]
    assert bits(layout.region) == ["011011"]
    assert bits(layout.attention_mask[0]) == [
        "100000" + "100000",
        "100000" + "110000",
        "100000" + "111000",
        "111000" + "000100",
        "111000" + "000110",
        "111000" + "000111",
    ]


def test_windows_stay_in_the_response_and_are_drawn_by_row():
    batch = samples([3, 7], [9, 2])
    both = build_layout(batch, [5, 6], settings("packed", windows=50), NOISE, split=True)
    starts = both.tail.positions[:, ::3]
    assert sorted(set(starts[0].tolist())) == list(range(2, 11)) and sorted(set(starts[1].tolist())) == [6, 7]
    alone = {key: value[1:] for key, value in batch.items()}
    second = build_layout(alone, [6], settings("packed", windows=50), NOISE, split=True)
    assert torch.equal(second.tail.ids[0], both.tail.ids[1])
    assert torch.equal(second.attention_mask[0], both.attention_mask[1])


@pytest.mark.parametrize("pattern", ["iid", "suffix", "block", "trajectory", "packed"])
@pytest.mark.parametrize("split", [False, True])
def test_labels_are_counted_as_they_are_laid_out_and_none_of_a_filler_row(pattern, split):
    batch = samples([3, 4], [5, 2])
    batch["response_mask"] = batch["response_mask"] * torch.tensor([[1], [0]])
    layout = build_layout(batch, [5, 6], settings(pattern), NOISE, split=split)
    assert layout.tail.count() == layouts.count_labels(batch["response_mask"], [5, 6], settings(pattern)) > 0
    assert layout.tail.labels[1].eq(IGNORED).all()
