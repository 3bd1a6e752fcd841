"""Entry of offline scoring: `python -m verl.trainer.main_eval data.path=... [custom_reward_function.path=...]`."""

from __future__ import annotations

import asyncio
import inspect
import json
import sys
from collections import defaultdict
from collections.abc import Mapping
from typing import Any

from omegaconf import DictConfig
from omegaconf.errors import OmegaConfBaseException

from verl.trainer.config.offline import EvaluationDataConfig
from verl.utils.config import hydra_main, omega_conf_to_dataclass
from verl.utils.dataset.rl_dataset import DatasetError, read_rows
from verl.workers.reward_manager.rows import RewardError, Row, split_result


@hydra_main(config_path="config", config_name="evaluation")
def main(config: DictConfig) -> None:
    try:
        scores = evaluate(config)
    except (ValueError, OSError, RewardError, NotImplementedError, AttributeError, OmegaConfBaseException) as error:
        sys.exit(str(error))
    sys.stdout.write(json.dumps(scores, indent=1) + "\n")


def evaluate(config: DictConfig) -> dict[str, float]:
    """{"test_score/<data_source>": mean over rows of the mean over a row's answers}."""
    from verl.trainer.ppo.reward import get_custom_reward_fn
    from verl.utils.reward_score import default_compute_score

    data = omega_conf_to_dataclass(config.data, EvaluationDataConfig)
    score = get_custom_reward_fn(config) or default_compute_score
    by_source: dict[str, list[float]] = defaultdict(list)
    for number, row in enumerate(read_rows(data.path)):
        source, truth, responses = _read(row, data, number)
        found = []
        for text in responses:
            seen = Row(number, source, [], [], truth, row["extra_info"] if "extra_info" in row else None)
            try:
                result = score(
                    data_source=source, solution_str=text, ground_truth=truth, extra_info=seen.extra_info
                )  # fmt: skip
                result = asyncio.run(result) if inspect.iscoroutine(result) else result
            except NotImplementedError:
                raise
            except Exception as error:
                text = f"{data.path}, {seen}: the reward function raised {type(error).__name__}: {error}"
                raise RewardError(text) from error
            found.append(split_result(result, seen)[0])
        by_source[source].append(sum(found) / len(found))
    return {f"test_score/{source}": sum(means) / len(means) for source, means in sorted(by_source.items())}


def _read(row: dict[str, Any], data: EvaluationDataConfig, number: int) -> tuple[str, Any, list[str]]:
    """Data source, ground truth and answers of a row."""
    for name in ("data_source_key", "reward_model_key", "response_key"):
        if data[name] not in row:
            has = ", ".join(row)
            raise DatasetError(f"{data.path}, row {number}: no column {data[name]!r}; it has {has}. Set data.{name}.")
    judged, responses = row[data.reward_model_key], row[data.response_key]
    if not isinstance(judged, Mapping) or "ground_truth" not in judged:
        raise DatasetError(f"{data.path}, row {number}: column {data.reward_model_key!r} has no 'ground_truth'.")
    responses = [responses] if isinstance(responses, str) else responses
    if not responses or not all(isinstance(text, str) for text in responses):
        raise DatasetError(f"{data.path}, row {number}: column {data.response_key!r} holds no answer, or not texts.")
    return str(row[data.data_source_key]), judged["ground_truth"], list(responses)


if __name__ == "__main__":
    main()
