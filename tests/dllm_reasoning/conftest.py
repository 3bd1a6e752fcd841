"""Fixtures of refinement runs."""

import pytest

from tests.dllm_reasoning import runs


@pytest.fixture(scope="module")
def assets(tmp_path_factory):
    """A tiny model and 40 rows of data."""
    folder = tmp_path_factory.mktemp("dllm")
    return runs.save_model(folder / "model"), runs.save_rows(folder / "train.parquet", runs.sums(40))
