"""What a rank keeps between micro-batches and while a model is loaded, on four gloo ranks; types of buffers."""

import gc

import pytest
import torch
from transformers import LlamaForCausalLM

from tests.helpers.engines import make_engine
from tests.helpers.models import save_tiny_llama
from tests.helpers.ranks import run_ranks
from verl.training.parallel.sharding import full_tensor, load_fsdp_optimizer, local_tensor


def bytes_of_tensors() -> int:
    """Bytes of the storages of all tensors that Python can reach, gradients of parameters included."""
    gc.collect()
    tensors = [thing for thing in gc.get_objects() if issubclass(type(thing), torch.Tensor)]
    tensors += [t.grad for t in tensors if isinstance(t, torch.nn.Parameter) and t.grad is not None]
    storages = [local_tensor(t).untyped_storage() for t in tensors if t.layout is torch.strided and not t.is_meta]
    return sum({storage.data_ptr(): storage.nbytes() for storage in storages}.values())


def gradients_of_four(rank, world_size, path, settings):
    """(bytes per parameter of gradients after the first of two micro-batches, full gradients after the second)."""
    engine = make_engine(path, optim={"optimizer": "SGD"}, engine=settings)
    parameters = list(engine.module.parameters())
    ids = torch.arange(5, 29).reshape(2, 12) + rank
    with engine.train_mode():
        before = bytes_of_tensors()
        engine.backward(engine.module(input_ids=ids, labels=ids).loss, is_last_micro_batch=False)
        kept = (bytes_of_tensors() - before) / sum(p.numel() for p in parameters)
        engine.backward(engine.module(input_ids=ids + 2, labels=ids + 2).loss, is_last_micro_batch=True)
        return kept, [full_tensor(p.grad).tolist() for p in parameters]


@pytest.mark.process
@pytest.mark.slow
def test_gradients_are_sharded_after_every_micro_batch_unless_deferred(tmp_path):
    """4 bytes of float32 per parameter on 4 ranks: 1 sharded, 4 whole. Cosines and the like are the tolerance."""
    path = save_tiny_llama(tmp_path / "model", hidden=128)
    settings = ({}, {"defer_gradient_sync": True}, {"fsdp_size": 2})
    sharded, whole, hybrid = ([of_rank for of_rank in run_ranks(gradients_of_four, 4, path, s)] for s in settings)
    assert all(kept == pytest.approx(1, abs=0.05) for kept, _ in sharded)
    assert all(kept > 3.9 for kept, _ in whole)
    assert all(kept == pytest.approx(2, abs=0.05) for kept, _ in hybrid)
    for other in (whole, hybrid):
        for a, b in zip(sharded[0][1], other[0][1], strict=True):
            torch.testing.assert_close(torch.tensor(a), torch.tensor(b), rtol=1e-5, atol=1e-7)


def test_rotary_frequencies_stay_float32_next_to_bfloat16_weights(tiny_llama):
    """Cosines of positions to 32k against float64; frequencies in bfloat16 are off by 0.9 at position 1,000."""
    engine = make_engine(tiny_llama, engine={"model_dtype": "bfloat16"})
    assert {p.dtype for p in engine.module.parameters()} == {torch.bfloat16}
    rotary = engine.module.model.rotary_emb
    exponents = torch.arange(0, 32, 2, dtype=torch.float64) / 32  # heads of dimension 32
    positions = torch.tensor([0, 1, 1000, 8191, 32767])
    angles = positions[:, None].double() / 10000**exponents
    cos, _ = rotary(torch.zeros(1, dtype=torch.float32), positions[None])
    # float32 holds an angle of 32767 to 2e-3
    torch.testing.assert_close(cos[0, :, :16].double(), angles.cos(), rtol=0, atol=4e-3)
    reference = LlamaForCausalLM.from_pretrained(tiny_llama).model.rotary_emb
    assert torch.equal(rotary.inv_freq, reference.inv_freq)


@pytest.mark.parametrize(("option", "counter"), [("maximize", "cpu"), ("fused", "meta"), ("capturable", "meta")])
def test_an_offloaded_optimizer_comes_back_where_its_options_want_it(option, counter):
    """The meta device in place of a GPU."""
    weight = torch.nn.Parameter(torch.ones(3))
    optimizer = torch.optim.AdamW([weight])
    weight.grad = torch.ones(3)
    optimizer.step()
    optimizer.param_groups[0][option] = True
    load_fsdp_optimizer(optimizer, "meta")
    state = optimizer.state[weight]
    assert (state["step"].device.type, state["exp_avg"].device.type) == (counter, "meta")
