"""`trainer.dry_run=true`: the plan of a run and everything that stands in its way, without starting it."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from omegaconf import DictConfig, OmegaConf
from rich.console import Console
from rich.markup import escape
from rich.syntax import Syntax
from rich.table import Table

from verl.planning.batch_arithmetic import BatchPlan, plan_batches, steps_in_all
from verl.planning.config_check import ARITHMETIC, find_problems
from verl.planning.config_effect import settings_without_effect
from verl.planning.memory_estimate import ModelSize, estimate_memory, measure_loaded
from verl.planning.problems import CHECKS, TITLES, WRONG, Problem
from verl.trainer.dry_run_checks import Findings, look_around
from verl.utils.redact import redact_text, redacted_yaml


def dry_run(config: DictConfig, *, known: DictConfig | None = None) -> int:
    """Print config, plan and problems of an RL run; 1 if anything is wrong on every machine, else 0.

    `known` is the tree without overrides, composed here inside a Hydra application. Recipes add checks of their own
    through `verl.planning.problems.register_check`.
    """

    def look(console: Console, problems: list[Problem]) -> None:
        found = look_around(config)
        problems += found.problems
        for check in CHECKS:
            problems += check(config, found)
        _print_plan(console, config, found, problems)

    return present(config, find_problems(config, known=known) + settings_without_effect(config), look)


def present(config: DictConfig, problems: list[Problem], look: Callable[[Console, list[Problem]], None]) -> int:
    """Print a config, its plan and its problems; the exit code.

    `look` prints the plan and adds to the problems; it is left out where the config lacks keys or values.
    """
    console = Console(soft_wrap=True)
    console.rule("Config")
    console.print(Syntax(redacted_yaml(config), "yaml", background_color="default"))
    if not any("was removed" in p.message for p in problems) and not OmegaConf.missing_keys(config):
        look(console, problems)
    problems = list(dict.fromkeys(problems))
    console.rule("Problems")
    for kind, title in TITLES.items():
        of_kind = [p for p in problems if p.kind == kind]
        console.print(f"[bold]{title}: {len(of_kind)}[/bold]")
        for problem in of_kind:
            console.print(f"  - {escape(redact_text(problem.message))}", highlight=False)
    if any(p.kind == WRONG for p in problems):
        return 1
    console.print("Nothing is wrong with this config. Leave out trainer.dry_run=true to start it.")
    return 0


def unless_wrong(
    problems: list[Problem], look: Callable[[Console, list[Problem]], None]
) -> Callable[[Console, list[Problem]], None]:
    """`look` for `present`, or a line that there is no plan, where the config itself has problems."""
    if any(p.kind == WRONG for p in problems):
        return lambda console, _: console.print("No plan: the config itself has problems.")
    return look


def _count_steps(config: DictConfig, prompts: int | None) -> tuple[int | None, int | None]:
    """(steps per epoch, steps in all), None where unknown or where the prompts do not fill one batch."""
    drawn, wanted = config.data.gen_batch_size, config.data.train_batch_size
    sound = isinstance(drawn, int) and isinstance(wanted, int)
    if prompts is None or not sound or not 1 <= drawn <= prompts:
        return None, None
    steps = config.trainer.total_training_steps or steps_in_all(prompts // drawn, config)
    return prompts // max(drawn, wanted), steps


def _print_plan(console: Console, config: DictConfig, found: Findings, problems: list[Problem]) -> None:
    console.rule("Plan")
    per_epoch, steps = _count_steps(config, found.train_prompts)
    sound = not any(p.kind == WRONG and p.key.rpartition(".")[2] in ARITHMETIC for p in problems)
    plan = plan_batches(OmegaConf.to_container(config, resolve=True)) if sound else None
    print_rows(
        console,
        {
            "prompts for training": figure(found.train_prompts),
            "prompts for validation": figure(found.val_prompts),
            **(plan.rows() if plan else {}),
            "steps per epoch": figure(per_epoch),
            "steps in all": figure(steps),
        },
    )
    if plan is not None and found.hf_config is not None:
        console.print(_memory_table(config, found, plan))
    else:
        console.print("No memory estimate: it needs the model's config and batch sizes without problems.")


def _memory_table(config: DictConfig, found: Findings, plan: BatchPlan) -> Table:
    plain = OmegaConf.to_container(config, resolve=True)
    size, exact = measure_loaded(found.hf_config, plain)
    parts = estimate_memory(size, plain, plan.ranks, plan.micro_batch_size, plan.samples_per_rank)
    table = memory_table(size, parts)
    if not exact:
        loader = config.actor_rollout_ref.model.loader.name
        table.caption = f"The plain model; parts that loader {loader} adds or freezes are not seen here."
    return table


def memory_table(size: ModelSize, parts: Mapping[str, int]) -> Table:
    """The parts of one rank's memory, given in bytes."""
    table = Table(title=f"Memory of one rank, roughly ({size.parameters:,} parameters, {size.trainable:,} trained)")
    table.add_column("part")
    table.add_column("MiB", justify="right")
    for name, count in parts.items():
        table.add_row(name, f"{count / 2**20:,.1f}")
    return table


def print_rows(console: Console, rows: Mapping[str, str]) -> None:
    """A table of name and figure."""
    table = Table(show_header=False)
    for name, value in rows.items():
        table.add_row(name, value)
    console.print(table)


def figure(value: int | None) -> str:
    """A count, or that it is unknown."""
    return "unknown" if value is None else f"{value:,}"
