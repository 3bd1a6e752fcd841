"""The user's project runs unchanged; its numbers are those of its own formulas."""

import json
from pathlib import Path

import pytest
import torch

from tests.compat.project.algorithms import compute_group_rank_advantage, compute_unclipped_loss
from tests.compat.project.recipe import CountingTaskRunner
from tests.helpers.rl_run import compose_run
from verl.trainer.ppo.core_algos import get_adv_estimator_fn, get_policy_loss_fn

PROJECT = Path(__file__).with_name("project")


def settings(tmp_path, model, **more):
    return compose_run(
        tmp_path, model, trainer__total_training_steps=3, reward_model__num_workers=0, trainer__save_freq=2,
        data__custom_cls__path=PROJECT / "data.py", data__custom_cls__name="SumDataset",
        data__sampler__class_path=PROJECT / "data.py", data__sampler__class_name="WorstFirst",
        custom_reward_function__path=PROJECT / "rewards.py", custom_reward_function__name="compute_score",
        actor_rollout_ref__model__external_lib="tests.compat.project.rollout",
        actor_rollout_ref__rollout__name="counting", algorithm__adv_estimator="group_rank",
        actor_rollout_ref__actor__policy_loss__loss_mode="unclipped", reward_manager__source="importlib",
        reward_manager__name="HalfPointsManager", reward_manager__module__path=PROJECT / "rewards.py",
        reward_manager__module__name="HalfPointsManager", **more,
    )  # fmt: skip


def metrics(tmp_path):
    return [json.loads(line)["data"] for line in (tmp_path / "out" / "metrics.jsonl").read_text().splitlines()]


def test_registered_functions_are_those_of_the_project():
    assert get_adv_estimator_fn("group_rank") is compute_group_rank_advantage
    assert get_policy_loss_fn("unclipped") is compute_unclipped_loss


@pytest.mark.process
@pytest.mark.slow
def test_the_recipe_trains_with_every_part_of_the_project(ray_cluster, tmp_path, tiny_llama):
    trainer = CountingTaskRunner().run(settings(tmp_path, tiny_llama))
    rows = metrics(tmp_path)
    # Sample k of a prompt is the tokens 6, 7, ..., 6 + k; the function gives the share of digits among the words.
    answers = [trainer.tokenizer.decode(range(6, 7 + k)).split() for k in range(4)]
    shares = [sum(word.isdigit() for word in words) / len(words) for words in answers]
    assert len(rows) == 3
    for row in rows:
        assert row["critic/score/mean"] == pytest.approx(0.5 * sum(shares) / 4)  # the manager gives half points
        assert row["reward/digits/mean"] == pytest.approx(sum(shares) / 4)
        assert row["reward/asked/mean"] == pytest.approx(4)  # "a + b =" has four words
        assert row["actor/ratio_max"] == pytest.approx(1.0, abs=1e-5)
        assert row["actor/grad_norm"] > 0 and row["response_length/mean"] == 2.5
    assert trainer.parameters == [sum(p.numel() for p in torch_model(tiny_llama).parameters())]
    assert trainer.doubled == [0, 2, 4, 6] and trainer.saved_at == 3
    sampler = trainer.train_dataloader.sampler
    assert sampler.updates == 3 and (sampler.scores >= 0).sum() == 24  # three batches of eight prompts


def torch_model(path):
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(path)


def test_ranks_within_a_group_are_advantages():
    rewards = torch.tensor([[0.0, 1.0], [0.0, 3.0], [0.0, 2.0], [5.0, 0.0]])
    mask = torch.tensor([[1, 1], [1, 1], [1, 0], [1, 1]])
    advantages, _ = compute_group_rank_advantage(rewards, mask, ["a", "a", "a", "b"])
    assert advantages.tolist() == [[-1, -1], [1, 1], [0, 0], [-1, -1]]
