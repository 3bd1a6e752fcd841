"""Dry runs of the entries that train nothing: main_generation, main_eval."""

from collections.abc import Callable
from typing import Any

from omegaconf import DictConfig
from rich.console import Console

from verl.config.offline import EvaluationConfig, GenerationConfig
from verl.planning.checks import Findings, check_gpus, check_length, check_models
from verl.planning.dry_run import Entry, count_text, print_rows
from verl.planning.problems import Problem, one_line, wrong


def generation_entry(read_prompts: Callable[[Any], Any]) -> Entry:
    """main_generation; `read_prompts(tokenizer)` returns the data set."""

    def plan(console: Console, config: DictConfig) -> list[Problem]:
        findings = Findings()
        check_models(config.model, findings, "model", "model.path")
        findings.problems += check_length(config.rollout, findings, "rollout")
        prompts = None
        if findings.tokenizer is not None:
            prompts = _tried(findings.problems, "data.path", lambda: len(read_prompts(findings.tokenizer)))
        ranks, samples = config.trainer.n_gpus_per_node, config.data.n_samples
        console.rule("Plan")
        print_rows(console, {
            "prompts": count_text(prompts), "answers": count_text(prompts and prompts * samples), "ranks": str(ranks),
            "prompts a rank": count_text(prompts and -(-prompts // ranks)),
            "prompts at a time": count_text(config.data.batch_size),
        })  # fmt: skip
        return [*findings.problems, *check_gpus(config)]

    return Entry(GenerationConfig, (), plan)


def evaluation_entry(read_answers: Callable[[], list[Any]], load_reward: Callable[[], Any]) -> Entry:
    """main_eval; `read_answers()` checks and returns the answers, `load_reward()` the reward function."""

    def plan(console: Console, config: DictConfig) -> list[Problem]:
        problems: list[Problem] = []
        _tried(problems, "custom_reward_function", load_reward)
        answers = _tried(problems, "data.path", read_answers)
        console.rule("Plan")
        count = None if answers is None else len(answers)
        print_rows(console, {"answers": count_text(count), "processes": count_text(config.reward_model.num_workers)})
        return problems

    return Entry(EvaluationConfig, (), plan)


def _tried(problems: list[Problem], key: str, work: Callable[[], Any]) -> Any:
    """The result of `work`; None if it raises, which is added to the problems."""
    try:
        return work()
    except Exception as error:  # files and functions of users raise almost anything; its text is the problem
        problems.append(wrong(key, one_line(error)))
        return None
