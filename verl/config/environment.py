"""Settings of environments that others wrote (data.environment)."""

import re
from dataclasses import dataclass
from typing import Any

from verl.config.base import BaseConfig
from verl.config.fields import setting

#: The adapters that have a name of their own; the others are named by their class paths.
ADAPTERS = {
    "reasoning_gym": "verl.agents.environments.adapters.reasoning_gym.ReasoningGym",
    "verifiers": "verl.agents.environments.adapters.verifiers.Verifiers",
}


@dataclass
class EnvironmentConfig(BaseConfig, section="data.environment"):
    """Where prompts and scores come from instead of data files and a reward function; see docs/environments.md."""

    name: str | None = setting(
        None, "reasoning_gym, verifiers, or the class path of another adapter; null reads data files."
    )
    # Null by default: Hydra cannot replace a list by a dictionary.
    tasks: list[str] | dict[str, Any] | None = setting(
        None, "Names of tasks of the library, as a list or as {name: weight}; docs/environments.md says which."
    )
    params: dict[str, Any] | None = setting(
        None, "{task: settings} that the library's constructor of the task gets; any key."
    )
    path: str | None = setting(None, "Python file or folder that defines tasks which are not installed.")
    url: str | None = setting(None, "Address of an environment's server (OpenEnv), such as http://127.0.0.1:8000.")
    size: int = setting(1000, "Items drawn for training.", low=1)
    val_size: int = setting(100, "Items drawn for validation.", low=1)
    seed: int = setting(0, "Item i of the training data comes from seed + i where the library draws items.", low=0)
    val_seed: int = setting(
        5_000_000, "Item i of the validation data comes from val_seed + i; the two ranges must not overlap.", low=0
    )
    max_turns: int = setting(
        1,
        "Answers of the model in a conversation. 1: any rollout, scored in the reward processes; more: agent loops, "
        "with rollout.mode=async.",
        low=1,
    )
    system_prompt: str | None = setting(None, "System message; null: the library's own, empty: none.")
    examples: int = setting(0, "Worked examples before the question, as earlier turns (reasoning_gym).", low=0)
    answer_pattern: str = setting(
        r"(?s)<answer>\s*(.*?)\s*</answer>",
        "Regular expression whose first group, at its last match, is the answer that is scored (reasoning_gym).",
    )
    answer_format: str = setting("<answer>{}</answer>", "Answers of worked examples; {} is the answer.")
    num_workers: int = setting(1, "Processes of one agent loop worker that run conversations.", low=1)
    concurrency: int = setting(32, "Conversations that one of these processes holds at a time.", low=1)
    timeout: float = setting(60.0, "Seconds for one step of an environment, without the model's time.", above=0)

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.name is None:
            return
        key = f"data.environment.name={self.name}"
        if self.name not in ADAPTERS and "." not in self.name:
            raise ValueError(
                f"{key} is unknown. Known: {', '.join(ADAPTERS)}, and class paths of adapters, such as "
                "examples.environments.openenv_adapter.OpenEnv or examples.environments.skyrl_gym_adapter.SkyRLGym."
            )
        if self.name in ADAPTERS and not self.tasks:
            raise ValueError(f"{key} needs data.environment.tasks, the names of its tasks.")
        if self.name == "reasoning_gym" and self.max_turns > 1:
            raise ValueError(f"{key} has questions with one answer: set data.environment.max_turns=1.")
        if wrong := [task for task, weight in self.weights.items() if not (_is_number(weight) and weight > 0)]:
            raise ValueError(f"data.environment.tasks.{wrong[0]}: the weight must be a number above 0.")
        if unknown := [task for task in self.parameters if self.tasks and task not in self.weights]:
            known = ", ".join(self.weights)
            raise ValueError(f"data.environment.params.{unknown[0]}: no such task in data.environment.tasks: {known}.")
        try:
            fault = "" if re.compile(self.answer_pattern).groups else "has no group: put parentheses around the answer"
        except re.error as error:
            fault = f"is no regular expression: {error}"
        if fault:
            raise ValueError(f"data.environment.answer_pattern={self.answer_pattern} {fault}.")
        try:
            self.answer_format.format("")
        except (LookupError, ValueError, AttributeError):
            text = "write {} for the answer, and every other brace twice"
            raise ValueError(f"data.environment.answer_format={self.answer_format}: {text}.") from None

    @property
    def weights(self) -> dict[str, float]:
        """`tasks` as {name: weight}, each 1 for a list."""
        return dict(self.tasks) if isinstance(self.tasks, dict) else dict.fromkeys(self.tasks or (), 1.0)

    @property
    def parameters(self) -> dict[str, Any]:
        """`params`, empty for null."""
        return dict(self.params or {})


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)
