"""Reward of a judged block: accepted draft tokens against the effect on the answer."""

from collections.abc import Mapping, Sequence
from typing import Any

from recipe.spd.data.blocks import mismatches
from recipe.spd.settings import SPDRewardConfig, reward_config

SCENARIOS = ("A", "B", "C", "D", "zero")


def leading_matches(draft_ids: Sequence[int], target_ids: Sequence[int]) -> int:
    """L0: draft tokens that exact match accepts, those before the first mismatch."""
    return min(mismatches(draft_ids, target_ids), default=len(draft_ids))


def scenario_of(effective_len: int, hybrid_correct: bool, baseline_correct: bool) -> str:
    """A: correct before and after; B: made wrong; C: wrong before and after; D: made correct; zero: L = 0."""
    if effective_len == 0:
        return "zero"
    if baseline_correct:
        return "A" if hybrid_correct else "B"
    return "D" if hybrid_correct else "C"


def _score(extra_info: Mapping[str, Any], config: SPDRewardConfig) -> dict[str, float]:
    ids = ("draft_ids", "target_ids") if config.length == "gain" else ()
    for name in ("effective_len", "is_correct_hybrid", "is_correct_baseline", *ids):
        if extra_info.get(name) is None:
            raise ValueError(
                f"extra_info.{name} is {'null' if name in extra_info else 'missing'}; there are: "
                f"{', '.join(extra_info)}. The spd rollout writes it: set actor_rollout_ref.rollout.name=spd."
            )
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
    cost = 0.0
    if config.length_penalty and scenario in ("A", "D"):
        length, own = extra_info.get("hybrid_length"), extra_info.get("baseline_length")
        if length is None or own is None:
            raise ValueError(
                f"spd.reward.length_penalty={config.length_penalty} needs the lengths of both outputs, but extra_info "
                f"has hybrid_length={length!r} and baseline_length={own!r}. "
                "The spd rollout writes them: set actor_rollout_ref.rollout.name=spd, or length_penalty=0."
            )
        cost = config.length_penalty * max(0, length - own) / max(1, own)
    return {
        "score": score - cost, "acc": float(hybrid), "accepted_len": float(accepted), "length_cost": cost,
        **{f"scenario_{name}": float(name == scenario) for name in SCENARIOS},
    }  # fmt: skip


def compute_score(
    data_source: str, solution_str: str, ground_truth: Any, extra_info: Mapping[str, Any], **settings: Any
) -> dict[str, float]:
    """The score of one judged block with its parts; `settings` are fields of SPDRewardConfig.

    Reads effective_len (L), is_correct_hybrid (S_h), is_correct_baseline (S_t) from `extra_info`; with length=gain
    also draft_ids and target_ids, whose leading matches are L0; with a length_penalty of a right answer (S_h = 1) also
    hybrid_length (H), baseline_length (B), in tokens. N is L, or L - min(L, L0) with length=gain. L = 0 gives 0; else
    S_t S_h alpha N + S_t (1-S_h) penalty_break + (1-S_t)(1-S_h) useless + (1-S_t) S_h (correct_base + alpha N)
    - S_h length_penalty max(0, H - B) / max(1, B). Raises ValueError if one of these is missing or null.
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
