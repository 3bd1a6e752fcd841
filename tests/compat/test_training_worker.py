"""`TrainingWorker` and the engine's train_batch and infer_batch, with a loss function for verl's model engine."""

import os
from types import SimpleNamespace

import pytest
import torch
from transformers import AutoModelForCausalLM

from tests.helpers.engines import make_engine
from tests.helpers.ranks import run_ranks
from verl.utils import tensordict_utils as tu
from verl.workers.config import FSDPEngineConfig, FSDPOptimizerConfig, HFModelConfig, TrainingWorkerConfig
from verl.workers.engine.base import BaseEngineCtx
from verl.workers.engine_workers import TrainingWorker

LENGTHS = (5, 9, 3, 7)


def sft_loss(model_output, data, dp_group=None):
    """Cross entropy of the tokens whose successor is counted, as loss functions of verl compute it."""
    log_probs = model_output["log_probs"].values()
    mask = torch.cat([row.roll(-1) for row in data["loss_mask"].unbind()])
    loss = -(log_probs * mask).sum() / tu.get(data, "batch_num_tokens") * tu.get(data, "dp_size")
    return loss, {"tokens": int(mask.sum())}


def batch(rows=range(4), **values):
    """Jagged rows whose first two tokens are not counted."""
    generator = torch.Generator().manual_seed(0)
    ids = [torch.randint(5, 60, (length,), generator=generator) for length in LENGTHS]
    masks = [(torch.arange(length) > 1).long() for length in LENGTHS]
    columns = {name: torch.nested.as_nested_tensor([column[i] for i in rows], layout=torch.jagged)
               for name, column in (("input_ids", ids), ("loss_mask", masks))}  # fmt: skip
    return tu.get_tensordict(columns, {"use_dynamic_bsz": False, "micro_batch_size_per_gpu": 3, **values})


def make_worker(path, optimizer="AdamW"):
    config = TrainingWorkerConfig(
        model_type="language_model",
        model_config=HFModelConfig(path=path, load_tokenizer=False, enable_gradient_checkpointing=False),
        engine_config=FSDPEngineConfig(dtype="float32"),
        optimizer_config=FSDPOptimizerConfig(lr=1e-2, clip_grad=1.0, optimizer=optimizer),
    )
    worker = TrainingWorker(config)
    worker.reset()
    return worker


@pytest.fixture
def worker(tiny_llama, monkeypatch):
    for name, value in {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0"}.items():
        monkeypatch.setenv(name, value)
    return make_worker(tiny_llama)


def log_probs_by_transformers(path, ids):
    logits = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)(ids.unsqueeze(0)).logits[0, :-1]
    return logits.log_softmax(-1).gather(-1, ids[1:].unsqueeze(-1))[:, 0]


@pytest.mark.parametrize("cut", [{}, {"use_dynamic_bsz": True, "max_token_len_per_gpu": 12}])
def test_outputs_are_those_of_the_model_in_the_order_of_the_rows(worker, tiny_llama, cut):
    data = batch(**cut, calculate_entropy=True)
    output = worker.infer_batch(data)
    columns = (data["input_ids"], output["log_probs"], output["entropy"])
    for ids, row, entropy in zip(*(column.unbind() for column in columns), strict=True):
        assert torch.allclose(row[:-1], log_probs_by_transformers(tiny_llama, ids), atol=1e-4)
        assert row[-1] == 0 and len(entropy) == len(ids) and bool((entropy[:-1] > 0).all())
    assert tu.get(output, "metrics") == {}  # without a loss function


def test_padded_responses(tiny_llama):
    ids = torch.tensor([[0, 7, 8, 9], [5, 6, 7, 0]])
    mask = torch.tensor([[0, 1, 1, 1], [1, 1, 1, 0]])
    columns = {"input_ids": ids, "attention_mask": mask, "responses": ids[:, 2:], "response_mask": mask[:, 2:]}
    engine = make_engine(tiny_llama)
    with engine.eval_mode():
        outputs = engine.infer_batch(tu.get_tensordict(columns, {"use_dynamic_bsz": True, "max_token_len_per_gpu": 8}))
    expected = log_probs_by_transformers(tiny_llama, ids[0, 1:])
    assert torch.allclose(outputs["model_output"]["log_probs"][0], expected, atol=1e-4)


@pytest.mark.parametrize("optimizer", ["AdamW", "SGD"])
def test_a_worker_trains_and_resumes(optimizer, worker, tiny_llama, tmp_path):
    """SGD without momentum has no state to store."""
    worker = make_worker(tiny_llama, optimizer) if optimizer != "AdamW" else worker
    with pytest.raises(RuntimeError, match="set_loss_fn"):
        worker.train_batch(batch())
    worker.set_loss_fn(sft_loss)
    losses = [tu.get(worker.train_batch(batch(update_lr_scheduler=True)), "metrics") for _ in range(3)]
    assert losses[2]["loss"] < losses[0]["loss"] and losses[0]["lr"] == 1e-2 and losses[0]["grad_norm"] > 0
    counted = [-row[1:].sum().item() for row in _rows(tiny_llama)]
    assert losses[0]["loss"] == pytest.approx(sum(counted) / sum(n - 2 for n in LENGTHS), rel=1e-4)
    worker.save_checkpoint(str(tmp_path))
    after = tu.get(worker.infer_batch(batch()), "metrics")["loss"]
    worker.train_batch(batch())
    assert tu.get(worker.infer_batch(batch()), "metrics")["loss"] < after
    worker.load_checkpoint(str(tmp_path))
    assert tu.get(worker.infer_batch(batch()), "metrics")["loss"] == pytest.approx(after)
    assert tu.get(worker.infer_batch(batch(compute_loss=False)), "metrics") == {}


def _rows(path):
    return [log_probs_by_transformers(path, ids) for ids in batch()["input_ids"].unbind()]


def test_mini_batches_are_steps_and_the_schedule_moves_on_after_the_last(worker):
    worker.set_loss_fn(sft_loss)
    metrics = tu.get(worker.train_mini_batch(batch(mini_batch_size=2, epochs=2)), "metrics")
    assert len(metrics["loss"]) == 4 and metrics["lr"] == [1e-2]
    assert metrics["tokens"] == pytest.approx([(3 + 7) / 1, (1 + 5) / 1] * 2)


def test_sizes_of_micro_batches_are_needed(worker):
    with pytest.raises(ValueError, match="micro_batch_size_per_gpu"):
        worker.infer_batch(batch(micro_batch_size_per_gpu=None))
    with pytest.raises(ValueError, match="max_token_len_per_gpu"):
        worker.infer_batch(batch(use_dynamic_bsz=True))


def trained(rank, world_size, path):
    worker = make_worker(path)
    worker.set_loss_fn(sft_loss)
    size = 4 // world_size
    metrics = tu.get(worker.train_batch(batch(rows=range(rank * size, rank * size + size))), "metrics")
    weights = dict(worker.engine.get_per_tensor_param())
    return metrics["loss"], metrics["grad_norm"], float(sum(w.double().abs().sum() for w in weights.values()))


@pytest.mark.process
def test_the_step_does_not_depend_on_the_number_of_ranks(tiny_llama):
    os.environ.pop("RANK", None)
    one, (first, second) = run_ranks(trained, 1, tiny_llama)[0], run_ranks(trained, 2, tiny_llama)
    assert first == pytest.approx(second) and first == pytest.approx(one, rel=1e-4)


def test_a_context_of_an_engine_of_ones_own_moves_what_is_offloaded():
    moved = []
    engine = SimpleNamespace(is_param_offload_enabled=True, is_optimizer_offload_enabled=True, mode=None)
    engine.to = lambda device, model, optimizer: moved.append((device, model, optimizer))
    with BaseEngineCtx(engine, "train"):
        assert engine.mode == "train"
    with BaseEngineCtx(engine, "eval"):
        assert engine.mode == "eval"
    assert engine.mode is None and [what[1:] for what in moved] == [(True, True)] * 2 + [(True, False)] * 2
    with BaseEngineCtx(engine, "eval", disable_auto_offload=True):
        assert len(moved) == 4
    with pytest.raises(ValueError, match="'infer'"):
        BaseEngineCtx(engine, "infer")
