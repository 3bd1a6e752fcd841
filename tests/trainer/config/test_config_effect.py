"""Keys without effect are reported where they are set, and only there."""

import pytest
from loguru import logger

from tests.helpers.configs import SOUND, compose_ppo
from verl.config.ppo import PPOConfig
from verl.planning.config_effect import unused_settings
from verl.utils.config import validate_config


def messages(*overrides):
    return [p.message for p in unused_settings(compose_ppo(*SOUND, *overrides), PPOConfig)]


def test_defaults_and_followers_are_not_reported():
    assert messages() == []
    key = "actor_rollout_ref.actor.use_torch_compile"  # ref and both engines follow it
    assert messages(f"{key}=true") == [f"{key}=true has no effect in this version: nothing is compiled."]


@pytest.mark.parametrize(
    "override",
    [
        "actor_rollout_ref.actor.entropy_checkpointing=true",
        "actor_rollout_ref.actor.optim.clip_grad=0.5",
        "actor_rollout_ref.rollout.mode=async",
        "actor_rollout_ref.model.use_liger=true",
        "actor_rollout_ref.model.use_fused_kernels=true",
        "actor_rollout_ref.rollout.multi_turn.max_user_turns=3",
        "actor_rollout_ref.rollout.gpu_memory_utilization=0.8",
        "+actor_rollout_ref.rollout.engine_kwargs.vllm.swap_space=4",
        "critic.profiler.tool_config.nsys.discrete=true",
    ],
)
def test_a_key_without_effect_is_reported_with_its_value(override):
    (message,) = messages(override)
    assert message.startswith(override.lstrip("+").partition("=")[0] + "=") and "has no effect" in message


def test_a_rollout_with_an_engine_of_its_own_reads_the_engine_keys():
    assert messages("actor_rollout_ref.rollout.gpu_memory_utilization=0.8", "actor_rollout_ref.rollout.name=own") == []
    name = "actor_rollout_ref.rollout.name=vllm"
    assert messages("actor_rollout_ref.rollout.gpu_memory_utilization=0.8", name) == []
    assert len(messages("actor_rollout_ref.rollout.layered_summon=true", name)) == 1


def test_they_are_reported_at_the_start_too():
    lines = []
    sink = logger.add(lines.append, level="WARNING", format="{message}")
    config = compose_ppo(*SOUND, "trainer.use_legacy_worker_impl=disable")
    try:
        validate_config(config, use_reference_policy=False, use_critic=False)
    finally:
        logger.remove(sink)
    assert [line.strip() for line in lines if "has no effect" in line] == [
        "trainer.use_legacy_worker_impl=disable has no effect in this version: there is one worker implementation."
    ]
