"""Builds the scorer of a config's backbone."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModel, PreTrainedModel

from recipe.spd.scorer.config import ScoringModelConfig
from recipe.spd.scorer.model import ScoringActor
from recipe.spd.scorer.own import BACKBONE_DIR, OwnBackboneScorer, with_adapters
from recipe.spd.scorer.target import TargetHeadScorer
from recipe.spd.settings import BACKBONES
from verl.data.fingerprint import model_fingerprint
from verl.utils.registry import Registry

SCORERS: Registry[str, type[ScoringActor]] = Registry(
    "spd.backbone", "Your own: register it in a module named by VERL_USE_EXTERNAL_MODULES."
)
SCORERS |= {"own": OwnBackboneScorer, "target": TargetHeadScorer}


def register_scorer(name: str) -> Callable[[type[ScoringActor]], type[ScoringActor]]:
    """Class decorator: `spd.backbone=name` and saved scorers of this name use the class. ValueError for a known name.

    VERL_USE_EXTERNAL_MODULES names the module, so that training, evaluation and servers import it.
    """
    if name not in BACKBONES:  # the values that the setting spd.backbone accepts
        BACKBONES.append(name)
    return SCORERS.register(name)


class AutoModelForSPDScoring:
    """Builds scorers from a config or from a saved directory."""

    @staticmethod
    def from_config(
        config: ScoringModelConfig, torch_dtype: torch.dtype = torch.float32, base_model: PreTrainedModel | None = None,
        without_weights: bool = False, **backbone_kwargs: Any,
    ) -> ScoringActor:  # fmt: skip
        """A scorer with a new head on config.base_model_path, or on the loaded `base_model`, which is shared.

        `config` becomes the scorer's: hidden_size is set, and base_fingerprint if it is saved without its backbone.
        With `without_weights` the backbone is on the meta device, for an engine that fills it from another rank, and
        base_fingerprint is left as it is. `torch_dtype` and transformers' `backbone_kwargs` are not for a `base_model`.
        """
        if without_weights:
            hf_config = AutoConfig.from_pretrained(config.base_model_path, **backbone_kwargs)
            with torch.device("meta"):
                backbone = AutoModel.from_config(hf_config, dtype=torch_dtype)
        elif base_model is None:
            backbone = AutoModel.from_pretrained(config.base_model_path, dtype=torch_dtype, **backbone_kwargs)
        else:
            backbone = base_model.base_model
        width = backbone.config.get_text_config().hidden_size
        if config.hidden_size not in (0, width):
            raise ValueError(
                f"hidden_size={config.hidden_size}, but the model in {config.base_model_path!r} has {width}. "
                "Leave hidden_size at 0, or name the right model."
            )
        config.hidden_size = width
        scorer = SCORERS[config.backbone]
        if not scorer.is_complete(config) and not without_weights:
            given = base_model is not None
            config.base_fingerprint = model_fingerprint(base_model if given else backbone, just_loaded=not given)
        if config.lora_rank:
            torch.manual_seed(config.seed)  # with_adapters draws the first weights of the adapters
        return scorer(config, with_adapters(backbone, config))

    @staticmethod
    def from_pretrained(
        directory: str | Path, base_model_path: str | None = None, base_model: PreTrainedModel | None = None,
        torch_dtype: torch.dtype = torch.float32,
    ) -> ScoringActor:  # fmt: skip
        """The scorer saved in `directory`, on the model in its config, on `base_model_path`, or on `base_model`."""
        directory = Path(directory)
        config = ScoringModelConfig.load(directory)
        config.base_model_path = base_model_path or config.base_model_path
        scorer = SCORERS[config.backbone]
        if scorer.is_complete(config) and base_model_path is None and base_model is None:
            # A full fine-tune contains its backbone; the model it started from is not needed.
            backbone = AutoModel.from_config(AutoConfig.from_pretrained(directory / BACKBONE_DIR), dtype=torch_dtype)
            model = scorer(config, backbone)
        else:
            model = AutoModelForSPDScoring.from_config(config, torch_dtype, base_model)
        model.load_trained(directory)
        return model.eval()
