"""scripts/gpu_check.py: its comparisons run on the CPU as well; its commands are those of a GPU."""

import math

import pytest
import torch

from scripts import gpu_check
from scripts.loss_compare import TRAININGS
from tests.helpers.engines import leave_group


@pytest.mark.parametrize("check", gpu_check.CHECKS)
def test_comparisons_hold_on_the_cpu_in_bfloat16(check):
    results = list(check(torch.device("cpu")))
    leave_group()
    assert results and all(result.holds and 0 < result.value for result in results)


def test_a_broken_kernel_misses_its_bound(monkeypatch):
    sdpa = gpu_check.BACKENDS["sdpa"]
    off = {"sdpa": lambda q, *rest: sdpa(q if q.dtype == torch.float32 else q * 1.1, *rest)}
    monkeypatch.setattr(gpu_check, "BACKENDS", off)
    assert not all(result.holds for result in gpu_check.check_attention(torch.device("cpu")))
    assert not gpu_check.Result("loss", math.nan, "").holds


def test_steps_are_timed_and_counted():
    sizes = dict(hidden_size=64, intermediate_size=96, num_hidden_layers=1, num_attention_heads=2,
                 num_key_value_heads=1, vocab_size=1024)  # fmt: skip
    (rate,) = gpu_check.measure("tiny", sizes, torch.device("cpu"), length=32, steps=2)
    leave_group()
    assert rate.value > 0 and rate.unit == "tokens/s"


def test_trainings_are_sent_to_the_gpus(tmp_path):
    assert {training for training, *_ in gpu_check.RUNS.values()} == set(TRAININGS)
    for training, changes, _ in gpu_check.RUNS.values():
        words = gpu_check.on_gpu(TRAININGS[training].train(tmp_path, tmp_path), changes, 8)
        assert "cpu" not in words and "trainer.device=cpu" not in words
        keys = [word.partition("=")[0] for word in words if "=" in word]
        assert len(keys) == len(set(keys))
    assert f"{gpu_check.RANKS}=8" in gpu_check.on_gpu([f"{gpu_check.RANKS}=1"], [f"{gpu_check.RANKS}=ALL"], 8)


@pytest.mark.skipif(torch.cuda.is_available(), reason="it would run everything")
def test_without_a_gpu_it_says_what_it_would_do(capsys):
    assert gpu_check.main([]) == 0
    said = capsys.readouterr().out
    assert "No GPU is here" in said and "GRPO with LoRA" in said and "7B" in said
