"""KL in the reward and the registry call, by hand."""

import numpy as np
import pytest
import torch

from tests.helpers.logs import logged
from verl.algos.advantage import ADV_ESTIMATOR_REGISTRY
from verl.protocol import DataProto
from verl.protocol.serialization import object_array
from verl.reward.rows import EXTRAS
from verl.trainer.ppo.batching import compute_advantage


def scored() -> DataProto:
    tensors = {
        "token_level_scores": torch.tensor([[0.0, 1.0, 0.0], [0.0, 0.0, 2.0]]),
        "old_log_probs": torch.tensor([[-1.0, -1.0, -9.0], [-2.0, -2.0, -2.0]]),
        "ref_log_prob": torch.tensor([[-2.0, -1.0, 0.0], [-1.0, -1.0, -1.0]]),
        "response_mask": torch.tensor([[1, 1, 0], [1, 1, 1]]),
    }
    tensors["token_level_rewards"] = tensors["token_level_scores"]
    return DataProto.from_dict(tensors=tensors, non_tensors={"uid": np.array(["a", "a"], dtype=object)})


def test_estimator_gets_groups_by_uid_and_ignores_what_it_does_not_name():
    data = scored()
    compute_advantage(data, "grpo", norm_adv_by_std_in_grpo=False, num_repeat=2)
    assert data.batch["advantages"].tolist() == [[-0.5, -0.5, 0.0], [0.5, 0.5, 0.5]]


def test_a_required_parameter_names_a_column_of_the_data_or_of_the_reward(monkeypatch):
    def by_level(token_level_rewards, response_mask, level, difficulty, lam=None, note="default"):
        assert note == "default"  # an optional parameter does not take a column by chance
        weights = torch.tensor([float(one) * two for one, two in zip(level, difficulty, strict=True)])
        return (token_level_rewards * weights[:, None], token_level_rewards)

    monkeypatch.setitem(ADV_ESTIMATOR_REGISTRY, "by_level", by_level)
    data = scored()
    data.non_tensor_batch["level"] = np.array(["2", "3"], dtype=object)
    data.non_tensor_batch["note"] = np.array(["x", "y"], dtype=object)
    data.non_tensor_batch[EXTRAS] = object_array([{"difficulty": 5.0}, {"difficulty": 7.0}])
    compute_advantage(data, "by_level")
    assert data.batch["advantages"].tolist() == [[0.0, 10.0, 0.0], [0.0, 0.0, 42.0]]
    data.non_tensor_batch.pop("level")
    with pytest.raises(ValueError, match="'by_level' needs level, which this batch lacks"):
        compute_advantage(data, "by_level")


def test_a_step_of_equal_rewards_is_a_warning():
    data = scored()
    with logged() as messages:
        data.batch["token_level_rewards"] = torch.tensor([[0.0, 0.1, 0.0], [0.0, 0.0, 0.1]])
        compute_advantage(data, "grpo")
        assert "All advantages of this step are 0 (mean reward 0.1)" in messages.pop()
        data.batch["token_level_rewards"][0, 1] = 0.2
        compute_advantage(data, "grpo")
    assert not messages
