"""Dry runs of the entries that train nothing: main_generation, main_eval."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any

from rich.console import Console

from verl.config.aliases import text
from verl.config.offline import EvaluationConfig, GenerationConfig
from verl.config.rollout import ROLLOUTS_OF_THE_ACTOR
from verl.data.generation import GenerationPrompts, PartialAnswers, own_keys
from verl.data.rl_dataset import read_rows
from verl.planning import checks
from verl.planning.dry_run import Entry, count_text, print_rows
from verl.utils.problems import Problem, one_line, wrong


def generation_entry(rows: int | None = None) -> Entry:
    """main_generation; its start tokenizes the first `rows` prompts, None for all."""

    def plan(console: Console, config: GenerationConfig, known: list[Problem]) -> list[Problem]:
        prompts, problems = check_inputs(config, checks.Findings())
        count, ranks, samples = prompts and len(prompts), config.trainer.n_gpus_per_node, config.data.n_samples
        kept = 0 if prompts is None else len(PartialAnswers(config).read())
        left = count and count - kept  # None where the count is unknown, as in all of the following
        rows = {"prompts": count_text(count)}
        if kept:
            rows["answered by a command that was stopped"] = f"{kept:,}"
        if isinstance(prompts, GenerationPrompts):
            rows |= prompts.statistics()
        rows |= {
            "answers": count_text(count and count * samples),
            "new tokens, at most": count_text(left and left * samples * config.rollout.response_length),
            "ranks": str(ranks),
            "prompts a rank": count_text(left and -(-left // ranks)),
            "prompts at a time": count_text(config.data.batch_size),
        }
        console.rule("Plan")
        print_rows(console, rows)
        return problems

    def start_problems(config: GenerationConfig) -> list[Problem]:
        return check_inputs(config, checks.Findings(to_start=True), rows)[1]

    return Entry(GenerationConfig, _generation_rules, plan, start_problems)


def _generation_rules(config: GenerationConfig, problems: list[Problem]) -> Iterator[Problem]:
    """Rules between keys of main_generation; `problems` of single keys are known already."""
    rollout, samples = config.rollout, config.data.n_samples
    known = not {p.key for p in problems} & {"data.n_samples", "rollout.temperature", "rollout.do_sample"}
    if known and samples > 1 and (rollout.temperature == 0 or not rollout.do_sample):
        what = f"data.n_samples={samples} answers of rollout.temperature={rollout.temperature}"
        what += f", rollout.do_sample={text(rollout.do_sample)} would be one text {samples} times"
        yield wrong("data.n_samples", f"{what}. Set data.n_samples=1.")
    if rollout.name not in ROLLOUTS_OF_THE_ACTOR and rollout.load_format == "dummy":
        what = "rollout.load_format=dummy would answer with random weights"
        yield wrong("rollout.load_format", f"{what}. Set rollout.load_format=auto.")


def check_inputs(
    config: GenerationConfig, findings: checks.Findings, rows: int | None = None
) -> tuple[Sequence[Any] | None, list[Problem]]:
    """The prompts (rows without a tokenizer; None where they cannot be read), and the problems of model, prompts,
    machine and kept answers. The first `rows` prompts are tokenized; None for all.
    """
    checks.check_models(config.model, findings, "model", "model.path")
    findings.problems += checks.check_length(config.rollout, findings, "rollout")
    findings.problems += [*checks.check_liger(config, "model"), *checks.check_gpus(config.trainer)]
    tokenizer, problems = findings.tokenizer, findings.problems
    read = read_rows if tokenizer is None else lambda _: GenerationPrompts(config, tokenizer)
    prompts = _tried(problems, "data.path", lambda: read(config.data.path))
    problems += checks.check_written("data.output_path", config.data.output_path, is_folder=False)
    problems += checks.check_written("data.output_path", f"{config.data.output_path}.partial")
    if isinstance(prompts, GenerationPrompts):
        problems += checks.row_problems(prompts, "data.path", len(prompts) if rows is None else rows, lambda row: None)
        problems += PartialAnswers(config).problems()
    return prompts, [replace(problem, message=own_keys(problem.message)) for problem in problems]


def evaluation_entry(
    read_answers: Callable[[EvaluationConfig], tuple[Any, Any]], load_reward: Callable[[EvaluationConfig], Any]
) -> Entry:
    """main_eval; `read_answers` checks and returns the answers with their rows, `load_reward` the reward function."""

    def plan(console: Console, config: EvaluationConfig, known: list[Problem]) -> list[Problem]:
        problems: list[Problem] = []
        _tried(problems, "custom_reward_function", lambda: load_reward(config))
        answers = _tried(problems, "data.path", lambda: read_answers(config)[1])
        console.rule("Plan")
        count = None if answers is None else len(answers)
        print_rows(console, {"answers": count_text(count), "processes": count_text(config.reward_model.num_workers)})
        return problems

    return Entry(EvaluationConfig, lambda settings, problems: (), plan)


def _tried(problems: list[Problem], key: str, work: Callable[[], Any]) -> Any:
    """The result of `work`; None if it raises, which is added to the problems."""
    try:
        return work()
    except Exception as error:  # files and functions of users raise almost anything; its text is the problem
        problems.append(wrong(key, f"{key}: {one_line(error)}"))
        return None
