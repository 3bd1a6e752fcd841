"""`trainer.dry_run=true`: the plan of a run and everything that stands in its way, without starting it."""

from __future__ import annotations

from omegaconf import DictConfig, OmegaConf
from rich.console import Console
from rich.markup import escape
from rich.syntax import Syntax
from rich.table import Table

from verl.trainer.dry_run_checks import Findings, look_around
from verl.utils.batch_arithmetic import BatchPlan, plan_batches
from verl.utils.config_check import ARITHMETIC, find_problems
from verl.utils.config_effect import settings_without_effect
from verl.utils.memory_estimate import estimate_memory, measure_loaded
from verl.utils.problems import CHECKS, TITLES, WRONG, Problem
from verl.utils.redact import redact_text, redacted_yaml


def dry_run(config: DictConfig, *, known: DictConfig | None = None) -> int:
    """Print config, plan and problems of an RL run; 1 if anything is wrong on every machine, else 0.

    `known` is the tree without overrides, composed here inside a Hydra application. Recipes add checks of their own
    through `verl.utils.problems.register_check`.
    """
    console = Console(soft_wrap=True)
    problems = find_problems(config, known=known) + settings_without_effect(config)
    console.rule("Config")
    console.print(Syntax(redacted_yaml(config), "yaml", background_color="default"))
    if not any("was removed" in p.message for p in problems) and not OmegaConf.missing_keys(config):
        found = look_around(config)
        problems += found.problems
        for check in CHECKS:
            problems += check(config, found)
        _print_plan(console, config, found, problems)
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


def _count_steps(config: DictConfig, prompts: int | None) -> tuple[int | None, int | None]:
    """(steps per epoch, steps in all), None where unknown or where the prompts do not fill one batch."""
    batch = config.data.gen_batch_size
    if prompts is None or not isinstance(batch, int) or not 1 <= batch <= prompts:
        return None, None
    per_epoch = prompts // batch
    return per_epoch, config.trainer.total_training_steps or per_epoch * config.trainer.total_epochs


def _print_plan(console: Console, config: DictConfig, found: Findings, problems: list[Problem]) -> None:
    console.rule("Plan")
    per_epoch, steps = _count_steps(config, found.train_prompts)
    sound = not any(p.kind == WRONG and p.key.rpartition(".")[2] in ARITHMETIC for p in problems)
    plan = plan_batches(OmegaConf.to_container(config, resolve=True)) if sound else None
    table = Table(show_header=False)
    for name, value in (
        ("prompts for training", _figure(found.train_prompts)),
        ("prompts for validation", _figure(found.val_prompts)),
        *(plan.rows().items() if plan else ()),
        ("steps per epoch", _figure(per_epoch)),
        ("steps in all", _figure(steps)),
    ):
        table.add_row(name, value)
    console.print(table)
    if plan is not None and found.hf_config is not None:
        console.print(_memory_table(config, found, plan))
    else:
        console.print("No memory estimate: it needs the model's config and batch sizes without problems.")


def _memory_table(config: DictConfig, found: Findings, plan: BatchPlan) -> Table:
    plain = OmegaConf.to_container(config, resolve=True)
    size, exact = measure_loaded(found.hf_config, plain)
    parts = estimate_memory(size, plain, plan.ranks, plan.micro_batch_size, plan.samples_per_rank)
    table = Table(title=f"Memory of one rank, roughly ({size.parameters:,} parameters, {size.trainable:,} trained)")
    table.add_column("part")
    table.add_column("MiB", justify="right")
    if not exact:
        loader = config.actor_rollout_ref.model.loader.name
        table.caption = f"The plain model; parts that loader {loader} adds or freezes are not seen here."
    for name, count in parts.items():
        table.add_row(name, f"{count / 2**20:,.1f}")
    return table


def _figure(value: int | None) -> str:
    return "unknown" if value is None else f"{value:,}"
