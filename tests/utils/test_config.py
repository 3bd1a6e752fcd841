"""From config nodes to dataclasses, and the optimizer that a config names."""


import pytest
import torch
from omegaconf import OmegaConf

from tests.helpers.configs import compose_ppo
from verl.trainer.config import FilterGroupsConfig
from verl.utils.config import omega_conf_to_dataclass, update_dict_with_config
from verl.workers.config import (
    FSDPActorConfig,
    FSDPCriticConfig,
    FSDPOptimizerConfig,
    HFModelConfig,
    SamplingConfig,
    build_optimizer,
)


def test_with_a_type_the_node_is_merged_over_its_defaults():
    got = omega_conf_to_dataclass(OmegaConf.create({"top_p": 0.5}), SamplingConfig)
    assert got == SamplingConfig(top_p=0.5)
    assert type(omega_conf_to_dataclass(compose_ppo("actor_rollout_ref.model.path=m").critic, FSDPCriticConfig)) is (
        FSDPCriticConfig
    )
    with pytest.raises(Exception, match="top_q"):
        omega_conf_to_dataclass(OmegaConf.create({"top_q": 0.5}), SamplingConfig)


def test_empty_plain_and_untyped_nodes():
    assert omega_conf_to_dataclass(OmegaConf.create({}), SamplingConfig) == SamplingConfig()
    assert omega_conf_to_dataclass(None) is None
    ready = SamplingConfig(n=2)
    assert omega_conf_to_dataclass(ready, SamplingConfig) is ready
    with pytest.raises(AssertionError, match="_target_"):
        omega_conf_to_dataclass(OmegaConf.create({"n": 1}))


def test_values_are_checked_when_a_dataclass_is_made():
    with pytest.raises(ValueError, match="actor.clip_ratio=-1 is too small; use 0 or more") as error:
        FSDPActorConfig(rollout_n=1, clip_ratio=-1, ppo_epochs=0)
    assert "actor.ppo_epochs=0 is too small; use 1 or more" in str(error.value)
    with pytest.raises(ValueError, match="algorithm.filter_groups.metric"):
        FilterGroupsConfig(enable=True)


def test_actor_validate_says_what_would_divide():
    actor = FSDPActorConfig(rollout_n=1, ppo_mini_batch_size=12, ppo_micro_batch_size_per_gpu=2)
    actor.validate(n_gpus=4, train_batch_size=16)
    with pytest.raises(ValueError, match=r"Use a multiple of 8 \(8 or 16\)"):
        actor.validate(n_gpus=8, train_batch_size=16)


def test_model_paths_follow_each_other(tiny_llama):
    model = HFModelConfig(path=tiny_llama, tokenizer_path="~/elsewhere")
    assert model.local_path == model.local_hf_config_path == tiny_llama
    assert model.local_tokenizer_path.endswith("/elsewhere") and "~" not in model.local_tokenizer_path
    loaded = HFModelConfig(path=tiny_llama).load()
    assert loaded.hf_config.hidden_size == 64 and loaded.tokenizer.eos_token_id == 2
    assert loaded.architectures == ["LlamaForCausalLM"]


def test_update_dict_with_config_changes_what_is_shared():
    settings = {"a": 1, "b": 2}
    update_dict_with_config(settings, OmegaConf.create({"b": 3, "c": 4}))
    assert settings == {"a": 1, "b": 3}


def test_the_optimizer_gets_trainable_parameters_and_its_settings():
    free, frozen = torch.nn.Parameter(torch.ones(2)), torch.nn.Parameter(torch.ones(2), requires_grad=False)
    config = FSDPOptimizerConfig(lr=0.1, betas=[0.8, 0.9], override_optimizer_config={"eps": 1e-3})
    optimizer = build_optimizer([free, frozen], config)
    assert type(optimizer) is torch.optim.AdamW
    group = optimizer.param_groups[0]
    assert group["params"] == [free]
    assert (group["lr"], group["betas"], group["eps"], group["weight_decay"]) == (0.1, (0.8, 0.9), 1e-3, 0.01)
    assert type(build_optimizer([free], FSDPOptimizerConfig(optimizer="SGD"))) is torch.optim.SGD
    with pytest.raises(ValueError, match="did you mean 'AdamW'"):
        build_optimizer([free], FSDPOptimizerConfig(optimizer="AdanW"))
    with pytest.raises(ValueError, match="nothing to optimize"):
        build_optimizer([frozen], FSDPOptimizerConfig())
