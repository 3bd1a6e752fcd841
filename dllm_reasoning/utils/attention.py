"""How far back the layers of a model look, and whether masks and positions made here can stand for its own."""

from __future__ import annotations

import inspect

from torch import nn
from transformers import PretrainedConfig

from verl.workers.policy.causal_lm import causal_model

FULL = "full attention"
NEEDED = ("position_ids", "past_key_values")


def layer_kinds(config: PretrainedConfig) -> set[int | str]:
    """What the layers attend to: FULL (everything before), a window of that many tokens, or another kind by its name.

    Reads layer_types, GPT-Neo's attention_layers, and sliding_window.
    """
    described = config.get_text_config().to_dict()
    named = set(described.get("layer_types") or described.get("attention_layers") or ())
    window = described.get("sliding_window")
    if not named:
        return {window if window and described.get("use_sliding_window", True) else FULL}
    known = {"full_attention": FULL, "global": FULL, "sliding_attention": window}
    return {known.get(kind, kind) for kind in named}


def window_of(config: PretrainedConfig) -> int | None:
    """The window of a model whose layers all have the same; None where they see everything before."""
    return next((kind for kind in layer_kinds(config) if isinstance(kind, int)), None)


def kinds_problem(config: PretrainedConfig) -> str | None:
    """Why one mask cannot serve every layer (a clause); None where it can."""
    kinds = layer_kinds(config)
    if kinds == {FULL} or (len(kinds) == 1 and window_of(config) is not None):
        return None
    told = sorted(f"a window of {kind} tokens" if isinstance(kind, int) else kind for kind in kinds)
    return f"has layers that attend in ways no single mask describes ({', '.join(told)})"


def rolling_problem(model: nn.Module) -> str | None:
    """Why the model cannot be fed at chosen positions behind cached keys (a clause); None where it can."""
    inner = causal_model(model)
    taken = inspect.signature(type(inner).forward).parameters
    if lost := [name for name in NEEDED if name not in taken]:
        return f"takes no {' and no '.join(lost)}"
    if inner._is_stateful:
        return "carries a state from token to token, which cannot be rolled back"
    if inner.config.get_text_config().to_dict().get("alibi"):
        return "makes a bias of its own from the mask (ALiBi)"
    return None


def mask_problem(model: nn.Module) -> str | None:
    """Why masks made here cannot stand for the model's own (a clause); None where they can."""
    return rolling_problem(model) or kinds_problem(causal_model(model).config)
