"""`make bench BENCH=speculative` at small sizes. Not covered: vLLM's rollouts, and the figures."""

import pandas as pd
import pytest
import torch

from benchmarks import lossless, speculative
from benchmarks.rl_rollout import one_rank
from benchmarks.run import WANTED


def test_every_rollout_is_measured_on_every_batch(tiny_llama, monkeypatch):
    refine = {"name": "refine", "custom": lossless.REFINE}
    monkeypatch.setattr(speculative, "ROLLOUTS", {"hf": {"name": "hf"}, "refine": refine})
    for name, value in {"LIMIT": 8, "REPETITIONS": 1, "SHORTEST": 2, "LONGEST": 9}.items():
        monkeypatch.setattr(speculative, name, value)
    monkeypatch.setattr(speculative, "CALLS", dict.fromkeys(speculative.CALLS, 1))
    outputs = ["a b c", *["a b c d e f g h"] * 2]
    table = pd.DataFrame({"instruction": ["q : 1"] * 3, "output": outputs})
    batches = speculative.batches_of(table, tiny_llama)
    assert batches.keys() == speculative.WALL.keys()
    lengths = batches["tail"][0].batch["attention_mask"].sum(-1) - 3
    assert (9 - lengths).tolist() == [2, 9]  # what is left, with the end token
    with one_rank():
        rows = {row.name: row for row in speculative.measure(tiny_llama, batches)}
    assert rows["refine_same_samples"].value == 1 and rows["tokens_per_forward_refine_1"].value >= 1
    assert {name for name in WANTED if name.startswith("refine_")} <= rows.keys()


def test_the_distribution_test_sees_samples_that_are_not_the_policys(monkeypatch):
    chosen = {name: settings for name, settings in lossless.rollouts(None).items() if settings["name"] == "refine"}
    monkeypatch.setattr(lossless, "rollouts", lambda draft: chosen)
    monkeypatch.setattr(lossless, "SAMPLES", 1500)
    rows = {row.name: row.value for row in lossless.run()}
    assert min(rows["p_value_refine_slide"], rows["p_value_refine_verify"]) >= 0.001 > rows["p_value_lenient"]
    assert all(rows[f"toy_tokens_per_forward_{name}"] > 1 for name in chosen)
    assert {name for name in WANTED if name.startswith("p_value_refine") or name == "p_value_lenient"} <= rows.keys()


def test_p_value_by_hand():
    log_probs = torch.tensor([[1 / 2], [1 / 6], [1 / 6], [1 / 6]]).log()
    numbers = torch.tensor([0] * 1230 + [1] * 390 + [2] * 390 + [3] * 390)
    # 30^2 / 1200 + 3 * 10^2 / 400 = 1.5, of 3 degrees of freedom
    assert lossless.p_value(numbers, log_probs) == pytest.approx(0.68227, abs=1e-4)
