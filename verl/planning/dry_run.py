"""Dry runs: `trainer.dry_run=true` prints a run's plan and every problem of its settings, and starts nothing."""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from loguru import logger
from omegaconf import DictConfig, OmegaConf
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from verl.planning.config_check import tree_problems
from verl.planning.memory_estimate import ModelSize
from verl.utils.problems import ABSENT, TITLES, UNUSED, WRONG, ConfigError, Problem
from verl.utils.redact import redact_text


@dataclass(frozen=True)
class Entry:
    """A command that reads a config: what its dry run checks and plans, and what stops its start.

    `config_type` is the dataclass of the tree; the functions get the tree as its instance, `settings`.
    `checks(settings, problems)` are rules beyond types and ranges, `problems` what is known before.
    `plan(console, settings, problems)` prints the plan and returns further problems, for example of data and models; it
    is left out for a config with problems unless `plans_wrong_configs`. `input_problems(settings)` are those of model,
    data and machine at a start; settings with problems may make it raise.
    """

    config_type: type
    checks: Callable[[Any, list[Problem]], Iterable[Problem]]
    plan: Callable[[Console, Any, list[Problem]], Iterable[Problem]]
    input_problems: Callable[[Any], Iterable[Problem]] = lambda settings: ()
    plans_wrong_configs: bool = False

    def problems(self, config: DictConfig, known: DictConfig | None = None) -> tuple[list[Problem], Any]:
        """The problems of the tree itself, and the typed tree, None where keys are missing or cannot be read.

        `known` is the tree without overrides, see `tree_problems`.
        """
        problems, settings, unused = tree_problems(config, self.config_type, known)
        if settings is not None:
            problems += [*self.checks(settings, problems), *unused]
        removed = any("was removed" in p.message for p in problems)
        complete = settings is not None and not removed and not OmegaConf.missing_keys(config)
        return problems, settings if complete else None

    def refuse_problems(self, config: DictConfig, known: DictConfig | None = None, warn: bool = True) -> Any:
        """The typed tree of a config that can run here; warns of settings without effect.

        Raises one ConfigError with everything that is wrong or absent here.
        """
        problems, settings = self.problems(config, known)
        try:
            problems += self.input_problems(settings) if settings is not None else ()
        except Exception as error:
            if all(problem.kind == UNUSED for problem in problems):
                raise
            logger.debug("the input cannot be checked with these settings: {}", error)
        if fatal := [p for p in dict.fromkeys(problems) if p.kind != UNUSED]:
            raise ConfigError(fatal)
        for problem in problems if warn else ():
            logger.warning("{}", problem.message)
        return settings

    def dry_run(self, config: DictConfig, known: DictConfig | None = None) -> int:
        """Print plan and problems; the exit code, 1 if anything is wrong on every machine."""
        problems, settings = self.problems(config, known)
        console = Console(soft_wrap=True)
        if settings is not None and (self.plans_wrong_configs or not any(p.kind == WRONG for p in problems)):
            problems += self.plan(console, settings, problems)
        elif settings is not None:
            console.print("No plan: the config itself has problems.")
        problems = list(dict.fromkeys(problems))
        console.rule("Problems")
        for kind, title in TITLES.items():
            of_kind = [p for p in problems if p.kind == kind]
            console.print(f"[bold]{title}: {len(of_kind)}[/bold]")
            for problem in of_kind:
                console.print(f"  - {escape(redact_text(problem.message))}", highlight=False)
        if any(p.kind == WRONG for p in problems):
            return 1
        if any(p.kind == ABSENT for p in problems):
            console.print("Nothing is wrong with this config, but this machine lacks something: see above.")
        else:
            warned = ", but read the warnings" if problems else ""
            console.print(f"Nothing is wrong with this config{warned}. Leave out trainer.dry_run=true to start it.")
        return 0


def memory_table(size: ModelSize, phases: Mapping[str, Mapping[str, int]], traced: bool) -> Table:
    """A table of the parts of one rank's memory, in bytes, with a column for each phase of a step."""
    how = "traced" if traced else "roughly"
    table = Table(title=f"Memory of one rank, {how} ({size.parameters:,} parameters, {size.trainable:,} trained)")
    table.add_column("part")
    for phase in phases:
        table.add_column(f"{phase}, MiB", justify="right")
    for name in dict.fromkeys(name for parts in phases.values() for name in parts):
        cells = (f"{parts[name] / 2**20:,.1f}" if name in parts else "" for parts in phases.values())
        table.add_row(name, *cells)
    table.add_row("together", *(f"{sum(parts.values()) / 2**20:,.1f}" for parts in phases.values()), style="bold")
    return table


def print_rows(console: Console, rows: Mapping[str, str]) -> None:
    """Print a table of names and values."""
    table = Table(show_header=False)
    for name, value in rows.items():
        table.add_row(name, value)
    console.print(table)


def count_text(value: int | None) -> str:
    """A count, or that it is unknown."""
    return "unknown" if value is None else f"{value:,}"
