"""Reward of the questions in GRPO: what the task's verifier gives for the end of the answer."""

import json
from typing import Any

from examples.pretrained.spd.tasks import Asked
from recipe.spd.rollout.answers import final_answer


def compute_score(
    data_source: str, solution_str: str, ground_truth: str, extra_info: dict[str, Any]
) -> dict[str, float]:
    """score and acc: 1.0 for a right answer, else 0.0; answered: whether there is one. `data_source` names the task."""
    answer = final_answer(solution_str)
    asked = Asked(data_source, "", ground_truth, json.loads(extra_info["entry"]), worked="")
    right = float(asked.is_right(answer))
    return {"score": right, "acc": right, "answered": float(answer is not None)}
