"""A frozen target is held in the dtype it computes in, next to a head in float32, on one rank and on two."""

import numpy as np
import pytest
from transformers import AutoModel

import spd_scorer  # noqa: F401  (its loader)
from tests.helpers.engines import leave_group, make_engine
from tests.helpers.ranks import run_ranks
from tests.spd.test_own_ranks import step
from verl.training.parallel.sharding import full_tensor
from verl.workers.config import PluginConfig

pytestmark = [pytest.mark.process]


@pytest.fixture(scope="module", autouse=True)
def lone_rank():
    yield
    leave_group()


def trained(rank: int, world_size: int, path: str, dtype: str, store: str | None):
    """(dtypes of backbone and head, metrics of two updates, the head's weights after them)."""
    if rank:  # reads no weights
        AutoModel.from_pretrained = None
    kwargs = {"compute_dtype": dtype, "spd": {"backbone": "target", "feature_store": store}}
    loader = PluginConfig(name="spd_scorer", kwargs=kwargs)
    engine = make_engine(path, loader=loader, engine={"dtype": dtype})
    parts = (engine.module.backbone, engine.module.head)
    dtypes = [sorted({str(p.dtype) for p in part.parameters()}) for part in parts]
    metrics = [step(engine, rank, world_size, seed) for seed in (1, 2)]
    features = engine.module.features
    kept = {str(t.dtype) for t in features._memory.values()} if features else set()
    return dtypes, metrics, {n: full_tensor(p).numpy() for n, p in engine.module.head.named_parameters()}, kept


def test_two_ranks_train_the_head_of_a_bfloat16_target_as_one_does(tied_llama, tmp_path):
    dtypes, metrics, weights, kept = trained(0, 1, tied_llama, "bfloat16", str(tmp_path / "one"))
    assert dtypes == [["torch.bfloat16"], ["torch.float32"]] and kept == {"torch.bfloat16"}
    for of_rank in run_ranks(trained, 2, tied_llama, "bfloat16", str(tmp_path / "two")):
        assert of_rank[0] == dtypes
        for name, value in of_rank[2].items():
            assert np.mean(np.abs(value - weights[name]) > 1e-3) < 0.02, name
    exact = trained(0, 1, tied_llama, "float32", None)
    assert exact[0] == [["torch.float32"], ["torch.float32"]]
    for name in ("actor/pg_loss", "actor/grad_norm"):  # the states have eight bits
        assert metrics[0][name] == pytest.approx(exact[1][0][name], rel=0.05, abs=0.02)
