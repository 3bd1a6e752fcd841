"""The refinement trainer on one rank and several: exactness, validation, resume, own answers, LoRA."""

import json

import pytest
import torch

from dllm_reasoning.trainer.iterative_refine_trainer import VALIDATION_SEED, IterativeRefineTrainer, StepInputs
from dllm_reasoning.utils.noise_utils import row_generator, window_starts
from tests.dllm_reasoning import runs
from verl.trainer.sft.data import cut


def steps(trainer, count):
    results = []
    for trainer.global_steps in range(1, count + 1):
        results.append(trainer.training_step(trainer._draw()))
    return results


def test_one_round_without_noise_is_sft_to_the_last_bit(assets, tmp_path):
    trainer = runs.trainer(*assets, tmp_path, "iterative.num_iterations=1", "iterative.noise_min=0",
                           "iterative.noise_max=0")  # fmt: skip
    batch = trainer._draw()
    batch["noise_seed"] = torch.arange(8)
    tokens = int(batch["loss_mask"][:, 1:].sum())
    with trainer.engine.train_mode():
        for micro in cut(batch, trainer.config.data):
            trainer.engine.optimizer_zero_grad()
            results = trainer.backward(micro, tokens, True, StepInputs(counted=tokens, warm_up=0))
            mine = [p.grad.clone() for p in trainer.engine.module.parameters()]
            trainer.engine.optimizer_zero_grad()
            expected = super(IterativeRefineTrainer, trainer).backward(micro, tokens, True, None)
            assert results["train/loss_s0"] == results["train/loss_total"] == expected["train/loss"]
            assert all(torch.equal(a, p.grad) for a, p in zip(mine, trainer.engine.module.parameters(), strict=True))


@pytest.mark.parametrize("pattern", ["iid", "suffix", "block", "trajectory", "packed"])
def test_every_pattern_learns_and_logs_its_losses(assets, tmp_path, pattern):
    trainer = runs.trainer(*assets, tmp_path, f"iterative.noise_pattern={pattern}", "iterative.ar_loss_weight=0.5",
                           f"data.val_files={assets[1]}", "trainer.total_training_steps=8")  # fmt: skip
    before = trainer._validate()
    results = steps(trainer, 8)
    after = trainer._validate()
    assert after["val/loss"] < before["val/loss"] and after["val/loss_total"] < before["val/loss_total"]
    for row in results:
        total = row["train/loss_s0"] + row["train/loss_s1"] + 0.5 * row["train/loss_ar"]
        assert row["train/loss_total"] == pytest.approx(total, rel=1e-5) and 0 < row["train/noise_mean"] <= 1
        assert row["train/grad_norm"] > 0 and row["train/lr"] >= 0


@pytest.mark.parametrize("pattern", ["iid", "packed"])
def test_the_first_steps_may_train_the_first_round_alone(assets, tmp_path, pattern):
    results = []
    for more in (("iterative.single_round_steps=1",), ("iterative.num_iterations=1",), ()):
        trainer = runs.trainer(*assets, tmp_path, f"iterative.noise_pattern={pattern}", "iterative.ar_loss_weight=1",
                               "iterative.share_instruction=on", *more)  # fmt: skip
        results.append(steps(trainer, 2))
    mixed, one, two = results
    names = ("train/loss_s0", "train/loss_ar", "train/loss_total", "train/grad_norm")
    assert [mixed[0][name] for name in names] == [one[0][name] for name in names] and "train/loss_s1" not in mixed[0]
    # a round that is decoded for the next one takes its logits another way: equal up to rounding
    assert mixed[0]["train/loss_s0"] == pytest.approx(two[0]["train/loss_s0"], rel=1e-6)
    assert mixed[0]["train/loss_s0"] != mixed[0]["train/loss_total"]
    row = mixed[1]
    total = row["train/loss_s0"] + row["train/loss_s1"] + row["train/loss_ar"]
    assert row["train/loss_total"] == pytest.approx(total, rel=1e-5)


def test_micro_batches_do_not_change_a_step(assets, tmp_path):
    results = []
    for micro in (8, 3):
        trainer = runs.trainer(*assets, tmp_path, "iterative.noise_pattern=packed", "iterative.ar_loss_weight=1",
                               f"data.micro_batch_size_per_gpu={micro}")  # fmt: skip
        results.append(steps(trainer, 1)[0])
    one, two = results
    assert one["train/loss_total"] == pytest.approx(two["train/loss_total"], rel=1e-5)
    assert one["train/grad_norm"] == pytest.approx(two["train/grad_norm"], rel=1e-4)
    assert one["train/noise_mean"] == pytest.approx(two["train/noise_mean"], rel=1e-6)
    # the first AdamW step moves each weight by its gradient's sign times the learning rate: compare the gradient only


def rows_of(folder):
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    moment = ("train/time(s)", "perf/")
    return [(r["step"], {k: v for k, v in r["data"].items() if not k.startswith(moment)}) for r in rows]


@pytest.mark.parametrize("pattern", ["iid", "trajectory", "packed"])
def test_validation_depends_neither_on_the_step_nor_on_micro_batches(assets, tmp_path, pattern):
    results = []
    for micro in (4, 1):
        trainer = runs.trainer(*assets, tmp_path, f"iterative.noise_pattern={pattern}", f"data.val_files={assets[1]}",
                               "iterative.noise_schedule=linear", "iterative.ar_loss_weight=0.5",
                               f"data.micro_batch_size_per_gpu={micro}")  # fmt: skip
        for trainer.global_steps in (0, 3):
            results.append(trainer._validate())
    assert results[0] == results[1] and results[2] == results[3] == pytest.approx(results[0], rel=1e-5)
    total = results[0]["val/loss_s0"] + results[0]["val/loss_s1"] + 0.5 * results[0]["val/loss_ar"]
    assert results[0]["val/loss_total"] == pytest.approx(total, rel=1e-6)
    if pattern == "iid":  # drawn from 0.1 to 0.9, not 0.1 as the linear schedule starts
        assert 0.35 < results[0]["val/noise_mean"] < 0.65
    if pattern == "packed":  # a window has three noise tokens and four labels, or as many as the response has left
        answers = [int(row["loss_mask"].sum()) for row in trainer.val_loader.dataset.dataset]
        left = [n - start for row, n in enumerate(answers)
                for start in window_starts(n, 3, row_generator(VALIDATION_SEED + row))]  # fmt: skip
        expected = sum(min(3, n) for n in left) / sum(min(4, n) for n in left)
        assert results[0]["val/noise_mean"] == pytest.approx(expected)
