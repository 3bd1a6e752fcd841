"""The SFT step: by hand, and the same whatever the cut into micro-batches, rows and ranks."""

import math
import shutil
from pathlib import Path

import pytest
import torch
from tensordict import TensorDict
from transformers import AutoModelForCausalLM

from tests.helpers.engines import weights_of
from tests.helpers.ranks import run_ranks
from tests.helpers.rl_run import read_rows
from tests.helpers.sft_run import make_trainer, metric_rows, write_pairs
from verl.trainer.run.ranks import all_reduce_max
from verl.trainer.sft.data import PaddedRows, RankShares, cut
from verl.trainer.sft.trainer import next_token_batch
from verl.training.flops_counter import FlopsCounter
from verl.training.policy.packing import pack_batch, to_device


@pytest.fixture
def pairs(tmp_path):
    return write_pairs(tmp_path)


def step(trainer, steps=2):
    """Metrics of some steps and the weights after them."""
    return [trainer.training_step(trainer._draw()) for _ in range(steps)], weights_of(trainer.engine)


def test_the_loss_is_the_mean_over_learned_tokens_of_the_batch(pairs, llama):
    trainer = make_trainer(pairs, llama)
    batch = trainer._draw()
    model = AutoModelForCausalLM.from_pretrained(llama)
    total = count = 0
    for ids, attended, mask in zip(batch["input_ids"], batch["attention_mask"], batch["loss_mask"], strict=True):
        n = int(attended.sum())
        log_p = model(ids[None, :n]).logits[0].log_softmax(-1)
        for t in range(1, n):  # one token after the other, each from the position in front of it
            if mask[t]:
                total, count = total - log_p[t - 1, ids[t]].item(), count + 1
    metrics = trainer.training_step(batch)
    assert metrics["train/loss"] == pytest.approx(total / count, abs=1e-5)
    assert metrics["train/global_tokens"] == batch["attention_mask"].sum()
    assert metrics["train/lr"] == 0.01 and metrics["train/skipped_steps"] == 0
    cosine = 10 * 0.5 * (1 + math.cos(math.pi / 6))  # 6 steps, none of them warm-up
    assert trainer.training_step(batch)["train/lr(1e-3)"] == pytest.approx(cosine)


def test_the_utilisation_is_that_of_all_rows_where_the_peak_is_known(pairs, tiny_llama):
    trainer = make_trainer(pairs, tiny_llama, trainer__peak_tflops="1e-3", trainer__total_training_steps=1)
    batch = trainer._draw()
    lengths = batch["attention_mask"].sum(-1).tolist()
    reached, peak = FlopsCounter(trainer.engine.module.config, 1e-3).estimate_flops(lengths, 2.0)
    assert peak == 1e-3
    assert trainer._utilisation(batch, 2.0) == {"perf/mfu/train": pytest.approx(reached / 1e-3)}
    trainer.fit()
    *_, row = read_rows(pairs / "out" / "metrics.jsonl")
    assert 0 < row["data"]["perf/mfu/train"] and 0.05 < row["data"]["perf/max_memory_resident_gb"] < 64


def test_a_device_learns_the_tokens_that_a_cpu_learns():
    """On the meta device nothing can be read: the tokens that are counted are known on the host."""
    mask = torch.tensor([[1, 1, 1, 1, 1], [1, 1, 1, 0, 0]])
    rows = {"input_ids": torch.arange(10).view(2, 5), "attention_mask": mask, "position_ids": mask.cumsum(-1) - 1,
            "loss_mask": torch.tensor([[0, 0, 1, 0, 1], [0, 1, 1, 0, 0]])}  # fmt: skip
    micro = TensorDict(rows, batch_size=2)
    here, there = (pack_batch(next_token_batch(to_device(micro, torch.device(d))), 4) for d in ("cpu", "meta"))
    assert here.response_index.tolist() == [1, 3, 4, 5]
    assert there.response_index.is_meta and len(there.response_index) == 4


@pytest.mark.parametrize("other", [
    {"data__micro_batch_size_per_gpu": 1}, {"data__micro_batch_size_per_gpu": 3}, {"use_remove_padding": "true"},
    {"data__packing": "true", "data__micro_batch_size_per_gpu": 2}, {"model__enable_gradient_checkpointing": "true"},
])  # fmt: skip
def test_neither_micro_batches_nor_packing_change_the_step(pairs, llama, other):
    plain, weights = step(make_trainer(pairs, llama))
    changed, others = step(make_trainer(pairs, llama, **other))
    for a, b in zip(plain, changed, strict=True):
        assert a["train/loss"] == pytest.approx(b["train/loss"], abs=1e-5)
        assert a["train/grad_norm"] == pytest.approx(b["train/grad_norm"], rel=1e-4)
    assert max(abs(weights[name] - others[name]).max() for name in weights) < 1e-4


def test_the_old_micro_batch_size_replaces_that_of_a_rank(pairs, tiny_llama):
    trainer = make_trainer(pairs, tiny_llama, data__micro_batch_size=2)
    assert [len(piece) for piece in cut(trainer._draw(), trainer.config.data)] == [2] * 4


def test_packing_fills_micro_batches_by_tokens(pairs, tiny_llama):
    trainer = make_trainer(pairs, tiny_llama, data__packing="true", data__micro_batch_size_per_gpu=2)
    pieces = cut(trainer._draw(), trainer.config.data)
    tokens = [int(p["attention_mask"].sum()) for p in pieces]
    assert sum(len(p) for p in pieces) == 8 and max(tokens) <= 2 * 24
    assert len(pieces) < 8 / 2  # fewer forwards than two rows each would take
    assert trainer.policy.remove_padding and not trainer.policy.share_prompt


PACKED = {"data__packing": "true"}
WAYS = {  # on one rank, and with what two ranks share
    "padded": ({}, {}),
    "packed": (PACKED, {}),
    "layers": (PACKED, {"model__fsdp_config__tensor_parallel_size": 2}),
    "sequences": (PACKED | {"use_remove_padding": "true"}, {"ulysses_sequence_parallel_size": 2}),
}


def _ways(directory, model, ranks=1):
    """Metrics of two steps, some weights after them, and validation, for each of WAYS."""
    results = []
    for alone, shared in WAYS.values():
        more = alone | (shared if ranks == 2 else {})
        trainer = make_trainer(Path(directory), model, **more)
        metrics, weights = step(trainer)
        results.append((metrics, {k: v for k, v in weights.items() if "layers.0" in k}, trainer._validate()))
    return results


RESUMED = {"trainer__total_training_steps": 4, "trainer__save_freq": 2, "data__packing": "true"}


def _rank_ways(rank, world_size, directory, model):
    """The same on this rank; then a run continues that one rank began alone."""
    torch.set_num_threads(1)
    results = _ways(directory, model, world_size)
    make_trainer(Path(directory) / "begun", model, **RESUMED).fit()
    values = {"rank": float(rank), "less": -float(rank)}
    assert all_reduce_max(values, torch.device("cpu")) == {"rank": 1.0, "less": 0.0}
    return results


@pytest.mark.process
@pytest.mark.slow
def test_two_ranks_agree_with_one(pairs, tiny_llama):
    alone = _ways(pairs, tiny_llama)
    for name in ("whole", "begun"):
        make_trainer(write_pairs(pairs / name), tiny_llama, **RESUMED).fit()
    shutil.rmtree(pairs / "begun" / "out" / "global_step_4")
    for of_rank in run_ranks(_rank_ways, 2, str(pairs), tiny_llama):
        for (metrics, weights, val), (others, other_weights, other_val) in zip(alone, of_rank, strict=True):
            for a, b in zip(metrics, others, strict=True):
                assert a["train/loss"] == pytest.approx(b["train/loss"], abs=1e-5)
                assert a["train/global_tokens"] == b["train/global_tokens"]
            assert val["val/loss"] == pytest.approx(other_val["val/loss"], abs=1e-5)  # 5 rows: the sixth counts nowhere
            assert max(abs(weights[name] - other_weights[name]).max() for name in weights) < 1e-4
    begun, whole = (metric_rows(pairs / name) for name in ("begun", "whole"))
    assert [row["step"] for row in begun] == [0, 1, 2, 3, 4] and "val/loss" in begun[-1]
    for a, b in zip(begun[1:], whole[1:], strict=True):
        assert a["train/loss"] == pytest.approx(b["train/loss"], abs=1e-5)


@pytest.mark.parametrize("is_finite", [False, True])
def test_a_step_that_is_not_finite_or_has_no_learned_token_changes_nothing_and_is_counted(pairs, tiny_llama, is_finite):
    trainer = make_trainer(pairs, tiny_llama)
    trainer.training_step(trainer._draw())
    before, batch, whole = weights_of(trainer.engine), trainer._draw(), trainer.summed_loss
    if is_finite:
        batch["loss_mask"] = torch.zeros_like(batch["loss_mask"])
    else:
        trainer.summed_loss = lambda micro: whole(micro) * math.nan
    metrics = trainer.training_step(batch)
    assert metrics["train/skipped_steps"] == 1 and "train/loss" not in metrics
    assert all((before[name] == after).all() for name, after in weights_of(trainer.engine).items())


def test_ranks_share_each_batch_of_an_epoch():
    one, two = RankShares(22, 4, 0, 1, seed=3), [RankShares(22, 4, rank, 2, seed=3) for rank in range(2)]
    halves = [list(shares) for shares in two]
    assert [sorted(a + b) for a, b in zip(*halves, strict=True)] == [sorted(batch) for batch in one]
    assert len({i for batch in one for i in batch}) == 20 == 4 * len(one)
    one.epoch = 1
    assert list(one) != list(RankShares(22, 4, 0, 1, seed=3))


def test_validation_rows_are_seen_once_and_filled_up_without_counting():
    assert [list(RankShares(5, 4, rank, 2)) for rank in range(2)] == [[[0, 2], [4]], [[1, 3], [5]]]
    filled = PaddedRows([{"loss_mask": torch.ones(3)}] * 5)
    assert filled[4]["loss_mask"].sum() == 3 and filled[5]["loss_mask"].sum() == 0


def test_packing_refuses_a_model_whose_attention_stays(pairs, tiny_llama, monkeypatch):
    monkeypatch.setattr("verl.training.policy.causal_lm.make_packable", lambda *_: False)
    with pytest.raises(ValueError, match="data.packing=true: this model cannot compute batches without padding"):
        make_trainer(pairs, tiny_llama, data__packing="true")
