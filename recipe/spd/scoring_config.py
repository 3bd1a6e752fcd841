"""The settings a scorer is built with, as they stand in its `spd_config.json`."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, fields
from pathlib import Path

from verl.utils.registry import nearest

CONFIG_FILE = "spd_config.json"
BACKBONES = ("own", "target")
ATTENTIONS = ("causal", "spd", "hybrid")
HEAD_INPUTS = ("state", "pair")


@dataclass
class ScoringModelConfig:
    """What kind of scorer it is and what it stands on."""

    # Directory of the Hugging Face model underneath: the own backbone, or the target whose hidden states are read.
    base_model_path: str = ""
    # own: a backbone of its own reads the block; target: a small head over the frozen target's hidden states.
    backbone: str = "target"
    # Mask of the `own` backbone; `target` runs the target as it is, causally.
    attention: str = "causal"
    # Last tokens of the context that the `own` backbone reads; 0 = all. `target` always reads the whole context.
    context_tokens: int = 0
    # Width of the model underneath; 0 = as its config says.
    hidden_size: int = 0
    # What the `own` backbone's head reads. state: the state over t_i. pair: also the state over the token before d_i,
    # and the embeddings of d_i and t_i, as the target head does.
    head_inputs: str = "state"
    # Width of the two hidden layers of a head that reads embeddings (target; own with pair).
    head_size: int = 128
    # 0 trains all of the `own` backbone.
    lora_rank: int = 0
    lora_alpha: int = 16
    lora_target_modules: str | list[str] = "all-linear"
    # Logit where draft and target agree: accepted for certain, no gradient.
    mismatch_logit_value: float = 50.0
    # Seed of the head's first weights: every rank must draw the same.
    seed: int = 0
    # Fingerprint of the model that a `target` head or adapters were trained on; filled when the scorer is built.
    base_fingerprint: str = ""

    def __post_init__(self) -> None:
        for name, known in (("backbone", BACKBONES), ("attention", ATTENTIONS), ("head_inputs", HEAD_INPUTS)):
            value = getattr(self, name)
            if value not in known:
                raise ValueError(
                    f"spd.{name}={value!r} is unknown{nearest(value, known) or '.'} Known: {', '.join(known)}."
                )
        if self.context_tokens < 0 or (self.context_tokens and self.backbone == "target"):
            raise ValueError(
                f"spd.context_tokens={self.context_tokens} does not fit spd.backbone={self.backbone}: an own backbone "
                "reads so many tokens of the context, or all with 0; a target head needs 0."
            )
        if self.backbone == "target" and self.head_inputs != "state":
            raise ValueError(
                f"spd.head_inputs={self.head_inputs} is for spd.backbone=own: a target head reads the state and both "
                "embeddings in any case. Use spd.head_inputs=state."
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
        """Read spd_config.json; a missing or torn file and an unknown key are errors that name it."""
        file = directory / CONFIG_FILE
        if not file.is_file():
            raise FileNotFoundError(f"{directory} holds no {CONFIG_FILE}: it is no saved scorer.")
        try:
            values = json.loads(file.read_text())
        except ValueError as error:
            raise ValueError(f"{file} is torn ({error}); save the scorer again.") from error
        if not isinstance(values, dict):
            raise ValueError(f"{file} is no object of keys and values; save the scorer again.")
        values.pop("target_fingerprint", None)  # of before base_fingerprint: samples of the weights, too few to tell
        if unknown := sorted(set(values) - (known := {f.name for f in fields(cls)})):
            raise ValueError(f"{file} has the unknown keys {unknown}; known: {', '.join(sorted(known))}.")
        return cls(**values)
