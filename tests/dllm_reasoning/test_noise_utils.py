"""Noise by hand: rate, region, schedules, the decode step."""

import math

import pytest
import torch

from dllm_reasoning.utils import noise_utils as nu

IDS = torch.tensor([[10, 11, 12, 13, 14, 2]])
ANSWERS = torch.tensor([[0, 0, 1, 1, 1, 1]])


def test_decode_step_by_hand_shifts_the_prediction_by_one():
    predicted = torch.tensor([[20, 21, 22, 23, 24, 25]])
    assert nu.greedy_decode_response(IDS, predicted, ANSWERS).tolist() == [[10, 11, 21, 22, 23, 24]]
    part = torch.tensor([[0, 0, 0, 1, 1, 0]])
    assert nu.greedy_decode_response(IDS, predicted, part).tolist() == [[10, 11, 12, 22, 23, 2]]


@pytest.mark.parametrize("level", [0.0, 0.1, 0.5, 1.0])
def test_iid_noise_hits_at_the_level(level):
    noised, region = nu.PATTERNS["iid"].positions(20000, level, 8, nu.row_generator(1))
    assert abs(float(noised.float().mean()) - level) < 0.011 and bool(region.all())


def test_suffix_runs_from_a_cut_to_the_end():
    cuts = set()
    for seed in range(200):
        noised, region = nu.PATTERNS["suffix"].positions(5, 0.5, 8, nu.row_generator(seed))
        text = "".join(str(int(x)) for x in noised)
        assert text.lstrip("0") == "1" * text.count("1") and torch.equal(noised, region)
        cuts.add(text.count("1"))
    assert cuts == {1, 2, 3, 4, 5}


@pytest.mark.parametrize(("length", "width", "ones"), [(10, 4, 4), (3, 4, 3)])
def test_block_is_one_run_of_the_width(length, width, ones):
    firsts = set()
    for seed in range(200):
        noised, _ = nu.PATTERNS["block"].positions(length, 0.5, width, nu.row_generator(seed))
        text = "".join(str(int(x)) for x in noised)
        assert text.strip("0") == "1" * ones
        firsts.add(text.index("1"))
    assert firsts == set(range(max(1, length - width + 1)))


def test_uniform_level_spreads_over_its_range():
    drawn = torch.tensor([nu.noise_level("uniform", 0.1, 0.9, 0.3, nu.row_generator(s)) for s in range(4000)])
    assert drawn.min() >= 0.1 and drawn.max() <= 0.9
    assert abs(float(drawn.mean()) - 0.5) < 0.015 and abs(float(drawn.std()) - 0.8 / math.sqrt(12)) < 0.01


@pytest.mark.parametrize(
    ("schedule", "progress", "expected"),
    [("linear", 0.0, 0.1), ("linear", 0.25, 0.3), ("linear", 1.0, 0.9), ("linear", 2.0, 0.9), ("cosine", 0.0, 0.1),
     ("cosine", 0.5, 0.5), ("cosine", 0.25, 0.1 + 0.8 * (1 - math.sqrt(0.5)) / 2), ("cosine", 1.0, 0.9)],
)  # fmt: skip
def test_schedules_rise_with_the_run(schedule, progress, expected):
    assert nu.noise_level(schedule, 0.1, 0.9, progress, nu.row_generator(0)) == pytest.approx(expected)


def test_an_empty_response_has_no_noise_and_windows_at_0():
    for pattern in ("iid", "suffix", "block"):
        assert [len(t) for t in nu.PATTERNS[pattern].positions(0, 0.5, 4, nu.row_generator(0))] == [0, 0]
    assert nu.window_starts(0, 3, nu.row_generator(0)) == [0, 0, 0]


def test_windows_are_spread_evenly_and_begin_everywhere_alike(monkeypatch):
    monkeypatch.setattr(torch, "rand", lambda *size, **more: torch.tensor(0.25))
    assert nu.window_starts(10, 4, None) == [0, 3, 5, 8]  # 0.625, 3.125, 5.625, 8.125
    assert nu.window_starts(3, 4, None) == [0, 0, 1, 2]  # fewer positions than windows
    # half of them at 0, 4 or 8, where blocks of 4 begin
    assert nu.window_starts(10, 4, None, width=4, aligned=0.5) == [0, 4, 1, 6]
    monkeypatch.undo()
    drawn = [start for seed in range(2000) for start in nu.window_starts(10, 4, nu.row_generator(seed))]
    counts = torch.bincount(torch.tensor(drawn), minlength=10) / len(drawn)
    assert (counts - 0.1).abs().max() < 0.01
    aligned = [nu.window_starts(10, 2, nu.row_generator(seed), width=4, aligned=1) for seed in range(50)]
    assert {start for starts in aligned for start in starts} == {0, 4, 8}
