"""Imports by name, files, configs, metrics, plug-ins, secrets, stop tokens: one small claim each."""

import json
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
from transformers import GenerationConfig, LlamaConfig, LlavaConfig

from tests.helpers.configs import compose_ppo
from tests.helpers.engines import leave_group
from tests.helpers.models import make_tokenizer, save_tiny_llama
from verl.config.base import BaseConfig
from verl.models.loading import update_model_config
from verl.rollout.base import get_rollout_class
from verl.trainer.config import FilterGroupsConfig
from verl.trainer.ppo import core_algos
from verl.training.checkpoint import should_save_ckpt_esi
from verl.utils import distributed, fs, ray_utils
from verl.utils import import_utils as imp
from verl.utils.accelerator import default_dtype
from verl.utils.config import omega_conf_to_dataclass, update_dict_with_config
from verl.utils.jsonl import read_objects
from verl.utils.metric import reduce_metrics
from verl.utils.redact import HIDDEN, redact, redacted_yaml
from verl.utils.tokenizer import hf_tokenizer, stop_ids
from verl.workers import config as roles


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


def test_metrics_are_reduced_by_the_word_in_their_name():
    got = reduce_metrics({"a/max": [1, 3], "a/min": [[1, 2], 3], "timing_s/gen": [1, 3], "loss": [torch.tensor(2.0)]})
    assert got == {"a/max": 3, "a/min": 1, "timing_s/gen": 2, "loss": 2}
    assert math.isnan(reduce_metrics({"loss": []})["loss"])


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
    monkeypatch.setenv("PATH", "")
    with pytest.raises(FileNotFoundError, match="`hdfs` command is not on PATH"):
        fs.copy_to_local("hdfs://x/y", cache_dir=str(tmp_path / "cache"))


@pytest.mark.process
def test_parallel_put_keeps_the_order(ray_cluster):
    assert ray_cluster.get(ray_utils.parallel_put(list(range(20)), max_workers=4)) == list(range(20))
    with pytest.raises(AssertionError, match="empty list"):
        ray_utils.parallel_put([])


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


@pytest.mark.parametrize(
    ("instructions", "dtype"),
    [({"avx512_bf16": True}, "bfloat16"), ({"amx_bf16": True, "avx512_bf16": False}, "bfloat16"),
     ({"avx512_f": True, "avx512_bf16": False, "amx_bf16": False}, "float32"), ({"neon": True}, "float32")],
)  # fmt: skip
def test_a_cpu_computes_in_bfloat16_only_with_instructions_for_its_products(monkeypatch, instructions, dtype):
    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: instructions)
    assert default_dtype("cpu") == dtype
    assert default_dtype("cuda") == "bfloat16"


def test_objects_come_with_their_line(tmp_path):
    file = tmp_path / "rows.jsonl"
    file.write_text('{"a": 1}\n\n{"a": "x\u2028y"}\n', encoding="utf-8")
    assert list(read_objects(file)) == [(1, {"a": 1}), (3, {"a": "x\u2028y"})]


@pytest.mark.parametrize(("line", "message"), [('{"a": ', "not JSON"), ("[1, 2]", r"\[1, 2\] is not an object")])
def test_a_wrong_line_is_named_with_its_file(tmp_path, line, message):
    file = tmp_path / "rows.jsonl"
    file.write_text('{"a": 1}\n' + line + "\n")
    with pytest.raises(ValueError, match=rf"rows.jsonl, line 2: .*{message}"):
        list(read_objects(file))


def test_a_growing_file_may_be_missing_or_end_in_the_middle_of_a_line(tmp_path):
    file = tmp_path / "rows.jsonl"
    assert list(read_objects(file, growing=True)) == []
    file.write_text('{"a": 1}\n{"a": ')
    assert list(read_objects(file, growing=True)) == [(1, {"a": 1})]
    file.write_text('{"a": \n{"a": 2}\n')
    with pytest.raises(ValueError, match="rows.jsonl, line 1: not JSON"):
        list(read_objects(file, growing=True))


def test_no_key_of_the_public_tree_is_taken_for_a_secret():
    config = compose_ppo("actor_rollout_ref.model.path=m", "actor_rollout_ref.rollout.name=hf")
    assert HIDDEN not in redacted_yaml(config)


def test_nested_values_are_hidden_and_the_source_is_not_changed():
    source = {"a": [{"hf_token": "hush"}], "env_vars": {"X": "hush"}, "n": 3, "api_key": None, "u": "http://a:hush@b"}
    clean = redact(source)
    assert clean == {
        "a": [{"hf_token": HIDDEN}], "env_vars": {"X": HIDDEN}, "n": 3, "api_key": None, "u": f"http://{HIDDEN}@b",
    }  # fmt: skip
    assert source["a"][0]["hf_token"] == "hush"
    assert "hush" not in redacted_yaml(OmegaConf.create(source))


def first(*args, **kwargs): ...


def second(*args, **kwargs): ...


def test_an_entry_is_registered_returned_and_protected():
    """Of losses; the tables of estimators and of reward managers (tests/compat/test_behaviours) are of its class."""
    try:
        assert core_algos.register_policy_loss("mine")(first) is first is core_algos.get_policy_loss_fn("mine")
        assert core_algos.POLICY_LOSS_REGISTRY["mine"] is first
        assert core_algos.register_policy_loss("mine")(first) is first  # again
        with pytest.raises(ValueError, match="'mine' is already registered by tests.utils.test_small_helpers"):
            core_algos.register_policy_loss("mine")(second)
        assert core_algos.get_policy_loss_fn("mine") is first
        core_algos.POLICY_LOSS_REGISTRY["direct"] = second
        assert core_algos.get_policy_loss_fn("direct") is second
    finally:
        core_algos.POLICY_LOSS_REGISTRY.pop("mine", None)
        core_algos.POLICY_LOSS_REGISTRY.pop("direct", None)
    with pytest.raises(ValueError, match="'mine' is unknown"):
        core_algos.get_policy_loss_fn("mine")


def test_a_name_in_another_case_is_suggested():
    with pytest.raises(ValueError, match="rollout.name='vLLM' is unknown; did you mean 'vllm'"):
        get_rollout_class("vLLM")
    with pytest.raises(ValueError, match="rollout.mode='server' is unknown for rollout.name='hf'.*mode=sync"):
        get_rollout_class("hf", "server")
    assert get_rollout_class("hf", "async") is get_rollout_class("hf", "sync")  # a step generates in one call
    with pytest.raises(ValueError, match="adv_estimator='GRPO' is unknown; did you mean 'grpo'"):
        core_algos.get_adv_estimator_fn("GRPO")


EOS, SEP, UNK = 2, 3, 4


def test_the_union_of_tokenizer_and_generation_config_begins_with_the_eos_token(tmp_path):
    model = save_tiny_llama(tmp_path / "model")
    GenerationConfig(eos_token_id=[UNK, EOS, SEP], pad_token_id=0).save_pretrained(model)
    assert stop_ids(make_tokenizer(), model) == stop_ids(hf_tokenizer(model)) == [EOS, UNK, SEP]
    assert roles.HFModelConfig(path=model).load().generation_config.eos_token_id == [UNK, EOS, SEP]
    # given ids replace the union
    assert stop_ids(make_tokenizer(), model, [SEP]) == [SEP] and stop_ids(make_tokenizer(), model, []) == []


def test_without_a_generation_config_the_ids_of_the_config_count(tmp_path):
    for name, config in (("plain", {"eos_token_id": SEP}), ("nested", {"text_config": {"eos_token_id": [SEP, UNK]}})):
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.json").write_text(json.dumps({"model_type": "llama", **config}))
    assert stop_ids(make_tokenizer(), str(tmp_path / "plain")) == [EOS, SEP]
    assert stop_ids(make_tokenizer(), str(tmp_path / "nested")) == [EOS, SEP, UNK]


def test_with_a_type_the_node_is_merged_over_its_defaults():
    got = omega_conf_to_dataclass(OmegaConf.create({"top_p": 0.5}), roles.SamplingConfig)
    assert got == roles.SamplingConfig(top_p=0.5)
    critic = omega_conf_to_dataclass(compose_ppo("actor_rollout_ref.model.path=m").critic, roles.FSDPCriticConfig)
    assert type(critic) is roles.FSDPCriticConfig
    with pytest.raises(Exception, match="top_q"):
        omega_conf_to_dataclass(OmegaConf.create({"top_q": 0.5}), roles.SamplingConfig)


def test_empty_plain_and_untyped_nodes():
    assert omega_conf_to_dataclass(OmegaConf.create({}), roles.SamplingConfig) == roles.SamplingConfig()
    assert omega_conf_to_dataclass(None) is None
    ready = roles.SamplingConfig(n=2)
    assert omega_conf_to_dataclass(ready, roles.SamplingConfig) is ready
    with pytest.raises(AssertionError, match="_target_"):
        omega_conf_to_dataclass(OmegaConf.create({"n": 1}))


def test_values_are_checked_when_a_dataclass_is_made():
    with pytest.raises(ValueError, match="actor.clip_ratio=-1 is too small; use 0 or more") as error:
        roles.FSDPActorConfig(rollout_n=1, clip_ratio=-1, ppo_epochs=0)
    assert "actor.ppo_epochs=0 is too small; use 1 or more" in str(error.value)
    with pytest.raises(ValueError, match="algorithm.filter_groups.metric"):
        FilterGroupsConfig(enable=True)


def test_actor_validate_says_what_would_divide():
    actor = roles.FSDPActorConfig(rollout_n=1, ppo_mini_batch_size=12, ppo_micro_batch_size_per_gpu=2)
    actor.validate(n_gpus=4, train_batch_size=16)
    with pytest.raises(ValueError, match=r"Use a multiple of 8 \(8 or 16\)"):
        actor.validate(n_gpus=8, train_batch_size=16)


def test_update_dict_with_config_changes_what_is_shared():
    settings = {"a": 1, "b": 2}
    update_dict_with_config(settings, OmegaConf.create({"b": 3, "c": 4}))
    assert settings == {"a": 1, "b": 3}


def test_the_optimizer_gets_trainable_parameters_and_its_settings():
    free, frozen = torch.nn.Parameter(torch.ones(2)), torch.nn.Parameter(torch.ones(2), requires_grad=False)
    config = roles.FSDPOptimizerConfig(lr=0.1, betas=[0.8, 0.9], override_optimizer_config={"eps": 1e-3})
    optimizer = roles.build_optimizer([free, frozen], config)
    assert type(optimizer) is torch.optim.AdamW
    group = optimizer.param_groups[0]
    assert group["params"] == [free]
    assert (group["lr"], group["betas"], group["eps"], group["weight_decay"]) == (0.1, (0.8, 0.9), 1e-3, 0.01)
    assert type(roles.build_optimizer([free], roles.FSDPOptimizerConfig(optimizer="SGD"))) is torch.optim.SGD
    with pytest.raises(ValueError, match="did you mean 'AdamW'"):
        roles.build_optimizer([free], roles.FSDPOptimizerConfig(optimizer="AdanW"))
    with pytest.raises(ValueError, match="not in examples.muon.* set optimizer_impl=torch.optim and optimizer=AdamW"):
        roles.build_optimizer([free], roles.FSDPOptimizerConfig(optimizer="Lion", optimizer_impl="examples.muon"))
    with pytest.raises(ValueError, match="nothing to optimize"):
        roles.build_optimizer([frozen], roles.FSDPOptimizerConfig())
