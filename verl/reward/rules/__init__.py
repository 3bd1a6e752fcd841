"""Rule rewards by data source."""

import importlib
from collections.abc import Callable, Mapping
from fnmatch import fnmatchcase
from typing import Any

from verl.utils.import_utils import load_class_from_fqn
from verl.utils.registry import installed_plugins, nearest

# data source (a pattern, * for any text) -> module, function of (solution_str, ground_truth, **kwargs)
_SCORERS: dict[str, tuple[str, str]] = {
    "openai/gsm8k": ("gsm8k", "compute_score"),
    "lighteval/MATH": ("math_verify", "compute_score"),
    "DigitalLearningGmbH/MATH-lighteval": ("math_verify", "compute_score"),
    "HuggingFaceH4/MATH-500": ("math_verify", "compute_score"),
    "math_dapo": ("math_dapo", "compute_score"),
    "math": ("math_dapo", "compute_score"),
    "math_dapo_reasoning": ("math_dapo", "compute_score"),
    "aime*": ("math_dapo", "compute_score"),
    "numina_*": ("math_verify", "compute_numina_score"),
    "hiyouga/geometry3k": ("geo3k", "compute_score"),
    "searchR1_*": ("search_r1_like_qa_em", "compute_score"),
}
# rule -> module, function of an answer's text that returns what the rule compares, or None
_FINDERS = {"gsm8k": ("gsm8k", "extract_solution"), "geo3k": ("math_reward", "boxed_answer"),
            "search_r1_like_qa_em": ("search_r1_like_qa_em", "extract_solution")}  # fmt: skip
_CODE = ("codecontests", "apps", "codeforces", "taco")
_PLUGINS = installed_plugins("reward_rules")  # data source -> dotted name of a compute_score


def known_sources() -> list[str]:
    """The data sources that have a rule."""
    return [*_SCORERS, *_CODE, *_PLUGINS]


def default_compute_score(
    data_source: str, solution_str: str, ground_truth: Any, extra_info: dict[str, Any] | None = None,
    sandbox_fusion_url: str | None = None, concurrent_semaphore: Any = None, memory_limit_mb: int | None = None,
    **kwargs: Any,
) -> float | dict[str, Any]:
    """Score of one answer by the rule of its data source: a number, or a dict with 'score'.

    Programs run at `sandbox_fusion_url`, else in the local sandbox, both limited by `sandbox` (a SandboxConfig; the
    service takes its `seconds`). Hostile text may crash the process: `verl.reward.pool` calls it where that is caught.
    """
    sandbox = kwargs.pop("sandbox", None)
    if data_source in _CODE:
        if sandbox_fusion_url:
            from verl.reward.rules.sandbox_fusion import compute_score

            if sandbox is not None:
                kwargs.setdefault("timeout", sandbox.seconds)
            where = (sandbox_fusion_url, concurrent_semaphore, memory_limit_mb)
            score, _ = compute_score(*where, solution_str, ground_truth, continuous=True, **kwargs)
        else:
            from verl.reward.rules.prime_code import compute_score

            score, _ = compute_score(solution_str, ground_truth, continuous=True, sandbox=sandbox, **kwargs)
        return score
    if data_source in _PLUGINS:
        rule = load_class_from_fqn(_PLUGINS[data_source], "reward rule")
        return rule(data_source, solution_str, ground_truth, extra_info, **kwargs)
    result = _function(*_scorer(str(data_source)))(solution_str, ground_truth, **kwargs)
    return result if isinstance(result, dict) else float(result)


def has_rule(data_source: str) -> bool:
    """Whether `default_compute_score` knows this data source."""
    return any(fnmatchcase(str(data_source), pattern) for pattern in known_sources())


def truth_problem(data_source: str, ground_truth: Any) -> str | None:
    """Why no answer can equal this ground truth by the rule of its data source; None if one can, or without a rule."""
    if data_source in _PLUGINS or not has_rule(data_source):
        return None
    if data_source in _CODE:
        return None if ground_truth else f"ground_truth={ground_truth!r} has no test cases"
    rule, _ = _scorer(str(data_source))
    if rule == "search_r1_like_qa_em":
        targets = ground_truth.get("target") if isinstance(ground_truth, Mapping) else None
        answers = [targets] if isinstance(targets, str) else targets or ()
        if any(str(answer).strip() for answer in answers):
            return None
        return f"ground_truth={ground_truth!r} has no answers; the rule reads {{'target': text or list of texts}}"
    shown = f"ground_truth={str(ground_truth)[:80]!r}"
    if isinstance(ground_truth, bool) or not isinstance(ground_truth, str | int | float):
        return f"{shown} is a {type(ground_truth).__name__}, which equals no answer; give a text or a number"
    text = str(ground_truth).strip()
    if not text or "####" in text or "\\boxed" in text:
        return f"{shown} equals no answer: give the final answer alone, such as '18'"
    if rule == "gsm8k":
        from verl.reward.rules.gsm8k import plain_number
        from verl.reward.rules.math_reward import same_number

        number = plain_number(text)
        return None if same_number(number, number) else f"{shown} is no number, which the rule compares"
    return None


def lacks_answer(data_source: str, solution_str: str) -> bool | None:
    """Whether the rule of a data source finds nothing in a text that it could compare; None where it cannot say."""
    if data_source in _CODE or data_source in _PLUGINS or not has_rule(data_source):
        return None
    rule, _ = _scorer(str(data_source))
    return _function(*_FINDERS[rule])(solution_str) is None if rule in _FINDERS else None


def unknown_source(data_source: str) -> str:
    """The error message for a data source without a rule."""
    unknown = f"no rule reward for data_source={data_source!r}{nearest(data_source, known_sources()) or '.'}"
    return f"{unknown} Known: {', '.join(known_sources())}. Give your own in custom_reward_function.path."


def _function(module: str, name: str) -> Callable[..., Any]:
    return getattr(importlib.import_module(f"verl.reward.rules.{module}"), name)


def _scorer(data_source: str) -> tuple[str, str]:
    for pattern, scorer in _SCORERS.items():
        if fnmatchcase(data_source, pattern):
            return scorer
    raise NotImplementedError(unknown_source(data_source))
