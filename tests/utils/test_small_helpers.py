"""Imports by name, files, configs, metrics, groups: one small claim each."""

import math
import os
import shutil
import subprocess
import sys
import time
from dataclasses import FrozenInstanceError, dataclass, field
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from omegaconf import OmegaConf
from transformers import LlamaConfig, LlavaConfig

from tests.helpers.engines import leave_group
from verl.config.base import BaseConfig
from verl.models.loading import update_model_config
from verl.trainer.config import AlgoConfig
from verl.training.checkpoint import should_save_ckpt_esi
from verl.utils import distributed, fs, hf_processor, hf_tokenizer, ray_utils
from verl.utils import import_utils as imp
from verl.utils.groupwise import as_torch_index
from verl.utils.metric import reduce_metrics
from verl.workers.config import FSDPOptimizerConfig


@pytest.mark.parametrize(("backend", "seconds"), [("nccl", 36000), ("gloo", 600)])
def test_ranks_on_gpus_wait_longer_on_the_host_than_their_collectives_may_take(monkeypatch, backend, seconds):
    """Gloo in place of NCCL."""
    start = dist.init_process_group
    monkeypatch.setattr(distributed, "get_nccl_backend", lambda: backend)
    monkeypatch.setattr(dist, "init_process_group", lambda kind, **more: start(kind.replace("nccl", "gloo"), **more))
    for name, value in {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"}.items():
        monkeypatch.setenv(name, value)
    leave_group()
    distributed.initialize_global_process_group_ray(600)
    limit = dist.group.WORLD._get_backend(torch.device("cpu")).options._timeout
    leave_group()
    assert limit.total_seconds() == seconds


@pytest.mark.process
def test_floor_one_starts_without_ray_vllm_and_transformers():
    code = (
        "import sys, verl.protocol, verl.utils.torch_functional, verl.protocol.seqlen_balancing, verl.utils.ray_utils, "
        "verl.utils.distributed, verl.utils.fs, verl.utils.tokenizer; "
        "print([m for m in ('ray', 'vllm', 'transformers', 'hydra') if m in sys.modules])"
    )
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stdout.strip() == "[]"


def test_modules_load_from_path_url_and_package(tmp_path):
    file = tmp_path / "mine.py"
    file.write_text("def compute_score():\n    return 7\n")
    for path in (str(file), f"file://{file}"):
        assert imp.load_extern_object(path, "compute_score")() == 7
    assert imp.load_extern_object("pkg://json", "loads")("1") == 1
    assert imp.load_module("") is None
    with pytest.raises(AttributeError, match="no module path is given for 'f'"):
        imp.load_extern_object(None, "f")
    with pytest.raises(AttributeError, match="has no 'score'; it has: compute_score"):
        imp.load_extern_object(str(file), "score")
    with pytest.raises(FileNotFoundError, match="no Python file at"):
        imp.load_module(str(tmp_path / "none.py"))
    with pytest.warns(FutureWarning, match="use load_extern_object"):
        assert imp.load_extern_type(str(file), "compute_score")() == 7
    assert imp.load_extern_type.__name__ == "load_extern_type"


def test_a_class_is_loaded_by_its_full_name():
    assert imp.load_class_from_fqn("collections.OrderedDict").__name__ == "OrderedDict"
    with pytest.raises(ValueError, match="sampler 'Nothing' must be a full dotted name"):
        imp.load_class_from_fqn("Nothing", "sampler")
    with pytest.raises(ImportError, match="no_such_module"):
        imp.load_class_from_fqn("no_such_module.A")
    with pytest.raises(AttributeError, match="has no 'Nothing'"):
        imp.load_class_from_fqn("collections.Nothing")


def test_metrics_are_reduced_by_the_word_in_their_name():
    got = reduce_metrics({"a/max": [1, 3], "a/min": [[1, 2], 3], "timing_s/gen": [1, 3], "loss": [torch.tensor(2.0)]})
    assert got == {"a/max": 3, "a/min": 1, "timing_s/gen": 2, "loss": 2}
    assert math.isnan(reduce_metrics({"loss": []})["loss"])


def test_groups_are_numbered_in_order_of_appearance():
    assert as_torch_index(["b", "a", "b", "c"]).tolist() == [0, 1, 0, 2]


@dataclass
class Optim(BaseConfig):
    _mutable_fields = {"steps"}
    lr: float = 1e-3
    steps: int = -1
    betas: list = field(default_factory=lambda: [0.9, 0.95])


def test_a_config_is_a_mapping_whose_fields_are_set_once():
    config = Optim(lr=1.0)
    assert config["lr"] == config.get("lr") == 1.0 and config.get("none", 4) == 4
    assert set(config) == {"_target_", "lr", "steps", "betas"} and len(config) == 4 and "lr" in config
    config.steps = 10
    with pytest.raises(FrozenInstanceError, match="Optim.lr is already set to 1.0 and cannot become 2.0"):
        config.lr = 2.0
    with pytest.raises(AttributeError, match="did you mean 'betas'"):
        config["beta"]
    with pytest.raises(TypeError, match="indexed by names, not by 0"):
        config[0]
    object.__setattr__(config, "added", 3)  # no field
    assert config["added"] == config.get("added") == 3 and "added" in config and "beta" not in config


def test_local_paths_stay_and_copies_are_compared(tmp_path, monkeypatch):
    (tmp_path / "m").mkdir()
    (tmp_path / "m" / "w.bin").write_bytes(b"12")
    assert fs.copy_to_local(str(tmp_path / "m")) == str(tmp_path / "m")
    assert not fs.verify_copy(str(tmp_path / "m"), str(tmp_path / "none"))
    assert fs.is_non_local("hdfs://x/y") and not fs.is_non_local("/x")
    monkeypatch.setenv("PATH", "")
    with pytest.raises(FileNotFoundError, match="`hdfs` command is not on PATH"):
        fs.copy_to_local("hdfs://x/y", cache_dir=str(tmp_path / "cache"))


@pytest.mark.process
def test_files_are_copied_into_folders_and_to_hdfs(tmp_path, monkeypatch):
    source, remote = tmp_path / "step", tmp_path / "remote"
    source.mkdir()
    (source / "w").write_text("new")
    (tmp_path / "tracker").write_text("7")
    (remote / "step").mkdir(parents=True)
    (remote / "step" / "old").touch()
    fs.copy_into([source, tmp_path / "tracker"], str(remote))
    assert [f.name for f in (remote / "step").iterdir()] == ["w"] and (remote / "tracker").read_text() == "7"
    command = tmp_path / "bin" / "hdfs"
    command.parent.mkdir()
    command.write_text(f'#!/bin/sh\necho "$@" >> {tmp_path}/called\n[ "$2" = -mkdir ]\n')
    command.chmod(0o755)
    monkeypatch.setenv("PATH", f"{command.parent}:/bin:/usr/bin")
    with pytest.raises(subprocess.CalledProcessError):  # of -put
        fs.copy_into([source], "hdfs://a/b")
    lines = (tmp_path / "called").read_text().splitlines()
    assert lines == ["dfs -mkdir -p hdfs://a/b", f"dfs -put -f {source} hdfs://a/b"]


def test_a_text_model_has_a_tokenizer_and_no_processor(tiny_llama):
    assert hf_tokenizer(tiny_llama).pad_token == "<pad>"
    assert hf_processor(tiny_llama) is None


@pytest.mark.process
def test_parallel_put_keeps_the_order(ray_cluster):
    assert ray_cluster.get(ray_utils.parallel_put(list(range(20)), max_workers=4)) == list(range(20))
    with pytest.raises(AssertionError, match="empty list"):
        ray_utils.parallel_put([])


def test_visible_device_switches_are_seen():
    assert ray_utils.ray_noset_visible_devices({"RAY_EXPERIMENTAL_NOSET_CUDA_VISIBLE_DEVICES": "1"})
    assert not ray_utils.ray_noset_visible_devices({})


def test_sub_configs_are_updated_in_place():
    config = LlavaConfig(text_config=LlamaConfig(hidden_size=64))
    text = config.text_config
    update_model_config(config, OmegaConf.create({"text_config": {"hidden_size": 96}, "image_token_index": 3}))
    assert config.text_config is text and text.hidden_size == 96 and config.image_token_index == 3


@pytest.mark.parametrize(
    "variable", ["SAGEMAKER_EXPIRATION_TIMESTAMP", "MLP_CURRENT_CAPACITY_BLOCK_EXPIRATION_TIMESTAMP"]
)
@pytest.mark.parametrize(
    ("expiry", "saves"), [("30", True), ("500", False), ("-5", False), ("soon", False), (None, False)]
)
def test_a_rented_machine_that_ends_before_the_next_step_saves(variable, expiry, saves, monkeypatch):
    if expiry is not None:
        monkeypatch.setenv(variable, str(time.time() + float(expiry)) if expiry != "soon" else expiry)
    assert should_save_ckpt_esi(max_steps_duration=10, save_ckpt_duration=60, redundant_time=5) is saves


def test_optional_settings_are_empty_by_default():
    assert AlgoConfig().pf_ppo == {} and FSDPOptimizerConfig(lr=1e-3).min_lr_ratio is None


def test_a_users_file_may_define_dataclasses_with_annotations_as_text(tmp_path):
    file = tmp_path / "reward.py"
    file.write_text(
        "from __future__ import annotations\nfrom dataclasses import dataclass\n\n\n"
        "@dataclass\nclass Rule:\n    weight: float = 2.0\n\n\ndef score():\n    return Rule().weight\n"
    )
    score = imp.load_extern_object(str(file), "score")
    assert score() == 2.0 and score.__module__ not in sys.modules


def test_a_copy_in_shared_memory_follows_its_source(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    source = tmp_path / "model.bin"
    source.write_text("old!")
    copy = Path(fs.copy_to_shm("~/model.bin"))
    try:
        assert copy != source and copy.read_text() == "old!"
        os.utime(source, ns=(0, 0))
        source.write_text("new!")
        assert Path(fs.copy_to_shm("~/model.bin")).read_text() == "new!"
    finally:
        shutil.rmtree(copy.parent)
