"""The settings of a scorer, as saved in its `spd_config.json`."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

from recipe.spd.settings import ScorerSettings, SPDSettings
from verl.config.fields import check_settings

CONFIG_FILE = "spd_config.json"


@dataclass
class ScoringModelConfig(ScorerSettings):
    """Group spd's settings of the scorer, with its base model, its adapters and the models it was trained with."""

    base_model_path: str = ""  # Hugging Face directory: the own backbone, or the target whose hidden states are read
    hidden_size: int = 0  # of the base model; 0 = from its config
    lora_rank: int = 0  # 0 trains the full `own` backbone
    lora_alpha: int = 16
    lora_target_modules: str | list[str] = "all-linear"
    mismatch_logit_value: float = 50.0  # z where draft and target agree (no mismatch): accepted for certain
    base_fingerprint: str = ""  # of the model that a `target` head or adapters were trained on; set when it is built
    draft_fingerprint: str = ""  # of the draft model whose blocks it was trained on, where that was named

    def __post_init__(self) -> None:
        check_settings(self)
        if self.backbone == "own" and self.head_inputs == "logits":
            raise ValueError(
                "spd.head_inputs=logits reads the target's logits, which spd.backbone=own never sees. Use "
                "spd.head_inputs=pair, or spd.backbone=target."
            )
        if self.backbone == "own" and self.state_layer:
            raise ValueError(
                f"spd.state_layer={self.state_layer} reads the target, which spd.backbone=own never sees. Use "
                "spd.state_layer=null, or spd.backbone=target."
            )
        if self.backbone == "target" and self.context_tokens:
            raise ValueError(
                f"spd.context_tokens={self.context_tokens} does not fit spd.backbone=target, which always reads all "
                "of the context. Use spd.context_tokens=0, or spd.backbone=own."
            )
        if self.backbone == "target" and (self.attention != "causal" or self.lora_rank):
            raise ValueError(
                f"spd.backbone=target runs the frozen target causally, but spd.attention={self.attention!r} and "
                f"lora_rank={self.lora_rank} are set. Use spd.attention=causal and "
                "actor_rollout_ref.model.lora_rank=0, or spd.backbone=own."
            )

    @classmethod
    def from_loader(
        cls, base_model_path: str, spd: Mapping[str, Any] | None = None, **adapters: Any
    ) -> tuple[ScoringModelConfig, SPDSettings]:
        """(The scorer's config, the full group spd) from arguments of the model loader; `adapters`: fields lora_*."""
        group = SPDSettings.from_custom({"target_path": base_model_path, **(spd or {})})  # `spd` may name another
        settings = {f.name: getattr(group, f.name) for f in fields(ScorerSettings)}
        return cls(base_model_path=base_model_path, **settings, **adapters), group

    def save(self, directory: Path) -> None:
        """Write spd_config.json."""
        (directory / CONFIG_FILE).write_text(json.dumps(asdict(self), indent=2) + "\n")

    @classmethod
    def load(cls, directory: Path) -> ScoringModelConfig:
        """Read spd_config.json. Raises FileNotFoundError, or ValueError that names the file, for wrong contents."""
        file = directory / CONFIG_FILE
        if not file.is_file():
            raise FileNotFoundError(
                f"{directory} holds no {CONFIG_FILE}: it is not a saved scorer. Of a checkpoint, name "
                "global_step_N/actor/huggingface."
            )
        try:
            values = json.loads(file.read_text())
            if not isinstance(values, dict):
                raise ValueError("no JSON object")
        except ValueError as error:
            raise ValueError(f"{file} is damaged ({error}); save the scorer again.") from error
        known = {f.name for f in fields(cls)}
        if unknown := sorted(values.keys() - known):
            raise ValueError(f"{file} has the unknown keys {unknown}; known: {', '.join(sorted(known))}.")
        try:
            return cls(**values)
        except ValueError as error:
            raise ValueError(f"{file}: {error}") from error
