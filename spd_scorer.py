"""The speculative-decoding scorer: model, config and masks under one import path.

Naming this module in `actor_rollout_ref.model.external_lib` registers the model loader "spd_scorer".
"""

from typing import Any

import torch
import torch.distributed as dist

import recipe.spd.bernoulli_policy  # noqa: F401  (registers the policy "bernoulli")
import recipe.spd.checks  # noqa: F401  (registers checks before a start)
from recipe.spd.dataset import SPDInputData, resolve_sep_token_id
from recipe.spd.features import FeatureStore
from recipe.spd.masks import create_hybrid_attention_mask, create_position_ids, create_spd_attention_mask
from recipe.spd.scoring_config import PairHead, ScoreHead, ScoringModelConfig
from recipe.spd.scoring_model import AutoModelForSPDScoring, ScoringActor
from verl.models.loading import register_model_loader, torch_dtype_of
from verl.trainer.run.ranks import from_first_rank
from verl.utils.fingerprint import cached_folder_fingerprint, model_fingerprint, model_folder

__all__ = [
    "AutoModelForSPDScoring", "SPDInputData", "ScoreHead", "ScoringActor", "ScoringModelConfig", "PairHead",
    "create_hybrid_attention_mask", "create_position_ids", "create_spd_attention_mask", "model_fingerprint",
    "resolve_sep_token_id",
]  # fmt: skip


@register_model_loader("spd_scorer")
def load_spd_scorer(
    model_config: Any, torch_dtype: torch.dtype, adapter_path: str | None = None, feature_store: str | None = None,
    draft_path: str | None = None, compute_dtype: str = "float32", **settings: Any,
) -> ScoringActor:  # fmt: skip
    """A scorer on the model in model_config.path; `settings` are fields of ScoringModelConfig.

    `adapter_path`: directory written by save_pretrained, or a checkpoint's lora_adapter, from which training starts.
    `feature_store`: folder of a `target` backbone's hidden states; None computes them in each forward. `draft_path`:
    the draft model of the blocks, whose fingerprint is saved with the scorer. `compute_dtype`: of forwards; a frozen
    target is held in it, since no optimizer needs more digits of its weights. `torch_dtype` is that of trained weights.
    """
    config = ScoringModelConfig(base_model_path=model_config.local_path or model_config.path, **settings)
    held = torch_dtype_of(compute_dtype, "compute_dtype") if config.backbone == "target" else torch_dtype
    # Rank 0 alone reads a frozen target; the engine gives the other ranks their shards of it.
    shared = config.backbone == "target" and dist.is_initialized() and dist.get_rank() > 0
    options = {"trust_remote_code": model_config.trust_remote_code, **model_config.override_config}
    model = AutoModelForSPDScoring.from_config(config, held, without_weights=shared, **options)
    if config.backbone == "target":
        config.base_fingerprint = from_first_rank(lambda: config.base_fingerprint)
    if draft_path and (folder := model_folder(draft_path)):
        config.draft_fingerprint = cached_folder_fingerprint(folder) or ""
    if adapter_path:
        model.load_trained(adapter_path)
    if feature_store and config.backbone == "target":
        model.features = FeatureStore(feature_store, f"{config.base_fingerprint} {held}")
    return model
