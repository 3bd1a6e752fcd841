"""Names of verl 0.7 whose work has no place elsewhere in this package."""

import sys
from types import SimpleNamespace
from unittest.mock import MagicMock

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import ShardingStrategy, fully_shard

from tests.helpers.ranks import run_ranks
from verl.utils import device, fsdp_utils, model
from verl.utils.checkpoint import BaseCheckpointManager
from verl.utils.tracking import ValidationGenerationsLogger
from verl.workers.config.actor import RouterReplayConfig
from verl.workers.fsdp_workers import get_sharding_strategy, get_vl_model_vision_tower


def test_masks_are_runs_of_ones():
    mask = model.create_random_mask(torch.zeros(50, 20), 0.6, 0.3, 0.2)
    lengths = mask.sum(1)
    begins = mask.argmax(1)
    assert lengths.min() >= 4 and lengths.max() <= 12 and begins.max() <= 6
    assert all(row[b : b + n].all() for row, b, n in zip(mask, begins, lengths, strict=True))


def test_there_is_no_npu():
    assert not device.is_torch_npu_available()


def test_samples_are_shown_by_every_logger_with_texts(monkeypatch):
    services = {name: MagicMock() for name in ("swanlab", "mlflow", "clearml", "volcengine_ml_platform.wandb")}
    for name, service in services.items():
        monkeypatch.setitem(sys.modules, name, service)
    monkeypatch.setitem(sys.modules, "volcengine_ml_platform", MagicMock())
    names = ["swanlab", "mlflow", "clearml", "vemlp_wandb"]
    ValidationGenerationsLogger().log(names, [["1+1", "2", 1.0]], 7)
    assert "2" in services["swanlab"].Text.call_args.args[0] and services["swanlab"].log.call_args.kwargs == {"step": 7}
    saved, name = services["mlflow"].log_dict.call_args.args
    assert saved["samples"] == [{"input": "1+1", "output": "2", "score": 1.0}] and name == "val/generations_7.json"
    report = services["clearml"].Task.current_task().get_logger().report_table
    assert report.call_args.kwargs["table_plot"] == [["input", "output", "score"], ["1+1", "2", 1.0]]
    assert services["volcengine_ml_platform.wandb"].Table.call_args.kwargs["data"] == [["1+1", "2", 1.0]]


def test_helpers_of_the_workers():
    assert get_sharding_strategy(SimpleNamespace(ndim=1)) is ShardingStrategy.FULL_SHARD
    assert get_sharding_strategy(SimpleNamespace(ndim=2), False) is ShardingStrategy._HYBRID_SHARD_ZERO2
    tower = torch.nn.Linear(1, 1)
    assert get_vl_model_vision_tower(SimpleNamespace(model=SimpleNamespace(visual=tower))) is tower
    assert get_vl_model_vision_tower(torch.nn.Linear(1, 1)) is None
    assert RouterReplayConfig().mode == "disabled"
    with pytest.raises(ValueError, match="R2"):
        RouterReplayConfig(mode="R2")


def filled(rank, world_size):
    """The whole weight that every rank holds part of, after only rank 0 had it; where init_fn puts a module."""
    mesh = init_device_mesh("cpu", (world_size,))
    with torch.device("meta"):
        module = torch.nn.Linear(4, 6)
    module = fsdp_utils.init_fn(module.to_empty(device="cpu") if rank == 0 else module)
    fully_shard(module, mesh=mesh)
    weights = {"weight": torch.arange(24.0).reshape(6, 4), "bias": torch.ones(6)} if rank == 0 else {}
    fsdp_utils.fsdp2_load_full_state_dict(module, weights, mesh)
    return fsdp_utils.fsdp_version(module), module.weight.full_tensor().tolist(), module.bias.full_tensor().tolist()


@pytest.mark.process
def test_a_sharded_module_is_filled_from_the_first_rank():
    weight = torch.arange(24.0).reshape(6, 4).tolist()
    assert run_ranks(filled, 2) == [(2, weight, [1.0] * 6)] * 2


def test_a_manager_of_ones_own_removes_what_it_saved(tmp_path):
    manager = BaseCheckpointManager(torch.nn.Linear(1, 1), None)
    (tmp_path / "old").mkdir()
    (tmp_path / "old" / "file").write_text("1")
    (tmp_path / "older").write_text("1")
    manager.remove_previous_save_local_path([str(tmp_path / "old"), tmp_path / "older", str(tmp_path / "gone")])
    assert list(tmp_path.iterdir()) == []
