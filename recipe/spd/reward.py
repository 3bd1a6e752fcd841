"""Reward of a judged block: accepted draft tokens against the effect on the answer."""

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any, ClassVar

from verl.config.fields import check_settings, refuse_unknown, setting

# environment variable -> coefficient; a variable that is set wins over the config
VARIABLES = {
    "REWARD_ALPHA": "alpha", "REWARD_PENALTY_BREAK": "penalty_break", "REWARD_USELESS": "useless",
    "REWARD_CORRECT_BASE": "correct_base",
}  # fmt: skip
SCENARIOS = ("A", "B", "C", "D", "zero")


@dataclass(frozen=True)
class SPDRewardConfig:
    """The coefficients, in points of reward (group spd.reward); VARIABLES override them.

    A larger `penalty_break` is learned more slowly, since everything is rejected first; the last points of accuracy are
    cheaper by a threshold on the scorer's logit that is chosen on held-out questions.
    """

    section: ClassVar[str] = "spd.reward"
    alpha: float = setting(0.125, "For each accepted draft token of a block that ends in a right answer.")
    penalty_break: float = setting(-16.0, "For a block that turns a right answer wrong: speed against accuracy.")
    useless: float = setting(0.0, "For a block after which the answer is as wrong as before.")
    correct_base: float = setting(1.0, "For a block that repairs a wrong answer, in addition to alpha.")
    length: str = setting(
        "effective", "effective: every leading accept; gain: those beyond exact match.", choices=("effective", "gain")
    )
    zero_length: str = setting(
        "neutral", "A block with nothing accepted: neutral gives reward 0, mask drops it.", choices=("neutral", "mask")
    )
    length_penalty: float = setting(
        0.0, "Penalty of a correct answer: this times max(0, length - baseline's) / baseline's.", low=0
    )

    def __post_init__(self) -> None:
        check_settings(self)


def reward_config(settings: Mapping[str, Any]) -> SPDRewardConfig:
    """Settings by name, overridden by REWARD_* environment variables; ValueError for an unknown name."""
    refuse_unknown("spd.reward", settings, [f.name for f in fields(SPDRewardConfig)])
    values = dict(settings)
    for variable, name in VARIABLES.items():
        if variable in os.environ:
            try:
                values[name] = float(os.environ[variable])
            except ValueError as error:
                raise ValueError(f"{variable}={os.environ[variable]!r} is not a number.") from error
    return SPDRewardConfig(**values)


def leading_matches(draft_ids: Sequence[int], target_ids: Sequence[int]) -> int:
    """L0: draft tokens that exact match accepts, those before the first mismatch."""
    pairs = enumerate(zip(draft_ids, target_ids, strict=False))
    return next((i for i, (drafted, wanted) in pairs if drafted != wanted), len(draft_ids))


def scenario_of(effective_len: int, hybrid_correct: bool, baseline_correct: bool) -> str:
    """A: correct before and after; B: made wrong; C: wrong before and after; D: made correct; zero: L = 0."""
    if effective_len == 0:
        return "zero"
    if baseline_correct:
        return "A" if hybrid_correct else "B"
    return "D" if hybrid_correct else "C"


def _score(extra_info: Mapping[str, Any], config: SPDRewardConfig) -> dict[str, float]:
    for name in ("effective_len", "is_correct_hybrid", "is_correct_baseline"):
        if extra_info.get(name) is None:
            raise ValueError(f"extra_info has no '{name}'; the spd rollout writes it. It has: {', '.join(extra_info)}.")
    accepted = int(extra_info["effective_len"])
    hybrid, baseline = bool(extra_info["is_correct_hybrid"]), bool(extra_info["is_correct_baseline"])
    scenario = scenario_of(accepted, hybrid, baseline)
    counted = accepted
    if config.length == "gain":
        counted -= min(accepted, leading_matches(extra_info["draft_ids"], extra_info["target_ids"]))
    score = {
        "A": config.alpha * counted,
        "B": config.penalty_break,
        "C": config.useless,
        "D": config.correct_base + config.alpha * counted,
        "zero": 0.0,
    }[scenario]
    cost, lengths = 0.0, [extra_info.get(name) for name in ("hybrid_length", "baseline_length")]
    if config.length_penalty and scenario in ("A", "D"):
        if None in lengths:
            raise ValueError(
                f"spd.reward.length_penalty={config.length_penalty} needs the lengths of both outputs, but extra_info "
                f"has hybrid_length={lengths[0]!r} and baseline_length={lengths[1]!r}."
            )
        cost = config.length_penalty * max(0, lengths[0] - lengths[1]) / max(1, lengths[1])
    return {
        "score": score - cost, "acc": float(hybrid), "accepted_len": float(accepted), "length_cost": cost,
        **{f"scenario_{name}": float(name == scenario) for name in SCENARIOS},
    }  # fmt: skip


def compute_score(
    data_source: str, solution_str: str, ground_truth: Any, extra_info: Mapping[str, Any], **settings: Any
) -> dict[str, float]:
    """The score of one judged block with its parts; `settings` are fields of SPDRewardConfig.

    Reads effective_len (L), is_correct_hybrid (S_h), is_correct_baseline (S_t) from `extra_info`. L = 0 gives 0, else
    S_t S_h alpha L + S_t (1-S_h) penalty_break + (1-S_t)(1-S_h) useless + (1-S_t) S_h (correct_base + alpha L).
    """
    return _score(extra_info, reward_config(settings))


def compute_score_batch(
    data_sources: Sequence[str], solution_strs: Sequence[str], ground_truths: Sequence[Any],
    extra_infos: Sequence[Mapping[str, Any]], settings: Mapping[str, Any],
) -> list[dict[str, float]]:  # fmt: skip
    """`compute_score` of every row; an error names the row."""
    config, scores = reward_config(settings), []
    for i, extra_info in enumerate(extra_infos):
        try:
            scores.append(_score(extra_info, config))
        except ValueError as error:
            raise ValueError(
                f"row {i} (data_source={data_sources[i]!r}, index={extra_info.get('index')!r}): {error}"
            ) from error
    return scores
