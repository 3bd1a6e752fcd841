"""The speculative-decoding scorer: model, config and masks under one import path.

Naming this module in `actor_rollout_ref.model.external_lib` registers the model loader "spd_scorer".
"""

from typing import Any

import torch
import torch.distributed as dist

import recipe.spd.checks  # noqa: F401  (registers checks before a start)
import recipe.spd.scorer.bernoulli_policy  # noqa: F401  (registers the policy "bernoulli")
from recipe.spd.data.blocks import SPDInputData, resolve_sep_token_id
from recipe.spd.scorer.auto import SCORERS, AutoModelForSPDScoring
from recipe.spd.scorer.config import ScoringModelConfig
from recipe.spd.scorer.features import FeatureStore
from recipe.spd.scorer.heads import PairHead, ScoreHead
from recipe.spd.scorer.masks import create_hybrid_attention_mask, create_position_ids, create_spd_attention_mask
from recipe.spd.scorer.model import ScoringActor
from recipe.spd.scorer.target import TargetHeadScorer
from verl.data.fingerprint import cached_folder_fingerprint, model_fingerprint, model_folder
from verl.models.loading import register_model_loader, torch_dtype_of
from verl.trainer.run.ranks import from_first_rank

__all__ = [
    "AutoModelForSPDScoring", "SPDInputData", "ScoreHead", "ScoringActor", "ScoringModelConfig", "PairHead",
    "create_hybrid_attention_mask", "create_position_ids", "create_spd_attention_mask", "model_fingerprint",
    "resolve_sep_token_id",
]  # fmt: skip


@register_model_loader("spd_scorer")
def load_spd_scorer(
    model_config: Any, torch_dtype: torch.dtype, *, compute_dtype: str = "float32", **settings: Any
) -> ScoringActor:
    """A scorer on the model in model_config.path, as `settings` describe it: ScoringModelConfig.from_loader.

    `compute_dtype`: of forwards; a frozen target is held in it, since no optimizer needs more digits of its weights.
    `torch_dtype` is that of trained weights. The fingerprint of spd.rollout.draft_path is saved with the scorer.
    """
    path = model_config.local_path or model_config.path
    config, spd = ScoringModelConfig.from_loader(path, **settings)
    frozen = not SCORERS[config.backbone].trains_backbone
    held = torch_dtype_of(compute_dtype, "compute_dtype") if frozen else torch_dtype
    # Rank 0 alone reads a frozen target; the engine gives the other ranks their shards of it.
    shared = frozen and dist.is_initialized() and dist.get_rank() > 0
    options = {"trust_remote_code": model_config.trust_remote_code, **model_config.override_config}
    model = AutoModelForSPDScoring.from_config(config, held, without_weights=shared, **options)
    if frozen:
        config.base_fingerprint = from_first_rank(lambda: config.base_fingerprint)
    if spd.rollout.draft_path and (folder := model_folder(spd.rollout.draft_path)):
        config.draft_fingerprint = cached_folder_fingerprint(folder) or ""
    if spd.adapter_path:
        model.load_trained(spd.adapter_path)
    if spd.feature_store and isinstance(model, TargetHeadScorer):
        layer = f" layer {config.state_layer}" if config.state_layer else ""
        model.features = FeatureStore(spd.feature_store, f"{config.base_fingerprint} {held}{layer}")
    return model
