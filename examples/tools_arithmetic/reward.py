"""Rule reward: 1 if the number after the last "answer" is correct, else 0."""

import re
from typing import Any

ANSWER = re.compile(r"\banswer((?: \d)+)")


def compute_score(
    data_source: str, solution_str: str, ground_truth: str, extra_info: dict[str, Any] | None = None
) -> dict[str, float]:
    """score and acc: 1.0 or 0.0; called: whether a tool was called."""
    answers = ANSWER.findall((extra_info or {}).get("model_text", solution_str))  # not what the tool answered
    right = float(bool(answers) and answers[-1].replace(" ", "") == ground_truth)
    return {"score": right, "acc": right, "called": float("<tool_call>" in solution_str)}
