"""The settings a scorer is built with, as they stand in its `spd_config.json`."""

from __future__ import annotations

import hashlib
import json
from dataclasses import asdict, dataclass, fields
from pathlib import Path

import torch
from torch import nn

from verl.utils.registry import nearest

CONFIG_FILE = "spd_config.json"
BACKBONES = ("own", "target")
ATTENTIONS = ("causal", "spd", "hybrid")


@dataclass
class ScoringModelConfig:
    """What kind of scorer it is and what it stands on."""

    # Directory of the Hugging Face model underneath: the own backbone, or the target whose hidden states are read.
    base_model_path: str = ""
    # own: a backbone of its own reads the block; target: a small head over the frozen target's hidden states.
    backbone: str = "target"
    # Mask of the `own` backbone; `target` runs the target as it is, causally.
    attention: str = "causal"
    # Width of the model underneath; 0 = as its config says.
    hidden_size: int = 0
    # Width of the target head's two hidden layers.
    head_size: int = 128
    # 0 trains all of the `own` backbone.
    lora_rank: int = 0
    lora_alpha: int = 16
    lora_target_modules: str | list[str] = "all-linear"
    # Logit where draft and target agree: accepted for certain, no gradient.
    mismatch_logit_value: float = 50.0
    # Seed of the head's first weights: every rank must draw the same.
    seed: int = 0
    # Fingerprint of the target that a `target` head was trained on; filled when the model is built.
    target_fingerprint: str = ""

    def __post_init__(self) -> None:
        for name, known in (("backbone", BACKBONES), ("attention", ATTENTIONS)):
            value = getattr(self, name)
            if value not in known:
                raise ValueError(
                    f"spd.{name}={value!r} is unknown{nearest(value, known) or '.'} Known: {', '.join(known)}."
                )
        if self.backbone == "target" and (self.attention != "causal" or self.lora_rank):
            raise ValueError(
                f"spd.backbone=target runs the frozen target causally, but spd.attention={self.attention!r} and "
                f"lora_rank={self.lora_rank} are set. Use spd.attention=causal and lora_rank=0, or spd.backbone=own."
            )

    def save(self, directory: Path) -> None:
        """Write spd_config.json."""
        (directory / CONFIG_FILE).write_text(json.dumps(asdict(self), indent=2) + "\n")

    @classmethod
    def load(cls, directory: Path) -> ScoringModelConfig:
        """Read spd_config.json; a missing file or an unknown key is an error that names it."""
        file = directory / CONFIG_FILE
        if not file.is_file():
            raise FileNotFoundError(f"{directory} holds no {CONFIG_FILE}: it is no saved scorer.")
        values = json.loads(file.read_text())
        if unknown := sorted(set(values) - (known := {f.name for f in fields(cls)})):
            raise ValueError(f"{file} has the unknown keys {unknown}; known: {', '.join(sorted(known))}.")
        return cls(**values)


def model_fingerprint(model: nn.Module) -> str:
    """Hash of a transformers model's names, shapes and weight samples, the same in float32 and bfloat16.

    The language-model head does not count, so that a model with and without it agree.
    """
    digest = hashlib.sha256()
    prefix = f"{model.base_model_prefix}."
    for name, parameter in sorted((n.removeprefix(prefix), p) for n, p in model.named_parameters()):
        if name.startswith("lm_head."):
            continue
        flat = parameter.detach().reshape(-1)
        step = max(1, flat.numel() // 64)
        sample = flat[::step][:64].to(torch.bfloat16).view(torch.int16).cpu().numpy()
        digest.update(f"{name}{tuple(parameter.shape)}".encode())
        digest.update(sample.tobytes())
    return digest.hexdigest()[:32]
