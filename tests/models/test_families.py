"""Tiny models of each family: the default layout of batches, LoRA, rollout hf, and checkpoints that are merged."""

import pytest
import torch

from tests.helpers.engines import leave_group
from tests.models.checks import merged_logits, observed, stored
from tests.models.families import FAMILIES


@pytest.fixture(scope="module", autouse=True)
def lone_rank():
    yield
    leave_group()


def test_the_table_names_at_least_25_families_that_work():
    table = stored()
    assert list(table) == list(FAMILIES)
    assert sum("refused" not in row.values() for row in table.values()) >= 25


@pytest.mark.parametrize("name", FAMILIES)
def test_a_family_does_what_the_table_says(name):
    assert observed(name) == stored()[name]


@pytest.mark.parametrize("name", FAMILIES)
def test_a_merged_checkpoint_gives_the_logits_of_its_engine(name, tmp_path):
    assert torch.equal(*merged_logits(name, tmp_path))
