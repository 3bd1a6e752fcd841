"""Keys and dry run of the entries that train nothing: main_generation, main_eval."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from omegaconf import DictConfig
from rich.console import Console

from verl.config.offline import EvaluationDataConfig, GenerationDataConfig, GenerationTrainerConfig
from verl.planning.config_check import tree_problems
from verl.planning.problems import Problem, one_line, raise_if_any, wrong
from verl.trainer.dry_run import figure, present, print_rows, unless_wrong
from verl.trainer.dry_run_checks import Findings, check_gpus, check_models
from verl.workers.config import HFModelConfig, RewardModelConfig, RolloutConfig

GENERATION = {
    "trainer": GenerationTrainerConfig, "data": GenerationDataConfig, "model": HFModelConfig, "rollout": RolloutConfig,
}  # fmt: skip
EVALUATION = {"data": EvaluationDataConfig, "reward_model": RewardModelConfig}


def refuse_problems(config: DictConfig, sections: Mapping[str, type]) -> None:
    """A ConfigError with every unknown key, missing value and wrong type or range."""
    raise_if_any(tree_problems(config, sections)[0])


def plan_generation(config: DictConfig, read_prompts: Callable[[Any], Any]) -> int:
    """Print config, plan and problems of main_generation; the exit code. `read_prompts(tokenizer)`: the data set."""

    def look(console: Console, problems: list[Problem]) -> None:
        found = Findings()
        check_models(config.model, found, "model", "model.path")
        prompts = None
        if found.tokenizer is not None:
            prompts = _noted(found.problems, "data.path", lambda: len(read_prompts(found.tokenizer)))
        problems += [*found.problems, *check_gpus(config)]
        ranks, samples = config.trainer.n_gpus_per_node, config.data.n_samples
        console.rule("Plan")
        print_rows(console, {
            "prompts": figure(prompts), "answers": figure(prompts and prompts * samples), "ranks": str(ranks),
            "prompts a rank": figure(prompts and -(-prompts // ranks)),
            "prompts at a time": figure(config.data.batch_size),
        })  # fmt: skip

    problems = tree_problems(config, GENERATION)[0]
    return present(config, problems, unless_wrong(problems, look))


def plan_evaluation(config: DictConfig, read_answers: Callable[[], list[Any]], load: Callable[[], Any]) -> int:
    """The same of main_eval. `read_answers()` checks and gives the answers, `load()` the reward function."""

    def look(console: Console, problems: list[Problem]) -> None:
        _noted(problems, "custom_reward_function", load)
        answers = _noted(problems, "data.path", read_answers)
        console.rule("Plan")
        count = None if answers is None else len(answers)
        print_rows(console, {"answers": figure(count), "processes": figure(config.reward_model.num_workers)})

    problems = tree_problems(config, EVALUATION)[0]
    return present(config, problems, unless_wrong(problems, look))


def _noted(problems: list[Problem], key: str, work: Callable[[], Any]) -> Any:
    """What `work` gives; None, with the problem noted, where it raises."""
    try:
        return work()
    except Exception as error:  # files and functions of the user's raise almost anything; its text is the finding
        problems.append(wrong(key, one_line(error)))
        return None
