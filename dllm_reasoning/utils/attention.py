"""How far back a model's layers attend, and whether masks and positions made here can replace its own."""

import functools
import inspect
import os

from loguru import logger
from torch import nn
from transformers import PretrainedConfig

from verl.training.policy.causal_lm import causal_model

FULL = "full attention"


def layer_kinds(config: PretrainedConfig) -> set[int | str]:
    """What the layers attend to: FULL (everything before), a window of that many tokens, or another kind by its name.

    Reads layer_types, GPT-Neo's attention_layers, and sliding_window.
    """
    values = config.get_text_config().to_dict()
    names = set(values.get("layer_types") or values.get("attention_layers") or ())
    window = values.get("sliding_window")
    if not names:
        return {window if window and values.get("use_sliding_window", True) else FULL}
    known = {"full_attention": FULL, "global": FULL, "sliding_attention": window}
    return {known.get(name, name) for name in names}


def window_of(config: PretrainedConfig) -> int | None:
    """The sliding window of a model whose layers all have the same one; None if they attend to everything before."""
    return next((kind for kind in layer_kinds(config) if isinstance(kind, int)), None)


def kinds_problem(config: PretrainedConfig) -> str | None:
    """Why one mask cannot serve every layer (a clause); None if it can."""
    kinds = layer_kinds(config)
    if kinds == {FULL} or (len(kinds) == 1 and window_of(config) is not None):
        return None
    names = sorted(f"a window of {kind} tokens" if isinstance(kind, int) else kind for kind in kinds)
    return f"has layers that attend in ways no single mask describes ({', '.join(names)})"


def rolling_problem(model: nn.Module) -> str | None:
    """Why the model cannot run at chosen positions after cached keys (a clause); None if it can."""
    inner = causal_model(model)
    parameters = inspect.signature(type(inner).forward).parameters
    if missing := [name for name in ("position_ids", "past_key_values") if name not in parameters]:
        return f"takes no {' and no '.join(missing)}"
    if inner._is_stateful:
        return "carries a state from token to token, which cannot be rolled back"
    if inner.config.get_text_config().to_dict().get("alibi"):
        return "computes its own bias from the mask (ALiBi)"
    return None


def mask_problem(model: nn.Module) -> str | None:
    """Why masks made here cannot replace the model's own (a clause); None if they can."""
    return rolling_problem(model) or kinds_problem(causal_model(model).config)


@functools.cache
def warn_once(text: str) -> None:
    """Log a warning that concerns a run, once per process, and only on rank 0 of a torchrun job."""
    if int(os.environ.get("RANK", "0")) == 0:
        logger.warning("{}", text)
