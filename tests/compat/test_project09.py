"""A user's project for verl 0.9 trains under the keys of verl 0.9: agent loop, reward manager, function tool, loss."""

import json
from pathlib import Path

import pytest
from hydra import compose, initialize_config_module

from tests.helpers.rl_run import overrides
from verl.config.aliases import with_current_names
from verl.config.compose import forced_override
from verl.trainer.main_ppo_v0 import TaskRunner

PROJECT = Path(__file__).with_name("project09")
KEYS = (
    "reward.custom_reward_function.path={project}/rewards.py", "reward.custom_reward_function.name=compute_score",
    "reward.reward_manager.source=importlib", "reward.reward_manager.module.path={project}/rewards.py",
    "reward.reward_manager.name=WithTurnsManager", "reward.num_workers=0", "trainer.use_v1=False",
    "trainer.v1.trainer_mode=sync", "actor_rollout_ref.model.external_lib=tests.compat.project09.losses",
    "actor_rollout_ref.actor.policy_loss.loss_mode=squared_ratio", "actor_rollout_ref.rollout.mode=async",
    "actor_rollout_ref.rollout.name=vllm", "actor_rollout_ref.rollout.dtype=float32",
    "actor_rollout_ref.rollout.agent.default_agent_loop=count_then_answer", "actor_rollout_ref.rollout.seed=3",
    "actor_rollout_ref.rollout.multi_turn.function_tool_path={project}/tools.py",
    "actor_rollout_ref.rollout.scheduling_policy=priority", "actor_rollout_ref.rollout.agent.num_workers=1",
    "actor_rollout_ref.rollout.checkpoint_engine.update_weights_bucket_megabytes=64",
    "actor_rollout_ref.rollout.checkpoint_engine.backend=naive", "algorithm.filter_groups.enable=False",
    "model_engine=dp",
)  # fmt: skip


def settings(tmp_path, model):
    own = [word for word in overrides(tmp_path, model, trainer__total_training_steps=2)
           if not word.startswith(("custom_reward_function", "actor_rollout_ref.rollout.name"))]  # fmt: skip
    words = [*own, *(key.format(project=PROJECT) for key in KEYS)]
    with initialize_config_module("verl.trainer.config", version_base=None):
        config = compose("ppo_trainer", [forced_override(word) for word in words])
    return with_current_names(config, {word.partition("=")[0] for word in words})


@pytest.mark.process
@pytest.mark.slow
def test_the_project_trains(ray_cluster, tmp_path, tiny_llama):
    TaskRunner().run(settings(tmp_path, tiny_llama))
    rows = [json.loads(line)["data"] for line in (tmp_path / "out" / "metrics.jsonl").read_text().splitlines()]
    assert len(rows) == 2
    for row in rows:
        # The manager gives the share of digits and 0.1 for each of the four turns.
        assert row["critic/score/mean"] == pytest.approx(row["reward/digits/mean"] + 0.4)
        assert row["num_turns/mean"] == 4 and row["actor/log_ratio_max"] == 0 and row["actor/grad_norm"] > 0
        assert 4 <= row["response_length/mean"] <= 6  # at most two tokens, "4" of the tool, at least one more
