"""What a dry run finds out about an RL environment (`data.environment`): wrong settings, a prompt, a scored answer."""

from collections.abc import Iterator
from statistics import median
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.panel import Panel

from verl.agents.environments.hosting import EnvironmentFailed
from verl.agents.environments.processes import START_S, EnvironmentCalls
from verl.config.ppo import PPOConfig
from verl.planning.dry_run import print_rows
from verl.utils.problems import Problem, one_line, wrong
from verl.utils.visible_text import visible

COUNTED = 200  # prompts whose tokens are counted


def check_environment(config: PPOConfig, findings: Any) -> Iterator[Problem]:
    """Settings with which an environment cannot give rows or scores; `findings`, which every check gets, is unused."""
    environment, workers = config.data.environment, config.reward_model.num_workers
    if environment.name is None:
        return
    key = f"data.environment.name={environment.name}"
    if config.data.custom_cls.path is not None:
        yield wrong("data.custom_cls.path", f"{key} makes the data set: leave data.custom_cls out.")
    if workers == 0:
        text = "environments do not run in the trainer's process: set reward_model.num_workers to 1 or more"
        yield wrong("reward_model.num_workers", f"reward_model.num_workers=0 with {key}: {text}.")
    if config.reward_manager.name == "batch":
        yield wrong("reward_manager.name", f"reward_manager.name=batch with {key}, which scores row by row: set naive.")
    if config.reward_model.enable:
        yield wrong("reward_model.enable", f"reward_model.enable=true with {key}, which gives the scores: disable it.")


def show_environment(console: Console, config: PPOConfig, findings: Any) -> list[Problem]:
    """Start the environment; print its first prompt, the scores of one answer and prompt lengths; return what failed.

    The model's answer in every turn is the first row's ground truth; for reasoning_gym in its answer_format.
    """
    environment, prompts = config.data.environment, findings.datasets.get("data.train_files")
    if environment.name is None or not prompts:
        return []
    row = prompts.rows[0]
    truth = row["reward_model"]["ground_truth"]
    answer = environment.answer_format.format(truth) if environment.name == "reasoning_gym" else str(truth or "")
    try:
        with EnvironmentCalls(environment) as calls:
            item, single_turn = row["extra_info"]["environment"], environment.max_turns == 1
            # In a single turn the environment must ask what the row asks, as training does.
            scores = calls.call(START_S + environment.timeout, "score", item, answer, single_turn)
    except EnvironmentFailed as error:
        return [wrong("data.environment", f"data.environment: a conversation failed: {one_line(error)}")]
    counted = min(len(prompts), COUNTED)
    lengths = sorted(len(prompts.prompt_ids(i)) for i in range(counted))
    numbers = {name: value for name, value in scores.items() if isinstance(value, int | float)}
    console.rule("Environment")
    console.print(Panel(escape(visible(prompts.prompt_text(0))), title="first prompt", expand=False))
    rows = {
        "environment": environment.name,
        "answer": escape(visible(answer)),
        "its scores": ", ".join(f"{name} {value:g}" for name, value in numbers.items()),
        f"tokens of the first {counted} prompts": f"{lengths[0]} to {lengths[-1]}, median {median(lengths):g}",
    }
    print_rows(console, rows)
    return []
