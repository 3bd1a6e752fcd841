"""Two gloo ranks beside one: weights behind packed steps, and the file of the model's own answers."""

import numpy as np
import pytest

from dllm_reasoning.trainer.iterative_refine_trainer import IterativeRefineTrainer
from tests.dllm_reasoning import runs
from tests.dllm_reasoning.test_trainer import REWARD, steps
from tests.helpers.ranks import run_ranks

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("fresh_group")]


def packed_steps(rank, world_size, model, train, folder):
    """(weights before, weights behind four steps). AdamW's epsilon keeps gradients near 0 from counting by sign."""
    config = runs.compose(model, train, folder, "iterative.noise_pattern=packed", "iterative.ar_loss_weight=1",
                          "data.micro_batch_size_per_gpu=2",
                          "optim.override_optimizer_config={eps: 1e-2}")  # fmt: skip
    trainer = runs.trainer_of(config)
    before = {name: tensor.numpy() for name, tensor in runs.weights(trainer).items()}
    steps(trainer, 4)
    return before, {name: tensor.numpy() for name, tensor in runs.weights(trainer).items()}


def test_packed_steps_leave_the_weights_of_one_rank(place, tmp_path):
    before, alone = packed_steps(0, 1, *place, str(tmp_path))
    assert max(np.abs(alone[name] - value).max() for name, value in before.items()) > 1e-3
    for _, weights in run_ranks(packed_steps, 2, *place, str(tmp_path)):
        assert weights.keys() == alone.keys()
        assert max(np.abs(weights[name] - value).max() for name, value in alone.items()) < 1e-5


def own_answers(rank, world_size, model, train, folder, reward):
    """(name, content) of the file that the ranks leave, and the number of rows that a rank then trains on."""
    own = ("iterative.self_generate.enable=true", "iterative.self_generate.max_new_tokens=12",
           "iterative.self_generate.batch_size=4", f"iterative.self_generate.reward_function.path={reward}",
           "iterative.self_generate.reward_function.name=keep_even", "data.train_batch_size=2")  # fmt: skip
    config = runs.compose(model, train, f"{folder}/{world_size}", *own)
    made = IterativeRefineTrainer.build_dataset(train, config, IterativeRefineTrainer.build_tokenizer(config))
    return made.data_files[0], len(made)


def test_own_answers_of_two_ranks_are_the_file_of_one(place, tmp_path):
    given = (*place, str(tmp_path), str(tmp_path / "reward.py"))
    (tmp_path / "reward.py").write_text(REWARD)
    file, count = own_answers(0, 1, *given)
    assert count > 2
    for other, rows in run_ranks(own_answers, 2, *given):
        assert other == file.replace(f"{tmp_path}/1/", f"{tmp_path}/2/") != file and rows == count
        assert open(other, "rb").read() == open(file, "rb").read()
