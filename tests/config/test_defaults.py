"""Yaml and dataclasses say the same."""

import os
import re

import pytest
from omegaconf import OmegaConf

from tests.helpers.configs import CONFIG_DIR, compose_ppo
from verl.config.base import BaseConfig
from verl.config.compose import omega_conf_to_dataclass
from verl.config.data import DataConfig
from verl.config.defaults import resolved
from verl.config.fields import known_names
from verl.config.sft import SFTConfig
from verl.planning.config_check import find_problems
from verl.trainer.config import AlgoConfig, TrainerConfig
from verl.utils.accelerator import default_dtype
from verl.workers import config as workers

# Keys whose value in the yaml is not the dataclass's own: required there, or following another key only there.
DIFFERENT = {
    "actor_rollout_ref.rollout.name": "???",
    "data.seed": 42,
    "actor_rollout_ref.model.path": "???",
    "actor_rollout_ref.actor.rollout_n": 1,
    "actor_rollout_ref.ref.rollout_n": 1,
    "critic.rollout_n": 1,
    "actor_rollout_ref.actor.use_remove_padding": True,
    "critic.model.tokenizer_path": "some/model",
    "actor_rollout_ref.actor.optim.min_lr_ratio": 0.0,
    "critic.optim.min_lr_ratio": 0.0,
    "actor_rollout_ref.actor.optim.clip_grad": 1.0,  # they follow grad_clip
    "critic.optim.clip_grad": 1.0,
    "algorithm.pf_ppo.reweight_method": "pow",
    "algorithm.pf_ppo.weight_pow": 2.0,
    "algorithm.filter_groups.enable": False,  # the section of a dataclass is None without a yaml file
    "algorithm.filter_groups.metric": None,
    "algorithm.filter_groups.max_num_gen_batches": 0,
    "algorithm.filter_groups.keep_surplus": False,
    "reward_model.overlong_buffer.enable": False,
    "reward_model.overlong_buffer.len": 0,
    "reward_model.overlong_buffer.log": False,
    "reward_model.overlong_buffer.penalty_factor": 0.0,
    "actor_rollout_ref.actor.profiler.save_path": "outputs/profile",
    "actor_rollout_ref.ref.profiler.save_path": "outputs/profile",
    "actor_rollout_ref.rollout.profiler.save_path": "outputs/profile",
    "critic.profiler.save_path": "outputs/profile",
    "reward_model.profiler.save_path": "outputs/profile",
}


OF_RECIPES = [CONFIG_DIR.parents[2] / name for name in ("recipe", "dllm_reasoning")]
ACTOR = "actor_rollout_ref.actor"
CPU = ["trainer.device=cpu", "trainer.n_gpus_per_node=2", "actor_rollout_ref.rollout.name=vllm",
       "actor_rollout_ref.rollout.n=8", "actor_rollout_ref.actor.use_dynamic_bsz=true"]  # fmt: skip


def roles_of(*overrides):
    return OmegaConf.create(resolved(compose_ppo(*overrides))).actor_rollout_ref


def test_a_cpu_has_defaults_of_its_own():
    roles, on_gpu = roles_of(*CPU), roles_of(*CPU[1:])
    shown = [(r.actor.share_prompt_forward, r.model.enable_gradient_checkpointing) for r in (roles, on_gpu)]
    assert shown == [(True, None), (False, True)]
    dtypes = [[r[role].fsdp_config.dtype for role in ("actor", "ref")] + [r.rollout.dtype] for r in (roles, on_gpu)]
    assert dtypes == [[default_dtype("cpu")] * 3, ["bfloat16"] * 3]
    cores = len(os.sched_getaffinity(0))
    assert [r.rollout.agent.num_workers for r in (roles, on_gpu)] == [min(8, cores), 8]
    sft = resolved(compose_ppo("trainer.device=cpu", config_name="sft_trainer"))
    assert (sft["use_remove_padding"], sft["model"]["fsdp_config"]["dtype"]) == (True, default_dtype("cpu"))
    assert not resolved(compose_ppo(config_name="sft_trainer"))["use_remove_padding"]


def test_a_section_and_a_frozen_config_have_the_same_defaults_and_stay_as_they_are():
    config = compose_ppo(*CPU)
    OmegaConf.set_readonly(config, True)
    actor = resolved(config.actor_rollout_ref.actor)
    assert actor["share_prompt_forward"] and actor["fsdp_config"]["dtype"] == default_dtype("cpu")
    assert "machine" not in config and "machine" not in resolved(config)


def test_the_yaml_files_need_no_resolver_of_verl():
    files = [file for folder in (CONFIG_DIR, *OF_RECIPES) for file in folder.rglob("*.yaml")]
    used = {name for file in files for name in re.findall(r"\$\{([\w.]+):", file.read_text())}
    assert len(files) > 20 and used == {"oc.select", "oc.decode", "oc.env"}  # those of OmegaConf
    for name, *overrides in [["evaluation"], ["generation", "model.path=m"], ["sft_trainer"]]:
        OmegaConf.resolve(compose_ppo(*overrides, config_name=name))
    tree = OmegaConf.to_container(compose_ppo(*CPU, "actor_rollout_ref.model.path=m"), resolve=True)
    roles = tree["actor_rollout_ref"]
    assert [roles["rollout"]["dtype"], roles["ref"]["fsdp_config"]["dtype"]] == ["bfloat16"] * 2
    assert (roles["actor"]["share_prompt_forward"], roles["model"]["enable_gradient_checkpointing"]) == (False, True)


@pytest.mark.parametrize(
    "excludes",
    ["actor_rollout_ref.rollout.n=1", "algorithm.use_pf_ppo=true", "actor_rollout_ref.actor.ppo_mini_batch_size=7",
     "data.train_batch_size=33", "actor_rollout_ref.model.policy.name=bernoulli",
     "actor_rollout_ref.model.use_remove_padding=false",
     "actor_rollout_ref.rollout.log_prob_use_dynamic_bsz=false "
     "actor_rollout_ref.rollout.log_prob_micro_batch_size_per_gpu=4",
     "actor_rollout_ref.actor.use_dynamic_bsz=false actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=4",
     "actor_rollout_ref.actor.use_dynamic_bsz=false actor_rollout_ref.actor.ppo_micro_batch_size=12",
     "actor_rollout_ref.ref.log_prob_use_dynamic_bsz=false actor_rollout_ref.ref.log_prob_micro_batch_size=12"],
)  # fmt: skip
def test_shared_prompts_give_way_to_settings_that_exclude_them(excludes):
    assert not roles_of(*CPU, *excludes.split()).actor.share_prompt_forward
    assert roles_of(*CPU, *excludes.split(), f"{ACTOR}.share_prompt_forward=true").actor.share_prompt_forward


@pytest.mark.parametrize(
    "wrong", ["trainer.n_gpus_per_node=0", "trainer.nnodes=null", "actor_rollout_ref.rollout.n=many",
              "actor_rollout_ref.actor.ppo_mini_batch_size=null", "data.gen_batch_size=few"]
)  # fmt: skip
def test_sizes_that_the_defaults_cannot_use_are_reported_by_their_own_check(wrong):
    config = compose_ppo(*CPU, "actor_rollout_ref.model.path=some/model", wrong)
    assert wrong.partition("=")[0] in {problem.key for problem in find_problems(config)}


def leaves(node, prefix=""):
    for key, value in node.items():
        path = f"{prefix}.{key}" if prefix else key
        if isinstance(value, dict) and value:
            yield from leaves(value, path)
        else:
            yield path, value


def plain(value):
    if isinstance(value, BaseConfig):
        return {name: plain(value[name]) for name in known_names(type(value)) if name != "_target_" and name in value}
    return list(value) if isinstance(value, tuple) else value


def at(tree, path):
    for part in filter(None, path.split(".")):
        tree = tree[part]
    return tree


SECTIONS = {
    "data": DataConfig, "actor_rollout_ref.model": workers.HFModelConfig,
    "actor_rollout_ref.actor": workers.FSDPActorConfig, "actor_rollout_ref.ref": workers.FSDPRefConfig,
    "actor_rollout_ref.rollout": workers.RolloutConfig, "critic": workers.FSDPCriticConfig,
    "reward_model": workers.RewardModelConfig, "reward_manager": workers.RewardManagerConfig, "algorithm": AlgoConfig,
    "trainer": TrainerConfig,
}  # fmt: skip


@pytest.mark.parametrize("section", [*SECTIONS, "sft_trainer"])
def test_each_yaml_default_is_the_dataclass_default(section):
    is_sft = section == "sft_trainer"
    config = compose_ppo(config_name=section) if is_sft else compose_ppo("actor_rollout_ref.model.path=some/model")
    default = plain(SFTConfig() if is_sft else SECTIONS[section]())
    tree = OmegaConf.to_container(config, resolve=True)
    if section == "actor_rollout_ref.model":
        tree["actor_rollout_ref"]["model"]["path"] = "???"
    yaml = {path: value for path, value in leaves(at(tree, "" if is_sft else section)) if not path.endswith("_target_")}
    different = {path: DIFFERENT[f"{section}.{path}"] for path in yaml if f"{section}.{path}" in DIFFERENT}
    assert yaml == {path: at(default, path) for path in yaml if path not in different} | different
    assert len(yaml) - len(different) >= 3


def test_every_target_is_the_dataclass_of_its_section():
    config = compose_ppo("actor_rollout_ref.model.path=some/model", "actor_rollout_ref.rollout.name=hf")
    for section, dataclass_type in SECTIONS.items():
        node = OmegaConf.select(config, section)
        if "_target_" in node:
            assert type(omega_conf_to_dataclass(node)) is dataclass_type
