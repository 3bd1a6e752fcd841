"""Benchmarks of conversations that other programs have: the update on their trees, requests through the gateway."""

from benchmarks import environments_gateway, environments_trees
from benchmarks.harness import Row, run_modules

MODULES = (
    environments_gateway,
    environments_trees,
)  # fmt: skip


def run() -> list[Row]:
    """All rows."""
    return run_modules(MODULES)
