"""The settings of a scorer, as saved in its `spd_config.json`, and the score heads that they select."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import nn

from verl.config.fields import check_settings, setting

CONFIG_FILE = "spd_config.json"
BACKBONES = ("own", "target")
ATTENTIONS = ("causal", "spd", "hybrid")
HEAD_INPUTS = ("state", "pair")


@dataclass
class ScoringModelConfig:
    """Kind of the scorer and its base model."""

    section: ClassVar[str] = "spd"
    base_model_path: str = ""  # Hugging Face directory: the own backbone, or the target whose hidden states are read
    # own: a separate backbone reads the block; target: a small head over the frozen target's hidden states.
    backbone: str = setting("target", choices=BACKBONES)
    attention: str = setting("causal", choices=ATTENTIONS)  # of the `own` backbone; `target` runs the target causally
    context_tokens: int = 0  # last context tokens that the `own` backbone reads; 0 = all, as `target` always does
    hidden_size: int = 0  # of the base model; 0 = from its config
    # What the head reads. own: with state the state over t_i; with pair also the state over the token before d_i, and
    # the embeddings of d_i and t_i. target: with state the state that predicted t_i, and both embeddings; with pair
    # also the state over d_i, from which the target continues.
    head_inputs: str = setting("state", choices=HEAD_INPUTS)
    head_size: int = 128  # width of the two hidden layers of a head that reads embeddings (target; own with pair)
    lora_rank: int = 0  # 0 trains the full `own` backbone
    lora_alpha: int = 16
    lora_target_modules: str | list[str] = "all-linear"
    mismatch_logit_value: float = 50.0  # logit where draft and target agree: accepted for certain, no gradient
    seed: int = 0  # of the head's initial weights: every rank must draw the same
    base_fingerprint: str = ""  # of the model that a `target` head or adapters were trained on; set when it is built
    draft_fingerprint: str = ""  # of the draft model whose blocks it was trained on, where that was named

    def __post_init__(self) -> None:
        check_settings(self)
        if self.context_tokens < 0 or (self.context_tokens and self.backbone == "target"):
            raise ValueError(
                f"spd.context_tokens={self.context_tokens} does not fit spd.backbone={self.backbone}: an own backbone "
                "reads so many tokens of the context, or all with 0; a target head needs 0."
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
        """Read spd_config.json. Raises FileNotFoundError, or ValueError for a damaged file or an unknown key."""
        file = directory / CONFIG_FILE
        if not file.is_file():
            raise FileNotFoundError(f"{directory} holds no {CONFIG_FILE}: it is not a saved scorer.")
        try:
            values = json.loads(file.read_text())
        except ValueError as error:
            raise ValueError(f"{file} is damaged ({error}); save the scorer again.") from error
        if not isinstance(values, dict):
            raise ValueError(f"{file} is not a JSON object; save the scorer again.")
        values.pop("target_fingerprint", None)  # of older scorers: a hash of too few weights
        if unknown := sorted(set(values) - (known := {f.name for f in fields(cls)})):
            raise ValueError(f"{file} has the unknown keys {unknown}; known: {', '.join(sorted(known))}.")
        return cls(**values)


class ScoreHead(nn.Module):
    """LayerNorm -> Linear(H, H/4) -> GELU -> Linear(H/4, 1): a logit from the `own` backbone's state over t_i."""

    def __init__(self, hidden_size: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(hidden_size)
        self.inner = nn.Linear(hidden_size, hidden_size // 4)
        self.out = nn.Linear(hidden_size // 4, 1)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        """[B, g, H] -> [B, g]."""
        hidden = hidden.to(self.norm.weight.dtype)
        return self.out(F.gelu(self.inner(self.norm(hidden)))).squeeze(-1)


class PairHead(nn.Module):
    """H (4 + more) -> W -> W -> 1 over [h, d, t, h * (d - t), ...]: the state over the token before d_i (in the target
    the one that predicted t_i), the embeddings of d_i and t_i, then `more` further states (0 or 1).

    With tied embeddings h * (d - t) sums to the logit difference of d_i and t_i, which linear layers learn slowly.
    """

    def __init__(self, hidden_size: int, width: int, more: int = 0) -> None:
        super().__init__()
        self.more = more
        self.first = nn.Linear((4 + more) * hidden_size, width)
        self.second = nn.Linear(width, width)
        self.out = nn.Linear(width, 1)

    def forward(
        self, hidden: torch.Tensor, draft: torch.Tensor, target: torch.Tensor, *more: torch.Tensor
    ) -> torch.Tensor:
        """Three or more of [B, g, H] -> [B, g]; states beyond `more` are ignored.

        All are normalised: embeddings may be far smaller than states.
        """
        dtype = self.first.weight.dtype
        h, d, t, *rest = (F.layer_norm(x.to(dtype), x.shape[-1:]) for x in (hidden, draft, target, *more[: self.more]))
        features = torch.cat([h, d, t, h * (d - t), *rest], dim=-1)
        return self.out(F.gelu(self.second(F.gelu(self.first(features))))).squeeze(-1)


def make_head(config: ScoringModelConfig) -> nn.Module:
    """The head of the config's backbone and head_inputs, with its widths."""
    is_pair = config.head_inputs == "pair"
    if config.backbone == "own" and not is_pair:
        return ScoreHead(config.hidden_size)
    return PairHead(config.hidden_size, config.head_size, more=int(is_pair))
