"""The files of a saved scorer, and what of its settings gives them their meaning."""

from collections.abc import Mapping
from pathlib import Path

import torch

HEAD_FILE = "score_head.safetensors"
ADAPTER_DIR = "adapter"
ADAPTER_FILE = "adapter_model.safetensors"
BACKBONE_DIR = "backbone"
CHECKPOINT_ADAPTERS = "lora_adapter"  # the folder next to a checkpoint's merged export

# Settings that must agree for saved weights to keep their meaning -> the key of the training config.
KIND = {
    **{name: f"spd.{name}" for name in ("backbone", "attention", "context_tokens", "head_inputs")},
    **{name: f"actor_rollout_ref.model.{name}" for name in ("lora_rank", "lora_alpha")},
}

Shapes = dict[str, tuple[int, ...]]


def adapter_file(directory: Path) -> Path:
    """In a folder of their own, or (in a checkpoint) next to the head."""
    file = directory / ADAPTER_FILE
    return file if file.is_file() else directory / ADAPTER_DIR / ADAPTER_FILE


def shapes_of(tensors: Mapping[str, torch.Tensor]) -> Shapes:
    """The shape of each tensor."""
    return {name: tuple(tensor.shape) for name, tensor in tensors.items()}


def different(stored: Shapes, needed: Shapes) -> list[str]:
    """Names that only one side has, or with another shape."""
    return sorted(name for name in {*stored, *needed} if stored.get(name) != needed.get(name))


def first_of(odd: list[str], stored: Shapes, needed: Shapes) -> str:
    """The first of the names that differ, in words."""
    there, here = (shapes.get(odd[0], "missing") for shapes in (stored, needed))
    return f"{len(odd)} weights differ, such as {odd[0]} ({there} there, {here} here)"
