"""Names of verl 0.7 whose work has no place elsewhere in this package."""

import json
import sys
from types import SimpleNamespace
from unittest.mock import MagicMock

import pandas as pd
import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import ShardingStrategy, fully_shard

from tests.helpers.ranks import run_ranks
from verl.utils import device, fsdp_utils, model, torch_functional
from verl.utils.checkpoint import BaseCheckpointManager
from verl.utils.checkpoint.checkpoint_handler import CheckpointHandler, OrchestrationMode, extract_step
from verl.utils.dataset.rm_dataset import RMDataset
from verl.utils.tracking import ValidationGenerationsLogger
from verl.workers.config.actor import RouterReplayConfig
from verl.workers.fsdp_workers import get_sharding_strategy, get_vl_model_vision_tower


class Engine:
    """Keeps a number in a file."""

    number = 0

    def save_checkpoint(self, local_path, hdfs_path=None, global_step=0, max_ckpt_to_keep=None):
        with open(f"{local_path}/number.json", "w") as file:
            json.dump(self.number, file)

    def load_checkpoint(self, local_path, hdfs_path=None, del_local_after_load=False):
        with open(f"{local_path}/number.json") as file:
            self.number = json.load(file)


class Loader:
    at = 0

    def state_dict(self):
        return {"at": self.at}

    def load_state_dict(self, state):
        self.at = state["at"]


def test_a_handler_publishes_and_resumes(tmp_path):
    engine, loader = Engine(), Loader()
    handler = CheckpointHandler(engine, loader, default_local_dir=str(tmp_path), max_ckpt_to_keep=2)
    assert handler.load_checkpoint() == 0
    for step in (1, 2, 3):
        engine.number = loader.at = 10 * step
        handler.save_checkpoint(step)
    assert sorted(p.name for p in tmp_path.glob("global_step_*")) == ["global_step_2", "global_step_3"]
    fresh, position = Engine(), Loader()
    mode = OrchestrationMode.RAY
    assert CheckpointHandler(fresh, position, default_local_dir=str(tmp_path), mode=mode).load_checkpoint() == 3
    assert (fresh.number, position.at) == (30, 30)
    named = {"resume_mode": "resume_path", "resume_from_path": str(tmp_path / "global_step_2")}
    assert CheckpointHandler(fresh, position, default_local_dir=str(tmp_path), **named).load_checkpoint() == 2
    assert (fresh.number, position.at) == (20, 20)
    assert CheckpointHandler(fresh, None, default_local_dir=str(tmp_path), resume_mode="disable").load_checkpoint() == 0
    assert extract_step("/a/global_step_17/actor") == 17 and extract_step("/a/latest") is None
    with pytest.raises(ValueError, match="resume_mode='never'"):
        CheckpointHandler(engine, loader, default_local_dir=str(tmp_path), resume_mode="never")


def test_a_save_that_fails_publishes_nothing(tmp_path):
    engine = MagicMock()
    engine.save_checkpoint.side_effect = OSError("no")
    with pytest.raises(OSError, match="no"):
        CheckpointHandler(engine, None, default_local_dir=str(tmp_path)).save_checkpoint(1)
    assert not list(tmp_path.glob("global_step_*"))


def test_preference_pairs_are_padded_on_the_right(tmp_path, tiny_llama):
    rows = [{"prompt": "1 + 1 = ", "chosen": "2", "rejected": "11"}, {"prompt": "a", "chosen": "b", "rejected": "c"}]
    pd.DataFrame(rows).to_parquet(tmp_path / "pairs.parquet")
    data = RMDataset(str(tmp_path / "pairs.parquet"), str(tiny_llama), max_length=24, max_samples=1)
    item = data[0]
    assert len(data) == 1 and item["input_ids"].shape == item["attention_mask"].shape == (2, 24)
    for row, answer in enumerate(("2", "11")):
        ids = item["input_ids"][row][item["attention_mask"][row].bool()]
        text = f"1 + 1 = {answer}{data.tokenizer.eos_token}"
        assert ids.tolist() == data.tokenizer(text, add_special_tokens=False)["input_ids"]
        assert item["attention_mask"][row].tolist() == [1] * len(ids) + [0] * (24 - len(ids))


def test_packed_rows_are_padded_to_a_multiple():
    tokens, borders = torch.arange(1, 6), torch.tensor([0, 2, 5], dtype=torch.int32)
    padded, moved, longest = model.pad_packed_inputs(tokens, borders, 3, 4)
    assert padded.tolist() == [1, 2, 3, 4, 5, 0, 0, 0] and moved.tolist() == [0, 2, 8] and longest == 6
    assert model.pad_packed_inputs(tokens, borders, 3, 5)[1] is borders and borders.tolist() == [0, 2, 5]


def test_masks_are_runs_of_ones():
    mask = model.create_random_mask(torch.zeros(50, 20), 0.6, 0.3, 0.2)
    lengths = mask.sum(1)
    begins = mask.argmax(1)
    assert lengths.min() >= 4 and lengths.max() <= 12 and begins.max() <= 6
    assert all(row[b : b + n].all() for row, b, n in zip(mask, begins, lengths, strict=True))


def test_weights_of_pipeline_stages_get_the_models_numbers():
    stages = [[{"layers.0.w": f"{rank}{chunk}"} for chunk in range(2)] for rank in range(2)]
    named = dict(model.normalize_pp_vpp_params(stages, 4))
    assert named == {"layers.0.w": "00", "layers.1.w": "10", "layers.2.w": "01", "layers.3.w": "11"}
    with pytest.raises(NotImplementedError, match="FSDP2"):
        model.load_mcore_dist_weights(None, "path")


def test_inputs_of_samples_are_joined():
    samples = [{"pixels": torch.ones(1, 2)}, {}, {"pixels": torch.zeros(2, 2), "grid": torch.ones(1)}]
    joined = model.extract_multi_modal_inputs(samples)
    assert joined["pixels"].shape == (3, 2) and joined["grid"].shape == (1,)
    assert list(model.extract_multi_modal_inputs(samples, [0])) == ["pixels"]


def test_a_causal_mask_hides_padding():
    mask = torch_functional.prepare_decoder_attention_mask(torch.tensor([[0, 1, 1]]), (1, 3), torch.zeros(1, 3, 4))
    assert (mask[0, 0] == 0).tolist() == [[False] * 3, [False, True, False], [False, True, True]]
    assert mask.min() == torch.finfo(torch.float32).min
    assert torch_functional.prepare_decoder_attention_mask(None, (1, 1), torch.zeros(1, 1, 4)) is None
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
