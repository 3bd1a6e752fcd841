"""Rule reward of the word problems: 1 if the number after "the answer is" is correct, else 0."""

from typing import Any

from recipe.spd.rollout.answers import extract_answer, is_correct


def compute_score(
    data_source: str, solution_str: str, ground_truth: str, extra_info: dict[str, Any] | None = None
) -> dict[str, float]:
    """score and acc: 1.0 or 0.0; answered: whether there is such a number at all."""
    right = float(is_correct(solution_str, ground_truth))
    return {"score": right, "acc": right, "answered": float(extract_answer(solution_str) is not None)}
