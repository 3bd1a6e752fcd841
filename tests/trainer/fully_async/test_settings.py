"""The settings of asynchronous runs: trees, batch sizes, what is refused."""

import pytest
from omegaconf import OmegaConf

from tests.helpers.rl_run import compose_run
from verl.config.asynchronous import AsyncPPOConfig, versions_allowed, with_derived_settings
from verl.config.compose import to_settings
from verl.config.ppo import PPOConfig
from verl.planning.config_check import find_problems, tree_problems
from verl.planning.ppo import check_generating_ranks
from verl.trainer.main_ppo import current_config


def settings(folder, tree="fully_async_ppo_trainer", **more):
    given = {"data__train_batch_size": 0, "actor_rollout_ref__rollout__name": "vllm"} | more
    config = with_derived_settings(compose_run(folder, "model", tree=f"verl.trainer.config/{tree}", **given))
    return config, to_settings(config, AsyncPPOConfig)


def test_the_defaults_are_sound(tmp_path):
    config, typed = settings(tmp_path)
    assert typed.actor_rollout_ref.hybrid_engine is False and versions_allowed(typed.async_training) == 4
    assert typed.actor_rollout_ref.actor.use_rollout_log_probs and typed.actor_rollout_ref.rollout.calculate_log_probs
    assert find_problems(config) == []


@pytest.mark.parametrize(("size", "problems"), [(2, 0), (3, 1)])
def test_engines_are_made_of_the_ranks_that_generate(tmp_path, size, problems):
    more = {"trainer__n_gpus_per_node": 1, "rollout__n_gpus_per_node": 4,
            "actor_rollout_ref__rollout__tensor_model_parallel_size": size}  # fmt: skip
    found = find_problems(settings(tmp_path, **more)[0])
    said = f"tensor_model_parallel_size={size} does not divide the 4 ranks. Use one of 1, 2, 4."
    assert len(found) == problems and all(said in problem.message for problem in found)


def test_an_update_takes_mini_batches_or_one_step_the_batch(tmp_path):
    _, typed = settings(tmp_path, async_training__require_batches=3)
    assert typed.data.train_batch_size == typed.data.gen_batch_size == 24
    _, typed = settings(tmp_path, "one_step_off_ppo_trainer", data__train_batch_size=16)
    assert typed.data.train_batch_size == 16
    training = typed.async_training
    assert versions_allowed(training) == 1 and not training.partial_rollout


@pytest.mark.parametrize(
    ("more", "says"),
    [
        ({"async_training__use_rollout_log_probs": "false"}, "use_rollout_log_probs=false.*prox_log_prob=false"),
        ({"async_training__max_staleness": 2}, "max_staleness=2: the last update.*Set it to 3 or more"),
        ({"actor_rollout_ref__rollout__mode": "sync"}, "rollout.mode=sync.*Set it to async"),
        ({"trainer__local": "true"}, "trainer.local=True does not work with asynchronous training"),
        ({"actor_rollout_ref__rollout__over_sample_rate": 0.5}, "over_sample_rate=0.5 does not work"),
        ({"actor_rollout_ref__rollout__agent__command_journal": "true"}, "command_journal=true does not work here"),
    ],
)
def test_what_cannot_work_is_refused(tmp_path, more, says):
    with pytest.raises(ValueError, match=says):
        settings(tmp_path, **more)


def test_keys_of_asynchronous_training_at_the_other_entry_name_its_entries(tmp_path):
    config = compose_run(tmp_path, "model")
    OmegaConf.update(config, "async_training.partial_rollout", True, force_add=True)
    with pytest.raises(SystemExit, match="python -m verl.experimental.fully_async_policy.fully_async_main"):
        current_config(config)
    assert "async_training" in current_config(settings(tmp_path)[0])


def test_a_machine_without_room_for_both_kinds_of_ranks_is_a_problem_of_the_dry_run(tmp_path, monkeypatch):
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    monkeypatch.setattr("os.cpu_count", lambda: 4)
    (problem,) = check_generating_ranks(settings(tmp_path, rollout__n_gpus_per_node=4)[1])
    assert problem.kind == "absent" and "need 5 CPUs with trainer.device=cpu: this machine has 4" in problem.message
    assert not list(check_generating_ranks(settings(tmp_path, rollout__n_gpus_per_node=3)[1]))
    monkeypatch.setenv("RAY_ADDRESS", "10.0.0.1:6379")
    assert not list(check_generating_ranks(settings(tmp_path, rollout__n_gpus_per_node=4)[1]))


def test_a_number_of_agent_loop_workers_is_reported_as_without_effect(tmp_path):
    config, _ = settings(tmp_path, actor_rollout_ref__rollout__agent__num_workers=2)
    (problem,) = [p for p in tree_problems(config, PPOConfig)[2] if "num_workers" in p.key]
    assert "agent.num_workers=2 has no effect in this version: asynchronous training holds all" in problem.message
    config, _ = settings(tmp_path)
    assert not any("num_workers" in problem.key for problem in tree_problems(config, PPOConfig)[2])


@pytest.mark.parametrize(
    "more",
    [
        {"async_training__allow_off_policy": "true"},
        {"async_training__compute_prox_log_prob": "true"},
        {"async_training__staleness_threshold": 0, "async_training__trigger_parameter_sync_step": 1},
    ],
)
def test_ratios_of_other_weights_need_a_key(tmp_path, more):
    settings(tmp_path, async_training__use_rollout_log_probs="false", **more)


def test_the_objective_reaches_the_actor_and_the_correction(tmp_path):
    """With compute_prox_log_prob, the trainer computes old log-probs, and tokens have a weight."""
    _, typed = settings(tmp_path, async_training__compute_prox_log_prob="true")
    assert not typed.actor_rollout_ref.actor.use_rollout_log_probs
    assert typed.algorithm.rollout_correction.rollout_is == "token"
    _, typed = settings(tmp_path)
    assert typed.actor_rollout_ref.actor.use_rollout_log_probs
    assert typed.algorithm.rollout_correction.rollout_is is None
    given = {"algorithm__rollout_correction__bypass_mode": "true", "async_training__compute_prox_log_prob": "true"}
    with pytest.raises(ValueError, match="bypass_mode=true leaves out. Set one of them to false"):
        settings(tmp_path, **given)
