"""FLOPs of a step by hand, peaks of devices, and the utilisation that a rank reports."""

import math
from types import SimpleNamespace

import pytest
from transformers import LlamaConfig, Qwen3MoeConfig

from verl.protocol import DataProto
from verl.roles.ranks import ModelWorker
from verl.training import flops_counter
from verl.training.flops_counter import FlopsCounter, get_device_flops

LLAMA = LlamaConfig(
    hidden_size=8, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2, head_dim=2, intermediate_size=10,
    vocab_size=100,
)  # fmt: skip


def test_flops_of_a_dense_model():
    # a layer: q and o 8 * 8 each, k and v 8 * 4 each, three MLP matrices 8 * 10; the head 8 * 100
    weights = 2 * (2 * 64 + 2 * 32 + 240) + 800
    attention = 12 * 2 * 4 * 2 * (3**2 + 5**2)
    reached, peak = FlopsCounter(LLAMA).estimate_flops([3, 5], delta_time=2.0)
    assert reached == pytest.approx((6 * weights * 8 + attention) / 2 / 1e12)
    assert peak == math.inf  # a CPU


def test_a_token_meets_the_experts_it_is_sent_to():
    moe = Qwen3MoeConfig(
        hidden_size=8, num_hidden_layers=1, num_attention_heads=4, num_key_value_heads=4, head_dim=2,
        moe_intermediate_size=3, num_experts=6, num_experts_per_tok=2, vocab_size=10,
    )  # fmt: skip
    weights = 4 * 64 + 2 * 3 * 8 * 3 + 8 * 6 + 80
    assert FlopsCounter(moe).estimate_flops([1], 1.0)[0] == pytest.approx((6 * weights + 12 * 8) / 1e12)


def test_a_model_of_an_unknown_kind_has_no_flops():
    assert FlopsCounter(SimpleNamespace(model_type="rnn")).estimate_flops([3], 1.0)[0] == 0


def test_peaks_of_devices():
    assert get_device_flops("T", "NVIDIA H100 80GB HBM3") == 989
    assert get_device_flops("T", "NVIDIA H100 PCIe") == 756
    assert get_device_flops("G", "NVIDIA A100-SXM4-80GB") == 312_000
    assert get_device_flops("T", "NVIDIA H20") == 148 and get_device_flops("T", "NVIDIA H200") == 989
    assert get_device_flops("T", "Tesla T4") == math.inf
    with pytest.raises(ValueError, match="unit='X' is unknown"):
        get_device_flops("X")


def test_a_rank_reports_the_utilisation_of_all_ranks(monkeypatch):
    rank = ModelWorker.__new__(ModelWorker)
    rank.__dict__.update(engine=SimpleNamespace(module=SimpleNamespace(config=LLAMA)), peak_tflops=None)
    monkeypatch.setattr(ModelWorker, "world_size", 4, raising=False)
    data = DataProto(meta_info={"global_token_num": [3, 5]})
    assert rank.utilisation("actor", data, 2.0, passes=1) == {}  # the peak of a CPU is unknown
    monkeypatch.setitem(flops_counter._PEAK_TFLOPS, "cpu", 1e-9)
    reached = FlopsCounter(LLAMA).estimate_flops([3, 5], 2.0)[0]
    share = rank.utilisation("actor", data, 2.0, passes=3)["perf/mfu/actor"]
    assert share == pytest.approx(3 * reached / 1e-9 / 4)
    rank.peak_tflops = 2e-9  # trainer.peak_tflops has precedence
    assert rank.utilisation("actor", data, 2.0, passes=3)["perf/mfu/actor"] == pytest.approx(share / 2)
    for config in (None, SimpleNamespace(hidden_size=8)):  # modules that are no transformers models, as an SPD scorer
        rank.engine.module.config = config
        assert rank.utilisation("actor", data, 2.0, passes=3) == {}
