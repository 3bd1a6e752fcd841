"""An SPD scorer.

    export VERL_USE_EXTERNAL_MODULES=examples.extending.my_scorer
    python train_spd_scorer.py spd.backbone=draft_mlp ...
"""

import torch
from torch import nn

from recipe.spd.scorer.auto import register_scorer
from recipe.spd.scorer.target import TargetHeadScorer


class DraftHead(nn.Module):
    """Two layers over the state that predicted the target's token, and the embedding of the draft's."""

    def __init__(self, hidden_size: int, width: int):
        super().__init__()
        self.layers = nn.Sequential(
            nn.LayerNorm(2 * hidden_size), nn.Linear(2 * hidden_size, width), nn.GELU(), nn.Linear(width, 1)
        )

    def forward(self, hidden, draft, target, next_hidden, values=None):
        """[B, g, H] each -> z [B, g]; a token with z above the threshold is accepted."""
        features = torch.cat([hidden, draft], -1).to(self.layers[1].weight.dtype)
        return self.layers(features).squeeze(-1)


@register_scorer("draft_mlp")
class DraftScorer(TargetHeadScorer):
    """A head of your own on the frozen target's states."""

    @classmethod
    def make_head(cls, config):
        """The head, with the sizes of the config (`ScoringModelConfig`); its weights are saved and loaded."""
        return DraftHead(config.hidden_size, config.head_size)
