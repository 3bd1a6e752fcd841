"""Two gloo ranks against one: losses, weights, validation, own answers. Ranks that share sequences or layers: losses
and validation."""

import numpy as np
import pytest
import torch

from dllm_reasoning.trainer.iterative_refine_trainer import IterativeRefineTrainer
from tests.dllm_reasoning import runs
from tests.dllm_reasoning.test_self_generate import REWARD
from tests.dllm_reasoning.test_trainer import steps
from tests.helpers.ranks import run_ranks

pytestmark = [pytest.mark.slow, pytest.mark.process]
PACKED = ("iterative.noise_pattern=packed", "data.micro_batch_size_per_gpu=2", "iterative.ar_loss_weight=1")


def losses(model, train, folder, patterns=("packed", "iid"), *more):
    """Losses and gradient norms of two steps of each pattern."""
    rows = []
    for pattern in patterns:
        trainer = runs.trainer(model, train, folder, f"iterative.noise_pattern={pattern}", "optim.lr=1e-3",
                               "data.micro_batch_size_per_gpu=2", "iterative.ar_loss_weight=0.5", *more)  # fmt: skip
        names = ("train/loss_s0", "train/loss_s1", "train/loss_ar", "train/grad_norm")
        rows += [[row[name] for name in names] for row in steps(trainer, 2)]
    return rows


def weights(model, train, folder):
    """(weights before, weights after four steps). AdamW's epsilon keeps gradients near 0 from counting by sign."""
    trainer = runs.trainer(model, train, folder, *PACKED, "optim.override_optimizer_config={eps: 1e-2}")
    before = {name: tensor.numpy() for name, tensor in runs.weights(trainer).items()}
    steps(trainer, 4)
    return before, {name: tensor.numpy() for name, tensor in runs.weights(trainer).items()}


def validation(model, train, folder, *more):
    """Metrics of 11 validation rows, which two ranks cannot share evenly."""
    metrics = []
    for pattern in ("iid", "suffix", "packed"):
        settings = (f"iterative.noise_pattern={pattern}", "iterative.ar_loss_weight=0.5",
                    f"data.val_files={folder}/val.parquet", "data.micro_batch_size_per_gpu=1")  # fmt: skip
        metrics.append(runs.trainer(model, train, folder, *settings, *more)._validate())
    return metrics


def own_answers(model, train, folder, world_size):
    """The name of the file that the ranks write, and the number of rows that a rank then trains on."""
    own = ("iterative.self_generate.enable=true", "iterative.self_generate.max_new_tokens=12",
           "iterative.self_generate.batch_size=4", f"iterative.self_generate.reward_function.path={folder}/reward.py",
           "iterative.self_generate.reward_function.name=keep_even", "data.train_batch_size=2")  # fmt: skip
    config = runs.compose(model, train, f"{folder}/{world_size}", *own)
    dataset = IterativeRefineTrainer.build_dataset(train, config, IterativeRefineTrainer.build_tokenizer(config))
    return dataset.data_files[0], len(dataset)


def everything(rank, world_size, *given):
    parts = {"losses": losses(*given), "weights": weights(*given)[1], "validation": validation(*given)}
    return parts | {"own": own_answers(*given, world_size)}


def tokens_read(model, train, folder, *more):
    """Tokens that this rank's forwards of a packed step read."""
    trainer, read = runs.trainer(model, train, folder, *PACKED, *more), []
    embedding = trainer.engine.module.get_input_embeddings()
    embedding.register_forward_hook(lambda module, inputs, output: read.append(inputs[0].numel()))
    steps(trainer, 1)
    return sum(read)


def of_neighbours(rank, world_size, given, sequences, layers):
    """Ranks that share sequences and layers: losses with and without a shared prefix, validation, tokens read."""
    more = (f"ulysses_sequence_parallel_size={sequences}", f"model.fsdp_config.tensor_parallel_size={layers}")
    separate = losses(*given, ("packed", "iid"), "iterative.share_instruction=off", *more)
    return losses(*given, ("packed", "iid"), *more), separate, validation(*given, *more), tokens_read(*given, *more)


@pytest.fixture(scope="module")
def given(assets, tmp_path_factory):
    folder = tmp_path_factory.mktemp("ranks")
    (folder / "reward.py").write_text(REWARD)
    runs.save_rows(folder / "val.parquet", runs.sums(11))
    return (*assets, str(folder))


@pytest.fixture(scope="module")
def one(given):
    return {"before": weights(*given)[0], "read": tokens_read(*given), **everything(0, 1, *given)}


@pytest.fixture(scope="module")
def two(given, one):
    return run_ranks(everything, 2, *given)


def test_two_ranks_have_the_losses_of_one(one, two):
    expected = [pytest.approx(row, rel=1e-5, abs=1e-5) for row in one["losses"]]
    assert all(parts["losses"] == expected for parts in two)


@pytest.mark.parametrize(("ranks", "sequences", "layers"), [(2, 2, 1), (4, 1, 2), (4, 4, 1), (4, 2, 2)])
def test_ranks_that_share_sequences_or_layers_have_the_losses_of_one(given, one, ranks, sequences, layers):
    """The model has two key heads: with four ranks per sequence, two of them share one."""
    expected = [pytest.approx(row, rel=1e-5, abs=1e-5) for row in one["losses"]]
    means = [pytest.approx(metrics, rel=1e-5) for metrics in one["validation"]]
    results = run_ranks(of_neighbours, ranks, given, sequences, layers)
    for together, separate, validated, _ in results:
        assert together == expected and separate == expected and validated == means
    read = sum(read for *_, read in results) / layers  # ranks that split layers read the same tokens
    assert one["read"] <= read < 1.05 * one["read"]  # each rank a part of every forward, filled up


def test_packed_steps_give_the_weights_of_one_rank(one, two):
    alone = one["weights"]
    assert max(np.abs(alone[name] - value).max() for name, value in one["before"].items()) > 1e-3
    for parts in two:
        torch.testing.assert_close(parts["weights"], alone, rtol=0, atol=1e-5)


def test_validation_is_that_of_one_rank(one, two):
    names = {"val/loss", "val/loss_s0", "val/loss_s1", "val/loss_ar", "val/loss_total", "val/noise_mean"}
    assert all(set(metrics) == names for metrics in one["validation"])
    for parts in two:
        assert parts["validation"] == [pytest.approx(metrics, rel=1e-5) for metrics in one["validation"]]


def test_own_answers_are_the_file_of_one_rank(given, one, two):
    file, count = one["own"]
    assert count > 2
    for parts in two:
        other, rows = parts["own"]
        assert other == file.replace(f"{given[-1]}/1/", f"{given[-1]}/2/") != file and rows == count
        assert open(other, "rb").read() == open(file, "rb").read()
