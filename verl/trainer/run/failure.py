"""The message of a failed run, and the error that ends a run whose updates are skipped repeatedly."""

import os
import re
from pathlib import Path
from typing import Any

from ray.exceptions import RayActorError

from verl.config.ppo import PPOConfig
from verl.trainer.run.timing import StepFailed, root_cause
from verl.utils.redact import redact_text
from verl.utils.user_code import full_traceback, user_frame
from verl.utils.visible_text import visible

LOW_MEMORY = re.compile(
    r"due to the node running low on memory.*?\(IP: ([^,)]+).*?\bwas (\S+ used / \S+ limit)", re.DOTALL
)


def failure_message(error: Exception, config: Any) -> str:
    """Why a run ended; writes traceback.txt (other ranks: traceback_rankN.txt) into trainer.default_local_dir."""
    cause = root_cause(error)
    if isinstance(cause, StepFailed):
        text = str(cause)
    elif isinstance(cause, RayActorError):
        text = f"a process of the run died: {cause}"
    else:
        text = f"{type(cause).__name__}: {cause}"
    trace = visible(redact_text(full_traceback(error)))
    rank = os.environ.get("RANK", "0")
    name = "traceback.txt" if rank == "0" else f"traceback_rank{rank}.txt"
    file = Path(config.trainer.default_local_dir).expanduser() / name
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(trace, encoding="utf-8")
        end = f"Full traceback: {file}"
    except OSError as e:
        end = f"{trace}\n(traceback printed because {file} cannot be written: {e})"
    if (used_up := LOW_MEMORY.search(text)) is not None:
        machine, memory = used_up.groups()
        remedies = ""
        if isinstance(config, PPOConfig) and config.trainer.device == "cpu":
            from verl.planning.ppo_memory import memory_remedies  # slow

            remedies = f": {', '.join(memory_remedies(config).values())}"
        text = (
            f"{text.partition(': ')[0]}: Ray ended a process because the memory of machine {machine} was used up "
            f"({memory}). Close other programs there, or let the run need less{remedies}."
        )
    lines = ["", f"Training failed: {visible(redact_text(text))}"]
    if frame := user_frame(trace):
        lines.append(f"  at {frame}")
    return "\n".join([*lines, end])


class NonFiniteRun(RuntimeError):
    """Too many steps in a row were skipped for a non-finite loss or gradient."""


def count_skipped(
    counters: dict[str, int], skipped: bool, limit: int, why: str, remedy: str, all_skipped_of: int | None = None
) -> None:
    """Count steps with a skipped update in a row; NonFiniteRun at `limit` (trainer.nonfinite_steps_max).

    `why` ends in "in", the number of steps follows; `remedy` says what happened to the weights and what to do. With
    `all_skipped_of`, the steps of a run that has just ended, NonFiniteRun if counters["skipped"] is that number.
    """
    counters["nonfinite_in_row"] = counters["nonfinite_in_row"] + 1 if skipped else 0
    if counters["nonfinite_in_row"] >= limit:
        raise NonFiniteRun(f"{why} {limit} steps in a row (trainer.nonfinite_steps_max); {remedy}")
    if all_skipped_of is not None and counters["skipped"] == all_skipped_of:
        raise NonFiniteRun(f"{why} every one of the {all_skipped_of} steps; {remedy}")
