"""Tiny models of each family: the default layout of batches, LoRA, rollout hf, and checkpoints that are merged."""

import importlib

import pytest
import torch

from tests.helpers.engines import leave_group
from tests.models.checks import UNSHARED, layouts, merged_logits, observed, stored
from tests.models.families import FAMILIES, model_of


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
    assert observed(name).items() <= stored()[name].items()


@pytest.mark.parametrize("name", FAMILIES)
def test_a_merged_checkpoint_gives_the_logits_of_its_engine(name, tmp_path):
    assert torch.equal(*merged_logits(name, tmp_path))


#: Functions of transformers' mixers -> the dimension of tokens in their inputs.
MIXERS = {"causal_conv1d_fn": 2, "torch_chunk_gated_delta_rule": 1, "mamba2_chunk_scan": 1}


def with_boundaries(reference, dim):
    """A stand-in for a CUDA kernel: transformers' PyTorch function for each segment of the one row."""

    def kernel(*args, seq_idx=None, cu_seqlens=None, **kwargs):
        tokens = args[0].shape[dim]
        if seq_idx is not None:
            assert seq_idx.dtype == torch.int32 and seq_idx.shape == (1, tokens)
            sizes = seq_idx[0].unique_consecutive(return_counts=True)[1].tolist()
        elif cu_seqlens is not None:
            assert cu_seqlens[0] == 0 and cu_seqlens[-1] == tokens
            sizes = cu_seqlens.diff().tolist()
        else:
            return reference(*args, **kwargs)

        def part(value, k):
            has_tokens = isinstance(value, torch.Tensor) and value.dim() > 2 and value.shape[dim] == tokens
            return value.split(sizes, dim)[k] if has_tokens else value

        outputs = []
        for k in range(len(sizes)):
            named = {name: part(value, k) for name, value in kwargs.items()}
            outputs.append(reference(*(part(value, k) for value in args), **named))
        if isinstance(outputs[0], tuple):  # with the last state
            return torch.cat([output for output, _ in outputs], dim), None
        return torch.cat(outputs, dim)

    return kernel


BOUNDED = ("LFM2", "Qwen3-Next", "Qwen3.5", "Bamba", "Falcon-H1", "Granite hybrid", "Nemotron-H")


@pytest.mark.parametrize("name", BOUNDED)
def test_kernels_that_take_boundaries_of_segments_make_flat_rows_right(name, monkeypatch):
    model = model_of(name)
    module = importlib.import_module(type(model).__module__)
    for function, dim in MIXERS.items():
        if hasattr(module, function):
            monkeypatch.setattr(module, function, with_boundaries(getattr(module, function), dim))
    assert layouts(model) == UNSHARED
