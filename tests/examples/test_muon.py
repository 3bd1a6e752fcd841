"""Muon with AdamW: the step by hand, both kinds of parameters, one gloo rank against two, an exact resume.

Not covered: CUDA, meshes of two dimensions.
"""

import numpy as np
import pytest
import torch

from examples.muon import MuonWithAdamW
from tests.helpers.engines import make_actor, make_engine, rl_batch, weights_of
from tests.helpers.ranks import run_ranks

OPTIM = {"optimizer_impl": "examples.muon", "optimizer": "MuonWithAdamW", "lr": 0.02, "weight_decay": 0.0}


def test_a_matrix_moves_by_about_the_rate_along_each_singular_direction():
    """Twice as many rows as columns: sqrt 2. Five steps of Newton-Schulz leave singular values between 0.7 and 1.2."""
    start, g = torch.zeros(4, 2), torch.Generator().manual_seed(0)
    p = torch.nn.Parameter(start.clone())
    optimizer = MuonWithAdamW([("layers.0.up.weight", p)], lr=0.1, weight_decay=0.5)
    p.grad = torch.randn(4, 2, generator=g)
    u, _, v = torch.linalg.svd(p.grad, full_matrices=False)
    optimizer.step()
    along = torch.diagonal(u.T @ -p.detach() @ v.T) / (0.1 * 2**0.5)  # where the orthogonal matrix u v would have ones
    assert ((along > 0.65) & (along < 1.25)).all()
    assert torch.allclose(u @ torch.diag(along) @ v * (0.1 * 2**0.5), -p.detach(), atol=1e-5)


def test_muon_agrees_with_torch_up_to_its_bfloat16():
    torch.manual_seed(0)
    ours = [torch.nn.Parameter(torch.randn(64, 32)), torch.nn.Parameter(torch.randn(32, 64))]
    theirs = [torch.nn.Parameter(p.detach().clone()) for p in ours]
    named = [(f"layers.{i}.up", p) for i, p in enumerate(ours)]
    optimizers = MuonWithAdamW(named, lr=0.1), torch.optim.Muon(theirs, lr=0.1, weight_decay=0.0)
    for _ in range(3):
        for a, b in zip(ours, theirs, strict=True):
            a.grad = torch.randn_like(a)
            b.grad = a.grad.clone()
        for optimizer in optimizers:
            optimizer.step()
    torch.testing.assert_close(ours, theirs, atol=0.01, rtol=0.0)


def test_embeddings_head_and_vectors_are_stepped_by_adamw():
    names = ("model.embed_tokens.weight", "lm_head.weight", "model.layers.0.norm.weight")
    mine, theirs = ([torch.nn.Parameter(torch.ones(shape)) for shape in ((5, 2), (5, 2), (2,))] for _ in range(2))
    optimizer = MuonWithAdamW(list(zip(names, mine, strict=True)), weight_decay=0.1, adamw_lr=0.3, betas=(0.8, 0.9))
    reference = torch.optim.AdamW(theirs, lr=0.3, weight_decay=0.1, betas=(0.8, 0.9))
    for step in range(3):
        for p, q in zip(mine, theirs, strict=True):
            p.grad = torch.full_like(p, step - 0.5)
            q.grad = p.grad.clone()
        optimizer.step()
        reference.step()
    assert all(torch.equal(p, q) for p, q in zip(mine, theirs, strict=True))


def trained(rank, world_size, path, folder):
    """Weights after three updates; the third, repeated from a checkpoint, is bit-for-bit the same."""

    def update(engine, seed):
        rows = 8 // world_size
        batch = rl_batch(seed=seed)[rank * rows : (rank + 1) * rows]
        make_actor(engine, mini=rows, micro=2).update_policy(batch)

    engine = make_engine(path, optim=OPTIM)
    assert type(engine.optimizer) is MuonWithAdamW
    assert [len(group["params"]) for group in engine.optimizer.param_groups] == [14, 7]
    for seed in (1, 2):
        update(engine, seed)
    engine.save_checkpoint(folder, global_step=2)
    update(engine, 3)
    weights = weights_of(engine)
    again = make_engine(path, optim=OPTIM)
    again.load_checkpoint(folder)
    update(again, 3)
    assert all(np.array_equal(value, weights[name]) for name, value in weights_of(again).items())
    return {name: value for name, value in weights.items() if value.size <= 4096}


@pytest.mark.slow
def test_two_ranks_step_as_one_and_a_resume_is_exact(tiny_llama, tmp_path):
    one = trained(0, 1, tiny_llama, str(tmp_path / "one"))
    for of_rank in run_ranks(trained, 2, tiny_llama, str(tmp_path / "two")):
        for name, value in of_rank.items():
            assert np.mean(np.abs(value - one[name]) > 1e-4) < 0.01, name
