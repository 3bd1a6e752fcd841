"""Rows of a batch as reward functions get them; their results as token-level scores."""

import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import compress, groupby
from typing import Any

import numpy as np
import torch
from loguru import logger

from verl.config.reward_model import RewardModelConfig
from verl.data.chat_template import answer_text
from verl.protocol import DataProto
from verl.reward.pool import Failure
from verl.utils.user_code import defined_at
from verl.utils.visible_text import visible

# Column that marks rows without a usable sample: set by a rollout, or by a reward (with the kind of failure).
LOST = "__lost__"
# Text in LOST for samples that the rollout excludes from training.
MASKED = "masked"
# Column of what the reward returned besides the scores: a dict for each row.
EXTRAS = "__extras__"
# Column of results of the reward function that are known already.
GRADED = "__graded__"


class RewardError(RuntimeError):
    """A reward function failed or returned something that is no score; the message names the row.

    `failure` is the reason where a single sample was scored, else None.
    """

    def __init__(self, message: str, failure: Failure | None = None) -> None:
        super().__init__(message)
        self.failure = failure


@dataclass(frozen=True)
class Row:
    """One answer: its position in the batch, ids without padding, columns of the data set.

    `response_mask` has one number per id of the response: 1 for those that the model generated, 0 for those of tools
    and users; empty: all are generated.
    """

    index: int
    data_source: str
    prompt_ids: list[int]
    response_ids: list[int]
    ground_truth: Any
    extra_info: dict[str, Any] | None
    response_mask: Sequence[int] = ()

    def __str__(self) -> str:
        known = (self.extra_info or {}).get("index")
        return f"row {self.index} (data_source={self.data_source!r}, index={known!r})"


def rows_of(data: DataProto, reward_fn_key: str) -> list[Row]:
    """The rows of a batch with prompts [B, P], responses [B, R] and attention_mask [B, P+R], 1 on real tokens.

    A column `response_mask` [B, R] tells what the model generated. `reward_model` is needed for its ground truth.
    `extra_info` also gets num_turns (column `__num_turns__`, else None) and rollout_reward_scores (column
    `reward_scores`: rewards that the rollout's tools gave, by name; else empty).
    """
    extras = data.non_tensor_batch
    for key in (reward_fn_key, "reward_model"):
        if key not in extras:
            other = ", or name another one in data.reward_fn_key" if key == reward_fn_key else ""
            raise RewardError(
                f"the batch has no column {key!r} to score by; it has {', '.join(sorted(extras))}. "
                f"Add the column to the data set{other}."
            )
    prompts, responses = data.batch["prompts"].tolist(), data.batch["responses"].tolist()
    valid = data.batch["attention_mask"].bool().tolist()
    generated = data.batch["response_mask"].tolist() if "response_mask" in data.batch else [()] * len(data)
    rows = []
    for i, (prompt, response, is_token) in enumerate(zip(prompts, responses, valid, strict=True)):
        extra_info = {
            **((extras["extra_info"][i] if "extra_info" in extras else None) or {}),
            "num_turns": extras["__num_turns__"][i] if "__num_turns__" in extras else None,
            "rollout_reward_scores": extras["reward_scores"][i] if "reward_scores" in extras else {},
        }
        reward_model = extras["reward_model"][i]
        if not isinstance(reward_model, Mapping) or "ground_truth" not in reward_model:
            raise RewardError(f"row {i}: column 'reward_model' has no 'ground_truth'; it is {reward_model!r:.200}.")
        prompt_ids = list(compress(prompt, is_token[: len(prompt)]))
        response_ids = list(compress(response, is_token[len(prompt) :]))
        mask = list(compress(generated[i], is_token[len(prompt) :]))
        truth = reward_model["ground_truth"]
        rows.append(Row(i, extras[reward_fn_key][i], prompt_ids, response_ids, truth, extra_info, mask))
    return rows


def response_turns(tokenizer: Any, ids: Sequence[int], mask: Sequence[int]) -> list[dict[str, str]]:
    """A response as {text, kind}: "generated" where the mask is 1, "given" (by tools and users) where it is 0.

    A mask without a 1, which a rollout may set to leave a sample out of the loss, counts as all 1.
    """
    marked = zip(ids, mask if any(mask) else [1] * len(ids), strict=True)
    return [
        {"text": answer_text(tokenizer, [token for token, _ in turn]), "kind": "generated" if generated else "given"}
        for generated, turn in groupby(marked, key=lambda pair: bool(pair[1]))
    ]


def model_text(turns: list[dict[str, str]]) -> str:
    """The generated ones of `response_turns`, a line break between them."""
    return "\n".join(turn["text"] for turn in turns if turn["kind"] == "generated")


def judged_text(settings: RewardModelConfig, tokenizer: Any, ids: Sequence[int], mask: Sequence[int]) -> str:
    """The text of a response that built-in rules and reward models score: `reward_model.judged_text`."""
    if settings.judged_text == "conversation":
        return answer_text(tokenizer, ids)
    return model_text(response_turns(tokenizer, ids, mask))


def parse_results(
    rows: list[Row], results: list[Any], drop: bool, function: Callable[..., Any]
) -> list[tuple[float, dict[str, Any]] | Failure]:
    """(score, extras) of each row from the reward function's result: a number, or a dict with 'score'.

    All items of a dict are extras, its score included; a number has none. Rows without a score stay Failures, which are
    logged, when `drop`; otherwise, or if one is fatal, a RewardError names that or the first and counts them.
    """
    parsed = [parse_result(result) for result in results]
    failed = [(row, result) for row, result in zip(rows, parsed, strict=True) if isinstance(result, Failure)]
    if not failed:
        return parsed
    culprit, first = next((pair for pair in failed if pair[1].fatal), failed[0])
    if drop and not first.fatal:
        for row, failure in failed:
            logger.warning("{} is left out: reward function {} {}", row, defined_at(function), failure.text)
        return parsed
    timeouts = sum(failure.kind == "timeout" for _, failure in failed)
    remedy = "" if first.fatal else "; reward_model.error=drop would leave such rows out"
    raise RewardError(
        f"{culprit}: reward function {defined_at(function)} {first.text.rstrip('.')}. {len(failed)} of {len(rows)} "
        f"rows have no score ({timeouts} took too long){remedy}."
    ) from first.cause


def parse_result(result: Any) -> tuple[float, dict[str, Any]] | Failure:
    """(score, extras) of a reward function's result, or why it is not a score; a Failure is returned as it is."""
    if isinstance(result, Failure):
        return result
    extras = {str(name): value for name, value in result.items()} if isinstance(result, dict) else {"score": result}
    if "score" not in extras:
        return Failure("error", f"returned a dict without 'score': {sorted(extras)}")
    try:
        number = float(extras["score"]) if not isinstance(extras["score"], str) else None
    except Exception:  # float() of an object may raise anything
        number = None
    if number is None:
        return Failure("error", f"returned {extras['score']!r:.80} as a score; return a number, or a dict with 'score'")
    if not math.isfinite(number):
        return Failure("error", f"returned the score {number}; a finite number is needed")
    return number, extras if isinstance(result, dict) else {}


def place_scores(data: DataProto, scores: list[float]) -> torch.Tensor:
    """Token-level scores [B, R] float32 with the B scores on the last trained position of their rows, 0 elsewhere.

    The last 1 of `response_mask` [B, R] when the batch has one, else of the response part of `attention_mask`. A row
    whose mask is all 0 falls back to its last real token, or to position 0 of an empty response.
    """
    responses = data.batch["responses"]
    last = _last_set(data.batch["attention_mask"][:, -responses.shape[-1] :].bool())
    if "response_mask" in data.batch:
        counted = data.batch["response_mask"].bool()
        last = torch.where(counted.any(-1), _last_set(counted), last)
    placed = torch.zeros(responses.shape, dtype=torch.float32, device=responses.device)
    values = torch.tensor(scores, dtype=torch.float32, device=responses.device)
    return placed.scatter_(1, last.unsqueeze(-1), values.unsqueeze(-1))


def _last_set(mask: torch.Tensor) -> torch.Tensor:
    """Index of the last True of each row, 0 without one: bool [B, R] -> int64 [B]."""
    positions = torch.arange(mask.shape[-1], device=mask.device)
    return torch.where(mask, positions, 0).amax(-1)


def place_results(data: DataProto, results: list[tuple[float, dict[str, Any]] | Failure]) -> dict[str, Any]:
    """Scores [B, R] and extras {name: list of B values, None where a row lacks the name}.

    Failed rows have score 0, and the extra `__lost__` holds the kind of failure of each row ('' for the others).
    """
    pairs = [(0.0, {}) if isinstance(result, Failure) else result for result in results]
    names = dict.fromkeys(name for _, extras in pairs for name in extras)
    columns = {name: [extras.get(name) for _, extras in pairs] for name in names}
    if any(isinstance(result, Failure) for result in results):
        columns[LOST] = [result.kind if isinstance(result, Failure) else "" for result in results]
    return {"reward_tensor": place_scores(data, [score for score, _ in pairs]), "reward_extra_info": columns}


def drop_failed(
    data: DataProto, scores: torch.Tensor, extras: dict[str, Any]
) -> tuple[DataProto, torch.Tensor, dict[str, Any], Counter[str]]:
    """The batch, scores [B', R] and extras without the rows that have no score, and the number of failures by kind."""
    extras = dict(extras)
    if LOST not in extras:
        return data, scores, extras, Counter()
    failures = extras.pop(LOST)
    scored = [i for i, failure in enumerate(failures) if not failure]
    extras = {key: [values[i] for i in scored] for key, values in extras.items()}
    return data.select_idxs(np.array(scored, dtype=np.int64)), scores[scored], extras, Counter(filter(None, failures))


def reward_extras(data: DataProto) -> dict[str, list[Any]]:
    """The reward's extras in the column EXTRAS by name: B values each, None where a row lacks the name."""
    rows = data.non_tensor_batch.get(EXTRAS, ())
    return {name: [row.get(name) for row in rows] for name in sorted({name for row in rows for name in row})}


def log_examples(tokenizer: Any, rows: list[Row], results: list[Any], num_examine: int) -> None:
    """Log the first `num_examine` rows of each data source as readable text."""
    shown: Counter[str] = Counter()
    for row, result in zip(rows, results, strict=True):
        if shown[row.data_source] >= num_examine:
            continue
        shown[row.data_source] += 1
        prompt, answer = (answer_text(tokenizer, ids) for ids in (row.prompt_ids, row.response_ids))
        text = "[prompt] {}\n[response] {}\n[ground_truth] {}\n[score] {}"
        score = result.text if isinstance(result, Failure) else result[1] or result[0]  # extras of a dict have it too
        logger.info(text, *(visible(str(value)) for value in (prompt, answer, row.ground_truth, score)))
