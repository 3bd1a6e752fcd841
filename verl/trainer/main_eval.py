"""Entry of offline scoring: `python -m verl.trainer.main_eval data.path=... [custom_reward_function.path=...]`."""

import json
import sys
from collections import defaultdict
from collections.abc import Mapping
from statistics import fmean
from typing import Any

from loguru import logger
from omegaconf import DictConfig
from omegaconf.errors import OmegaConfBaseException

from verl.config.compose import hydra_main
from verl.config.offline import EvaluationConfig, EvaluationDataConfig
from verl.data.rl_dataset import DatasetError, read_rows
from verl.planning.offline import evaluation_entry
from verl.reward.loading import get_custom_reward_fn, rule_reward
from verl.reward.pool import Failure, GradingPool
from verl.reward.rows import RewardError, Row, parse_results
from verl.reward.rules import truth_problem
from verl.utils.problems import SHARE_NAMED, one_line


@hydra_main(config_path="config", config_name="evaluation")
def main(config: DictConfig) -> None:
    entry = evaluation_entry(read_answers, get_custom_reward_fn)
    if config.trainer.dry_run:
        sys.exit(entry.dry_run(config))
    try:
        scores = evaluate(entry.refuse_problems(config))
    except (ValueError, OSError, RewardError, RuntimeError, AttributeError, OmegaConfBaseException) as error:
        sys.exit(str(error))
    sys.stdout.write(json.dumps(scores, indent=1) + "\n")


def evaluate(config: EvaluationConfig) -> dict[str, float]:
    """{"test_score/<data_source>": mean over rows of the mean over a row's answers}.

    Answers are graded in processes that are killed when one takes too long. An answer that cannot be graded raises a
    RewardError that names its row, or is left out (reward_model.error=drop).
    """
    settings = config.reward_model
    rows, texts = read_answers(config)
    items = [
        {"data_source": r.data_source, "solution_str": text, "ground_truth": r.ground_truth, "extra_info": r.extra_info}
        for r, text in zip(rows, texts, strict=True)
    ]
    workers = max(1, settings.num_workers)  # 0 means the trainer's own process; there is none here
    function = get_custom_reward_fn(config) or rule_reward(settings, workers)
    pool = GradingPool(function, workers, settings.item_timeout)
    try:
        results = parse_results(rows, pool.map(items), settings.error == "drop", function)
    finally:
        pool.close()
    scores: dict[str, dict[int, list[float]]] = defaultdict(lambda: defaultdict(list))
    for row, result in zip(rows, results, strict=True):
        if not isinstance(result, Failure):
            scores[row.data_source][row.index].append(result[0])
    if rows and not scores:
        raise RewardError(f"none of {len(rows)} answers could be graded; the first error: {results[0].text}")
    failed, count = sum(isinstance(result, Failure) for result in results), len(results)
    if failed > SHARE_NAMED * count:
        what = f"{failed / count:.0%} of the answers, {failed} of {count},"
        logger.warning(f"{what} could not be graded and are left out (reward_model.error=drop)")
    return {f"test_score/{source}": fmean(map(fmean, of_row.values())) for source, of_row in sorted(scores.items())}


def read_answers(config: EvaluationConfig) -> tuple[list[Row], list[str]]:
    """The row of each answer of data.path, and its text."""
    data = config.data
    by_rule = config.custom_reward_function.path is None
    rows: list[Row] = []
    texts: list[str] = []
    for number, row in enumerate(read_rows(data.path)):
        source, truth, responses = _read(row, data, number)
        if by_rule and (problem := truth_problem(source, truth)):
            raise DatasetError(f"{data.path}, row {number}: {problem}.")
        rows += [Row(number, source, [], [], truth, row.get("extra_info"))] * len(responses)
        texts += responses
    return rows, texts


def _read(row: dict[str, Any], data: EvaluationDataConfig, number: int) -> tuple[str, Any, list[str]]:
    """Data source, ground truth and answers of a row."""
    for name in ("data_source_key", "reward_model_key", "response_key"):
        if data[name] not in row:
            has = ", ".join(row)
            raise DatasetError(f"{data.path}, row {number}: no column {data[name]!r}; it has {has}. Set data.{name}.")
    judged, responses = row[data.reward_model_key], row[data.response_key]
    if not isinstance(judged, Mapping) or "ground_truth" not in judged:
        what = f"{data.path}, row {number}: column {data.reward_model_key!r} has no 'ground_truth'"
        raise DatasetError(f"{what}: {one_line(judged)}. Set data.reward_model_key.")
    responses = [responses] if isinstance(responses, str) else responses
    if not (isinstance(responses, list) and responses and all(isinstance(text, str) for text in responses)):
        what = f"{data.path}, row {number}: column {data.response_key!r} must hold answers as text"
        raise DatasetError(f"{what}, not {one_line(responses)}. Set data.response_key.")
    return str(row[data.data_source_key]), judged["ground_truth"], list(responses)


if __name__ == "__main__":
    main()
