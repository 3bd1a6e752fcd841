"""Rule rewards by data source."""

from __future__ import annotations

import importlib
from typing import Any

from verl.utils.registry import nearest

# data source -> module of its `compute_score`; whether that takes data_source and extra_info too.
_SCORERS: dict[str, tuple[str, bool]] = {
    "openai/gsm8k": ("verl.utils.reward_score.gsm8k", False),
    "spd_scorer": ("verl.utils.reward_score.spd_scorer_reward", True),
}


def default_compute_score(
    data_source: str, solution_str: str, ground_truth: Any, extra_info: dict[str, Any] | None = None,
    sandbox_fusion_url: str | None = None, concurrent_semaphore: Any = None, memory_limit_mb: int | None = None,
    **kwargs: Any,
) -> float | dict[str, Any]:
    """Score of one answer by the rule of its data source: a number, or a dict with 'score'.

    The sandbox arguments are for sources that run code; none of those known here does.
    """
    if data_source not in _SCORERS:
        raise NotImplementedError(
            f"no rule reward for data_source={data_source!r}{nearest(data_source, list(_SCORERS)) or '.'} "
            f"Known: {', '.join(_SCORERS)}. Give your own in custom_reward_function.path."
        )
    module, takes_row = _SCORERS[data_source]
    compute_score = importlib.import_module(module).compute_score
    arguments = (data_source, solution_str, ground_truth, extra_info) if takes_row else (solution_str, ground_truth)
    result = compute_score(*arguments, **kwargs)
    return result if isinstance(result, dict) else float(result)
