"""The parts of `make bench BENCH=environments` at small sizes: each runs to its end and gives its wanted results."""

import pytest

from benchmarks import environments, environments_gateway, environments_trees
from benchmarks.run import WANTED


def test_trees(tiny_llama, monkeypatch):
    small = dict(MODEL=tiny_llama, LENGTH=128, PREFIX=96, PROMPT=16, REPETITIONS=1)
    for name, value in small.items():
        assert hasattr(environments_trees, name)
        monkeypatch.setattr(environments_trees, name, value)
    rows = {row.name: row for row in environments_trees.run()}
    assert {name for name in WANTED if name.startswith("tree_")} <= rows.keys()
    for name in ("difference", "error", "error_alone"):
        assert rows[f"tree_update_gradient_{name}"].value < 1e-5
    assert environments_trees in environments.MODULES


@pytest.mark.benchmark
@pytest.mark.process
@pytest.mark.slow
def test_requests_through_the_gateway(monkeypatch):
    for name, value in (("REQUESTS", 5), ("REPETITIONS", 2), ("AGENTS", 4)):
        monkeypatch.setattr(environments_gateway, name, value)
    rows = {row.name: row for row in environments_gateway.run()}
    assert set(rows) == {"gateway_overhead_ms", "gateway_p95_ms_64", "gateway_exact_64"}
    assert rows["gateway_exact_64"].value == 1.0 and rows["gateway_p95_ms_64"].value > 0
