"""The parts of `make bench BENCH=environments` at small sizes: each runs to its end and gives its wanted results."""

from benchmarks import environments, environments_trees
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
