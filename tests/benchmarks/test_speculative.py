"""`make bench BENCH=speculative` at small sizes. Not covered: vLLM's rollouts, and the figures."""

import pandas as pd

from benchmarks import speculative
from benchmarks.rl_rollout import one_rank
from benchmarks.run import WANTED


def test_every_rollout_is_measured_on_every_batch(tiny_llama, monkeypatch):
    refine = {"name": "refine", "custom": {"window": 3, "noise_token_id": 3}}
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
