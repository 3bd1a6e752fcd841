"""Composed configs for tests."""

import copy
import functools
from pathlib import Path

from hydra import compose, initialize_config_dir
from hydra.core.override_parser.overrides_parser import OverridesParser
from omegaconf import DictConfig, OmegaConf, open_dict

import verl.trainer.config

CONFIG_DIR = Path(verl.trainer.config.__file__).parent

SOUND = (
    "actor_rollout_ref.model.path=some/model",
    "actor_rollout_ref.rollout.name=hf",
    "actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=4",
    "actor_rollout_ref.rollout.log_prob_micro_batch_size_per_gpu=4",
    "algorithm.adv_estimator=grpo",
)


@functools.cache
def _composed(config_dir: Path, config_name: str) -> DictConfig:
    with initialize_config_dir(str(config_dir), version_base=None):
        return compose(config_name)


def compose_ppo(*overrides: str, config_dir: Path = CONFIG_DIR, config_name: str = "ppo_trainer") -> DictConfig:
    """The config that this command line gives; composed once (Hydra takes a second), overrides applied to a copy."""
    config = copy.deepcopy(_composed(config_dir, config_name))
    for override in OverridesParser.create().parse_overrides(list(overrides)):
        if override.is_delete():
            parent, _, name = override.key_or_group.rpartition(".")
            with open_dict(config):
                del OmegaConf.select(config, parent)[name]
        else:
            adds = override.is_add() or override.is_force_add()
            OmegaConf.update(config, override.key_or_group, override.value(), force_add=adds)
    return config
