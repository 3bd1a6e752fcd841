"""ReMax: samples are compared with their prompt's greedy answer, and go without it."""

import pytest
from omegaconf import OmegaConf

from tests.helpers.rl_run import FakeGroup, compose_run, fake_trainer, metrics_rows
from verl.trainer.run.timing import StepFailed


class LosingGreedy(FakeGroup):
    """Loses the greedy answers of these prompts of each batch."""

    lost_greedy = (1, 4)

    def generate_sequences(self, prompts):
        self.lost_rows = () if prompts.meta_info["do_sample"] else self.lost_greedy
        return super().generate_sequences(prompts)


class LosingAllGreedy(LosingGreedy):
    lost_greedy = tuple(range(8))


def remax(folder, **more):
    return compose_run(folder, "unused", algorithm__adv_estimator="remax", trainer__total_training_steps=3, **more)


@pytest.mark.process
def test_prompts_whose_greedy_answer_is_lost_are_dropped_and_counted(tmp_path):
    trainer = fake_trainer(remax(tmp_path), LosingGreedy)
    trainer.fit()
    for row in metrics_rows(tmp_path):
        assert row["training/requested_samples"] == 32 and row["training/scored_samples"] == 24
        assert row["training/dropped_samples"] == row["training/dropped_samples/no_baseline"] == 2 * 4
    update = trainer.actor_rollout_wg.updates[0].batch
    assert len(update) == 24
    numbers = (update["responses"] != 30).sum(-1)  # score of a row in sixths; the greedy answer's is 2
    assert (update["advantages"][:, 0] * 6 - (numbers - 2)).abs().max() < 1e-5


@pytest.mark.process
def test_prompts_whose_greedy_answer_has_no_reward_are_dropped_and_counted(tmp_path):
    config = remax(tmp_path, reward_model__error="drop")
    OmegaConf.update(config, "custom_reward_function.reward_kwargs.broken", [3], force_add=True)
    fake_trainer(config).fit()
    rows = metrics_rows(tmp_path)
    assert sum(row["training/dropped_samples/no_baseline"] for row in rows) == 4  # one prompt of the epoch
    assert all(row["training/requested_samples"] == row["training/scored_samples"] + row["training/dropped_samples"]
               for row in rows)  # fmt: skip


def test_a_step_without_any_greedy_answer_says_so(tmp_path):
    with pytest.raises(StepFailed, match="none of the 32 samples .* 32 have no greedy baseline"):
        fake_trainer(remax(tmp_path), LosingAllGreedy).fit()
