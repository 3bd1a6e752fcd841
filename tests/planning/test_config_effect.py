"""Keys without effect are reported where they are set, and only there."""

import pytest

from tests.helpers.configs import SOUND, compose_ppo
from tests.helpers.logs import logged
from verl.config.ppo import PPOConfig
from verl.planning.config_check import find_problems, tree_problems
from verl.utils.config import validate_config


def messages(*overrides):
    return [p.message for p in tree_problems(compose_ppo(*SOUND, *overrides), PPOConfig)[2]]


ROLLOUT, IMPLEMENTATION = "actor_rollout_ref.rollout", "actor_rollout_ref.model.fused_kernel_options.impl_backend"


@pytest.mark.parametrize(
    "settings",
    [
        "", f"{ROLLOUT}.max_model_len=${{data.max_prompt_length}}", "actor_rollout_ref.actor.strategy=fsdp2",
        f"trainer.use_legacy_worker_impl=auto {IMPLEMENTATION}=torch",
        f"{ROLLOUT}.gpu_memory_utilization=0.8 {ROLLOUT}.name=own",
        f"{ROLLOUT}.gpu_memory_utilization=0.8 {ROLLOUT}.name=vllm",
    ],
)  # fmt: skip
def test_settings_that_are_read_are_not_reported(settings):
    assert messages(*settings.split()) == []


def test_a_setting_of_old_scripts_is_reported_once_where_it_has_another_value():
    held = ("actor_rollout_ref.actor.entropy_checkpointing", "actor_rollout_ref.model.use_fused_kernels")
    assert messages(*(f"{key}=false" for key in held)) == []
    found = messages(*(f"{key}=true" for key in held))
    assert len(found) == 2 and all(any(line.startswith(f"{key}=true has no effect") for line in found) for key in held)


@pytest.mark.parametrize(
    "override",
    [
        "actor_rollout_ref.rollout.mode=async",
        "actor_rollout_ref.rollout.multi_turn.max_user_turns=3",
        "actor_rollout_ref.rollout.gpu_memory_utilization=0.8",
        "+actor_rollout_ref.rollout.engine_kwargs.vllm.swap_space=4",
        "actor_rollout_ref.model.fused_kernel_options.impl_backend=triton",
        "actor_rollout_ref.rollout.max_model_len=64",
        "actor_rollout_ref.rollout.layered_summon=true",
    ],
)
def test_a_key_without_effect_is_reported_with_its_value(override):
    (message,) = messages(override)
    assert message.startswith(override.lstrip("+").partition("=")[0] + "=") and "has no effect" in message


@pytest.mark.parametrize(("key", "value", "instead"), [
    ("logprobs_mode", "raw_logprobs", "SGLang returns log-probs after temperature, before top-k and top-p"),
    ("speculative.method", "ngram", "in actor_rollout_ref.rollout.engine_kwargs.sglang"),
    ("lora_as_adapter", "true", "SGLang receives merged weights"),
])  # fmt: skip
def test_what_sglang_does_not_read_is_refused_for_it_alone(key, value, instead):
    override, name = f"actor_rollout_ref.rollout.{key}={value}", "actor_rollout_ref.rollout.name="
    (problem,) = find_problems(compose_ppo(*SOUND, override, f"{name}sglang"))
    assert f"{override} does not work with {name}sglang: " in problem.message
    assert instead in problem.message
    assert find_problems(compose_ppo(*SOUND, override, f"{name}vllm")) == []


@pytest.mark.parametrize(("name", "mode"), [("sglang", "sync"), ("vllm", "async")])
def test_a_queue_of_prompts_needs_engines_that_answer_batches(name, mode):
    queued = (*SOUND, "actor_rollout_ref.rollout.prompt_queue=true")
    (problem,) = find_problems(compose_ppo(*queued, f"actor_rollout_ref.rollout.{name=!s}",
                                           f"actor_rollout_ref.rollout.{mode=!s}"))  # fmt: skip
    needed = "actor_rollout_ref.rollout.name=vllm and actor_rollout_ref.rollout.mode=sync"
    assert f"rollout.prompt_queue=true needs {needed}, not " in problem.message
    assert find_problems(compose_ppo(*queued, "actor_rollout_ref.rollout.name=vllm")) == []
    assert len(messages("actor_rollout_ref.rollout.prompt_queue=true")) == 1  # hf: no engine, no effect


def test_a_queue_of_prompts_and_draft_models_trained_by_rank_exclude_each_other():
    key = "actor_rollout_ref.rollout"
    config = compose_ppo(*SOUND, f"{key}.name=vllm", f"{key}.prompt_queue=true",
                         f"{key}.speculative.method=draft_model", f"{key}.speculative.draft_path=/draft",
                         f"{key}.speculative.refresh_every=1")  # fmt: skip
    assert any("rollout.speculative.refresh_every" in problem.message for problem in find_problems(config))


def test_a_served_reward_model_keeps_its_memory():
    key = "reward_model.rollout.free_cache_engine"
    (problem,) = find_problems(compose_ppo(*SOUND, f"{key}=true"))
    assert problem.message.startswith(f"{key}=true does not work here: a reward model's server stays loaded")


def test_they_are_reported_at_the_start_too():
    key = "actor_rollout_ref.model.fused_kernel_options.impl_backend"
    config = compose_ppo(*SOUND, f"{key}=triton")
    with logged() as lines:
        validate_config(config, use_reference_policy=False, use_critic=False)
    assert [line for line in lines if "has no effect" in line] == [
        f"{key}=triton has no effect in this version: log-probs are always computed by PyTorch; there is no Triton "
        "kernel."
    ]
