"""Composed configs become typed trees, once; plug-ins get a DictConfig back."""

import pickle
from dataclasses import FrozenInstanceError

import pytest
from omegaconf import DictConfig, OmegaConf, open_dict

from tests.helpers.configs import CONFIG_DIR, SOUND, compose_ppo
from verl.config.base import BaseConfig
from verl.config.common import RewardManagerConfig
from verl.config.compose import to_omegaconf, to_plain, to_settings, with_values
from verl.config.data import DataConfig
from verl.config.inert import NO_EFFECT, OLD_KEYS
from verl.config.ppo import PPOConfig
from verl.config.sft import SFTConfig
from verl.workers.config import FSDPActorConfig, FSDPEngineConfig, FSDPOptimizerConfig


def composed(**more):
    config = compose_ppo(*SOUND)
    with open_dict(config):
        config.update(more)
    return config


def test_sections_are_of_their_classes_and_values_those_of_the_config():
    config = compose_ppo(*SOUND, "actor_rollout_ref.actor.optim.lr=3e-5", "trainer.seed=7")
    settings = to_settings(config, PPOConfig)
    assert type(settings.actor_rollout_ref.actor) is FSDPActorConfig
    assert type(settings.actor_rollout_ref.actor.fsdp_config) is FSDPEngineConfig
    assert settings.actor_rollout_ref.actor.optim.lr == 3e-5
    assert settings.critic.data_loader_seed == 7  # followed trainer.seed
    assert to_settings(settings, PPOConfig) is settings


@pytest.mark.parametrize(("tree", "config_type"), [("ppo_trainer", PPOConfig), ("sft_trainer", SFTConfig)])
def test_a_typed_tree_has_the_keys_and_values_of_the_yaml_files(tree, config_type):
    config = compose_ppo(config_dir=CONFIG_DIR, config_name=tree)
    if tree == "ppo_trainer":
        config.actor_rollout_ref.rollout.name = "hf"
    assert to_plain(to_settings(config, config_type)) == OmegaConf.to_container(config, resolve=True)


def test_a_part_that_reads_a_few_values_does_not_check_the_others():
    given = {"max_prompt_length": 0, "custom_cls": {"path": "x.py"}}
    with pytest.raises(ValueError, match="data.max_prompt_length=0 is too small"):
        to_settings(given, DataConfig)
    settings = to_settings(given, DataConfig, checked=False)
    assert settings.max_prompt_length == 0 and settings.custom_cls.path == "x.py" and settings.seed is None


def test_further_sections_and_keys_are_attributes_everywhere():
    config = composed(mine={"alpha": [1, 2]})
    with open_dict(config):
        config.trainer.label = "x"
    settings = with_values(to_settings(config, PPOConfig), {"trainer.seed": 5})
    for tree in (settings, pickle.loads(pickle.dumps(settings)), to_omegaconf(settings)):
        assert tree.mine.alpha[1] == 2 and tree["trainer"].label == "x" and tree.trainer.seed == 5
    assert isinstance(to_omegaconf(settings), DictConfig) and to_omegaconf(config) is config


def test_a_tree_is_frozen_and_a_copy_has_other_values():
    settings = to_settings(compose_ppo(*SOUND), PPOConfig)
    with pytest.raises(FrozenInstanceError):
        settings.trainer.seed = 1
    with pytest.raises(FrozenInstanceError):
        settings.actor_rollout_ref.actor.ppo_mini_batch_size = 1
    other = with_values(settings, {"trainer.seed": 1, "trainer.save_freq": 2, "data.shuffle": False})
    assert (other.trainer.seed, other.trainer.save_freq, other.data.shuffle) == (1, 2, False)
    assert settings.trainer.seed == 42 and other.critic is settings.critic
    with pytest.raises(ValueError, match="trainer.seed=-1 is too small"):
        with_values(settings, {"trainer.seed": -1})


def test_rows_of_keys_without_effect_name_fields_or_what_old_scripts_give():
    classes = {kind.__name__: kind for kind in subclasses(BaseConfig)}
    for row in (*NO_EFFECT, *OLD_KEYS["UNREAD"]):
        owner, name = row.split(".")
        assert (name in classes[owner].__dataclass_fields__) == (row in NO_EFFECT), row


def test_a_class_takes_the_arguments_of_old_scripts():
    engine = FSDPEngineConfig(use_orig_params=True)
    assert engine.use_orig_params and not FSDPEngineConfig().use_orig_params and "use_orig_params" not in list(engine)
    assert pickle.loads(pickle.dumps(engine)).use_orig_params and to_settings(engine, FSDPEngineConfig) is engine
    assert FSDPOptimizerConfig(warmup_style="cosine").lr_scheduler_type == "cosine"
    assert FSDPOptimizerConfig(grad_clip=0.5).clip_grad == 0.5
    with pytest.raises(ValueError, match="fsdp_config.strategy='megatron' is unknown.*Megatron is not supported"):
        FSDPEngineConfig(strategy="megatron")
    with pytest.raises(AttributeError, match="rollout_n"):
        FSDPActorConfig().rollout_n  # noqa: B018
    with pytest.raises(TypeError, match="nothing"):
        FSDPEngineConfig(nothing=1)


def test_a_reward_manager_of_a_module_needs_its_path():
    for module in (None, {"name": "Own"}, {"path": None}):
        with pytest.raises(ValueError, match="needs reward_manager.module.path"):
            RewardManagerConfig(source="importlib", module=module)
    assert RewardManagerConfig(source="importlib", module={"path": "own.py"}).name == "naive"


def subclasses(kind):
    return {below for own in kind.__subclasses__() for below in (own, *subclasses(own))}


def test_a_target_that_is_no_class_of_the_section_changes_nothing():
    settings = to_settings({"_target_": "json.dumps", "name": "dapo"}, RewardManagerConfig)
    assert type(settings) is RewardManagerConfig and settings.name == "dapo"
