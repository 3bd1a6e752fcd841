"""Names of verl 0.7.0 that code imports resolve, and do what the name says."""

import importlib
import json
import os
import runpy
import stat
import sys
from pathlib import Path

import pandas as pd
import pytest
import torch
from hydra import compose, initialize_config_module
from torch import nn

from verl.protocol import DataProto

NAMES = {
    "verl.utils.hdfs_io": ("copy", "exists", "makedirs"),
    "verl.utils.fs": ("copy", "makedirs", "_check_directory_structure", "_record_directory_structure"),
    "verl.utils.fsdp_utils": (
        "collect_lora_params", "fsdp_version", "get_fsdp_wrap_policy", "init_fn", "fsdp2_load_full_state_dict",
        "apply_fsdp2", "offload_fsdp_model_to_cpu",
    ),
    "verl.trainer.ppo.ray_trainer": (
        "AdvantageEstimator", "RayPPOTrainer", "compute_data_metrics", "compute_timing_metrics", "marked_timer",
    ),
    "verl.trainer.constants_ppo": ("PPO_RAY_RUNTIME_ENV", "get_ppo_ray_runtime_env"),
    "verl.utils.torch_dtypes": ("PrecisionType",),
    "verl.utils.attention_utils": ("index_first_axis", "pad_input", "rearrange", "unpad_input"),
    "verl.models.transformers.monkey_patch": ("apply_monkey_patch",),
    "verl.utils.memory_utils": ("aggressive_empty_cache",),
    "verl.trainer.ppo.metric_utils": ("_compute_response_info",),
    "verl.single_controller.base.decorator": ("_check_dispatch_mode", "_check_execute_mode"),
}  # fmt: skip


@pytest.mark.parametrize(("module", "name"), [(module, name) for module, names in NAMES.items() for name in names])
def test_name(module, name):
    assert hasattr(importlib.import_module(module), name)


@pytest.fixture
def hdfs(tmp_path, monkeypatch):
    """A command `hdfs` that keeps hdfs://store below a folder; returns that folder."""
    store = tmp_path / "store"
    store.mkdir()
    command = tmp_path / "bin" / "hdfs"
    command.parent.mkdir()
    command.write_text(
        f"""#!{sys.executable}
import os, shutil, sys
words = [w.replace("hdfs://store", {str(store)!r}) for w in sys.argv[2:]]
paths = [w for w in words if not w.startswith("-")]
if words[0] == "-mkdir":
    os.makedirs(paths[0], exist_ok=True)
elif words[0] == "-test":
    sys.exit(not os.path.exists(paths[0]))
else:
    for source in paths[:-1]:
        target = os.path.join(paths[-1], os.path.basename(source)) if os.path.isdir(paths[-1]) else paths[-1]
        shutil.copytree(source, target) if os.path.isdir(source) else shutil.copy(source, target)
"""
    )
    command.chmod(command.stat().st_mode | stat.S_IEXEC)
    monkeypatch.setenv("PATH", f"{command.parent}:{os.environ['PATH']}")
    return store


@pytest.mark.process
def test_files_go_to_hdfs_and_back(hdfs, tmp_path):
    from verl.utils.hdfs_io import copy, exists, makedirs

    file = tmp_path / "a.txt"
    file.write_text("a")
    assert not exists("hdfs://store/data")
    makedirs("hdfs://store/data")
    assert copy(str(file), "hdfs://store/data/a.txt") and exists("hdfs://store/data/a.txt")
    copy("hdfs://store/data/a.txt", str(tmp_path / "back.txt"))
    assert (tmp_path / "back.txt").read_text() == "a"


def test_local_files_are_copied(tmp_path):
    from verl.utils.hdfs_io import copy, exists, makedirs

    makedirs(str(tmp_path / "a" / "b"))
    (tmp_path / "a" / "b" / "c.txt").write_text("c")
    copy(src=str(tmp_path / "a"), dst=str(tmp_path / "copy"))
    assert exists(str(tmp_path / "copy" / "b" / "c.txt"))
    copy(str(tmp_path / "a"), str(tmp_path / "copy"), dirs_exist_ok=True)
    with pytest.raises(FileExistsError):
        makedirs(str(tmp_path / "a"))


@pytest.mark.process
def test_a_data_preparation_script_runs(hdfs, tmp_path, monkeypatch):
    raw = tmp_path / "raw"
    raw.mkdir()
    rows = [{"question": f"What is {i} + 1?", "answer": f"It is one more.\n#### {i + 1:,}"} for i in (1, 1999)]
    for split in ("train", "test"):
        (raw / f"{split}.jsonl").write_text("\n".join(map(json.dumps, rows)))
    saved = tmp_path / "saved"
    saved.mkdir()
    words = ["--local_dataset_path", str(raw), "--local_save_dir", str(saved), "--hdfs_dir", "hdfs://store/gsm8k"]
    monkeypatch.setattr(sys, "argv", ["prepare.py", *words])
    monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path / "cache"))
    runpy.run_path(str(Path(__file__).with_name("project") / "prepare.py"), run_name="__main__")
    for file in (saved / "train.parquet", hdfs / "gsm8k" / "saved" / "train.parquet"):
        frame = pd.read_parquet(file)
        assert list(frame.columns) == ["data_source", "prompt", "ability", "reward_model", "extra_info"]
        assert [row["ground_truth"] for row in frame["reward_model"]] == ["2", "2000"]


def test_a_folders_record_shows_changes(tmp_path):
    from verl.utils.fs import _check_directory_structure, _record_directory_structure

    (tmp_path / "sub").mkdir()
    (tmp_path / "sub" / "a.txt").write_text("a")
    record = _record_directory_structure(tmp_path)
    assert os.path.exists(record) and _check_directory_structure(tmp_path, record)
    (tmp_path / "b.txt").write_text("b")
    assert not _check_directory_structure(tmp_path, record)


def test_wrap_policies_name_layers_sizes_or_trained_leaves(tiny_llama):
    from transformers import AutoModelForCausalLM

    from verl.utils.fsdp_utils import fsdp_version, get_fsdp_wrap_policy

    model = AutoModelForCausalLM.from_pretrained(tiny_llama)
    assert fsdp_version(model) == 0 and get_fsdp_wrap_policy(model, {"disable": True}) is None

    def wrapped(policy):
        ask = {"recurse": False, "nonwrapped_numel": 0}
        return {type(m).__name__ for m in model.modules() if policy(module=m, **ask)}

    assert wrapped(get_fsdp_wrap_policy(model)) == {"LlamaDecoderLayer"}
    assert wrapped(get_fsdp_wrap_policy(model, {"transformer_layer_cls_to_wrap": ["LlamaMLP"]})) == {"LlamaMLP"}
    with pytest.raises(ValueError, match="NoSuchLayer"):
        get_fsdp_wrap_policy(model, {"transformer_layer_cls_to_wrap": ["NoSuchLayer"]})
    model.requires_grad_(False)
    model.lm_head.weight = nn.Parameter(model.lm_head.weight.detach().clone())
    assert wrapped(get_fsdp_wrap_policy(model, is_lora=True)) == {"LlamaDecoderLayer", "Linear"}


def test_lora_parameters_are_the_adapters_or_the_base_models(tiny_llama):
    from peft import LoraConfig, get_peft_model
    from transformers import AutoModelForCausalLM

    from verl.utils.fsdp_utils import collect_lora_params

    plain = AutoModelForCausalLM.from_pretrained(tiny_llama)
    expected = {name: p.clone() for name, p in plain.named_parameters()}
    model = get_peft_model(plain, LoraConfig(r=2, target_modules=["q_proj"]))
    adapter = collect_lora_params(model, layered_summon=False, base_sync_done=True)
    assert adapter and all("lora_" in name for name in adapter)
    base = collect_lora_params(model, layered_summon=True, base_sync_done=False)
    assert base.keys() == expected.keys() and all(torch.equal(base[name], expected[name]) for name in expected)


def test_precisions():
    from verl.utils.torch_dtypes import PrecisionType

    assert PrecisionType.to_dtype("bf16") is torch.bfloat16 and PrecisionType.to_dtype(16) is torch.float16
    assert PrecisionType.to_str(torch.float32) == "fp32" and PrecisionType.is_fp16("float16")
    assert PrecisionType.supported_type("mixed") and not PrecisionType.supported_type("int8")
    with pytest.raises(RuntimeError, match="int8"):
        PrecisionType.to_dtype("int8")


def test_rows_without_padding_and_back():
    from verl.utils.attention_utils import index_first_axis, pad_input, rearrange, unpad_input

    mask = torch.tensor([[0, 1, 1], [1, 0, 0]])
    values = torch.arange(12.0).view(2, 3, 2)
    rows, indices, borders, longest, lengths = unpad_input(values, mask)
    assert indices.tolist() == [1, 2, 3] and borders.tolist() == [0, 2, 3] and longest == 2
    assert lengths.tolist() == [2, 1] and rows.tolist() == [[2, 3], [4, 5], [6, 7]]
    assert torch.equal(pad_input(rows, indices, 2, 3), values * mask.unsqueeze(-1))
    assert index_first_axis(rearrange(values, "b s d -> (b s) d"), indices).tolist() == rows.tolist()


def test_models_are_not_patched():
    from verl.models.transformers.monkey_patch import apply_monkey_patch, repeat_kv

    model = nn.Linear(1, 1)
    before = dict(vars(model))
    apply_monkey_patch(model, ulysses_sp_size=1, use_remove_padding=True)
    assert vars(model) == before
    with pytest.raises(NotImplementedError, match="ulysses_sequence_parallel_size"):
        apply_monkey_patch(model, ulysses_sp_size=2)
    with pytest.raises(NotImplementedError, match="engine, which holds no logits"):
        apply_monkey_patch(model, use_fused_kernels=True)
    heads = torch.arange(2.0).view(1, 1, 2, 1)
    assert repeat_kv(heads, 2).flatten().tolist() == [0, 0, 1, 1]


def test_memory_helpers_measure_nothing_without_cuda():
    from verl.utils import memory_utils

    memory_utils.aggressive_empty_cache()


def test_rays_environment_leaves_the_drivers_variables_alone(monkeypatch):
    from verl.trainer.constants_ppo import PPO_RAY_RUNTIME_ENV, get_ppo_ray_runtime_env

    monkeypatch.delenv("NCCL_DEBUG", raising=False)
    assert get_ppo_ray_runtime_env()["env_vars"]["NCCL_DEBUG"] == PPO_RAY_RUNTIME_ENV["env_vars"]["NCCL_DEBUG"]
    monkeypatch.setenv("NCCL_DEBUG", "INFO")
    assert "NCCL_DEBUG" not in get_ppo_ray_runtime_env()["env_vars"]


def test_response_lengths_of_a_batch():
    from verl.trainer.ppo.metric_utils import _compute_response_info

    mask = torch.tensor([[0, 1, 1, 0], [1, 1, 1, 1]])
    info = _compute_response_info(DataProto.from_dict({"responses": torch.zeros(2, 2), "attention_mask": mask}))
    assert info["prompt_length"].tolist() == [1, 2] and info["response_length"].tolist() == [1, 2]
    assert info["response_mask"].tolist() == [[1, 0], [1, 1]]


def test_dispatch_modes_are_checked():
    from verl.single_controller.base.decorator import Dispatch, _check_dispatch_mode

    _check_dispatch_mode(Dispatch.ONE_TO_ALL)
    with pytest.raises(ValueError, match="collect_fn"):
        _check_dispatch_mode({"dispatch_fn": print})


def test_the_actors_yaml_files_compose():
    with initialize_config_module("verl.trainer.config", version_base=None):
        base = compose("actor/actor").actor
    assert base.ppo_mini_batch_size == 256 and "grad_clip" not in base
