"""The files of docs/plugins.md work in a run, each as its first line says."""

from pathlib import Path

import pytest

from tests.helpers.rl_run import compose_run, metrics_rows
from verl.trainer.main_ppo import TaskRunner
from verl.trainer.run.ray_session import run_here

FOLDER = Path(__file__).resolve().parents[2] / "examples" / "extending"
LIB, ACTOR = "actor_rollout_ref__model__external_lib", "actor_rollout_ref__actor__"


@pytest.mark.parametrize(
    ("settings", "metric"),
    [
        ({"custom_reward_function__path": FOLDER / "my_reward.py"}, "reward/acc/mean"),
        ({LIB: "examples.extending.my_estimator", "algorithm__adv_estimator": "median"}, "critic/advantages/mean"),
        ({LIB: "examples.extending.my_loss", f"{ACTOR}policy_loss__loss_mode": "squared_ratio",
          f"{ACTOR}ppo_mini_batch_size": 4}, "actor/ratio_drift"),
        ({LIB: "examples.extending.my_column_loss", f"{ACTOR}policy_loss__loss_mode": "weighted_ratio",
          "custom_reward_function__path": FOLDER / "my_column_loss.py"}, "actor/weight"),
        ({LIB: "examples.extending.my_rollout", "actor_rollout_ref__rollout__name": "random_words"}, "actor/pg_loss"),
        ({"data__custom_cls__path": FOLDER / "my_dataset.py", "data__custom_cls__name": "ShoutedDataset"},
         "actor/pg_loss"),
    ],
    ids=["reward", "estimator", "loss", "column", "rollout", "dataset"],
)  # fmt: skip
def test_a_part_of_the_guide_trains(settings, metric, tiny_llama, tmp_path, capfd):
    config = compose_run(
        tmp_path, tiny_llama, trainer__local="true", trainer__total_training_steps=2, reward_model__num_workers=0,
        trainer__save_freq=0, **settings,
    )  # fmt: skip
    assert run_here(TaskRunner(), config) == 0, capfd.readouterr().err
    rows = metrics_rows(tmp_path)
    assert [row["step"] for row in rows] == [1, 2] and all(metric in row for row in rows)


def test_the_reward_compares_the_end_of_the_answer():
    from examples.extending.my_reward import compute_score

    assert compute_score("any", " 4\n", "4", bonus=0.5) == {"score": 1.5, "acc": 1.0}
    assert compute_score("any", "5", "4") == {"score": 0.0, "acc": 0.0}


def test_the_median_estimator_centres_each_group():
    import torch

    from examples.extending.my_estimator import compute_median_advantage

    rewards = torch.tensor([[1.0, 0.0], [0.0, 3.0], [5.0, 0.0], [2.0, 2.0]])
    mask = torch.tensor([[1, 1], [1, 1], [1, 0], [1, 1]])
    advantages, returns = compute_median_advantage(rewards, mask, ["a", "a", "a", "b"])
    assert advantages.tolist() == [[-2.0, -2.0], [0.0, 0.0], [2.0, 0.0], [0.0, 0.0]] and returns is advantages
