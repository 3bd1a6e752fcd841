"""Model FLOPs of a training step, and what a device can do at most, for model FLOPs utilisation (MFU)."""

import math
import re
from collections.abc import Callable, Sequence
from typing import Any

import torch

# Dense bfloat16 TFLOP/s of data sheets, by a part of the device's name; the first that fits counts.
_PEAK_TFLOPS = {
    "GB200": 2500, "B200": 2250, "H200": 989, "H100 PCIe": 756, "H100": 989, "H800": 989, "H20": 148, "A100": 312,
    "A800": 312, "A40": 149.7, "A30": 165, "A10": 125, "L40S": 362, "L40": 181, "L20": 119.5, "L4": 121, "MI300X": 1307,
    "MI325X": 1307, "RTX 5090": 209, "RTX 4090": 165, "RTX 3090": 71,
}  # fmt: skip
_UNITS = {"": 1.0, "K": 1e3, "M": 1e6, "G": 1e9, "T": 1e12, "P": 1e15}


def get_device_flops(unit: str = "T", device_name: str | None = None) -> float:
    """Peak bfloat16 FLOP/s of a device (default: the present one), in units of 10^12 for "T"; inf for an unknown one.

    Raises ValueError for a unit other than "", K, M, G, T, P.
    """
    if unit not in _UNITS:
        raise ValueError(f"unit={unit!r} is unknown. Known: {', '.join(map(repr, _UNITS))}.")
    if device_name is None:
        device_name = torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu"
    for name, tflops in _PEAK_TFLOPS.items():
        if re.search(rf"\b{re.escape(name)}\b", device_name, re.IGNORECASE):
            return tflops * 1e12 / _UNITS[unit]
    return math.inf


def dense_flops(config: Any, lengths: Sequence[int]) -> float:
    """FLOPs of forward and backward over sequences of these lengths, of a decoder with gated MLPs, dense or MoE.

    6 for each weight that a token meets, the head's included and the embedding's not (arXiv 2001.08361), and
    12 * layers * heads * head_dim * length^2 for attention over the full square, as MFU counts it (arXiv 2204.02311).
    """
    hidden, layers = config.hidden_size, config.num_hidden_layers
    heads = config.num_attention_heads
    kv_heads = getattr(config, "num_key_value_heads", None) or heads
    head_dim = getattr(config, "head_dim", None) or hidden // heads
    attention = hidden * head_dim * (2 * heads + 2 * kv_heads)  # q and o, k and v
    experts = getattr(config, "num_experts", None) or getattr(config, "num_local_experts", None)
    if experts:
        width = getattr(config, "moe_intermediate_size", None) or config.intermediate_size
        mlp = 3 * hidden * width * config.num_experts_per_tok + hidden * experts
    else:
        mlp = 3 * hidden * config.intermediate_size
    weights = layers * (attention + mlp) + hidden * config.vocab_size
    return 6 * weights * sum(lengths) + 12 * layers * heads * head_dim * sum(n * n for n in lengths)


# model_type -> FLOPs of (config, lengths) in forward and backward.
ESTIMATE_FUNC: dict[str, Callable[[Any, Sequence[int]], float]] = dict.fromkeys(
    ["llama", "mistral", "mixtral", "qwen2", "qwen3", "qwen2_moe", "qwen3_moe", "gemma", "gemma2", "phi3", "olmo2",
     "granite", "smollm3", "seed_oss"],
    dense_flops,
)  # fmt: skip


class FlopsCounter:
    """FLOPs of training steps of one model. `config` is its transformers configuration; any other object is unknown.

    `peak_tflops`: TFLOP/s of a device (trainer.peak_tflops); None looks its name up.
    """

    def __init__(self, config: Any, peak_tflops: float | None = None) -> None:
        self.config = config
        self.peak_tflops = peak_tflops
        self.estimate = ESTIMATE_FUNC.get(getattr(config, "model_type", None))

    def estimate_flops(self, batch_seqlens: Sequence[int], delta_time: float) -> tuple[float, float]:
        """(TFLOP/s that the step reached, peak TFLOP/s of a device): tokens of each sequence, seconds of the step.

        Forward and backward over all sequences, on all devices together; 0 for an unknown kind of model.
        """
        flops = 0.0 if self.estimate is None else self.estimate(self.config, batch_seqlens)
        peak = get_device_flops("T") if self.peak_tflops is None else self.peak_tflops
        return flops / delta_time / 1e12, peak

    def utilisation(self, batch_seqlens: Sequence[int], seconds: float, devices: int) -> float | None:
        """Share (MFU) of what that many devices could do in the step's seconds; None where a part is unknown."""
        reached, peak = self.estimate_flops(batch_seqlens, seconds)
        return reached / peak / devices or None  # an unknown peak is infinite
