"""`trainer.dry_run=true`: the plan of a run and everything that stands in its way, without starting it."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from omegaconf import DictConfig, OmegaConf
from rich.console import Console
from rich.markup import escape
from rich.syntax import Syntax
from rich.table import Table

from verl.trainer.dry_run_checks import Findings, look_around
from verl.utils.batch_arithmetic import BatchPlan, plan_batches
from verl.utils.config_check import find_problems
from verl.utils.memory_estimate import estimate_memory, measure_model
from verl.utils.problems import ABSENT, WRONG, Problem, wrong
from verl.utils.redact import redact_text, redacted_yaml

Check = Callable[[DictConfig], Iterable[Problem]]


def dry_run(config: DictConfig, *, extra_checks: Iterable[Check] = (), known: DictConfig | None = None) -> int:
    """Print config, plan and problems of an RL run; 1 if anything is wrong on every machine, else 0.

    `extra_checks` are a recipe's own, each config -> problems; `known` is the tree without overrides, composed here
    inside a Hydra application.
    """
    console = Console(soft_wrap=True)
    problems = find_problems(config, known=known)
    console.rule("Config")
    console.print(Syntax(redacted_yaml(config), "yaml", background_color="default"))
    found = Findings()
    removed = any("was removed" in p.message for p in problems)
    if not removed and not OmegaConf.missing_keys(config):
        found = look_around(config)
        problems += found.problems
        for check in extra_checks:
            problems += check(config)
        steps = _count_steps(config, found, problems)
        _print_plan(console, config, found, problems, steps)
    problems = list(dict.fromkeys(problems))
    _print_problems(console, problems)
    return 1 if any(p.kind == WRONG for p in problems) else 0


def _count_steps(config: DictConfig, found: Findings, problems: list[Problem]) -> tuple[int, int] | None:
    """(steps per epoch, steps in all); fewer prompts than one batch is a problem."""
    if found.train_prompts is None or not isinstance(config.data.gen_batch_size, int):
        return None
    batch = config.data.gen_batch_size
    per_epoch = found.train_prompts // batch
    if per_epoch == 0:
        problems.append(
            wrong(
                "data.train_batch_size",
                f"data.train_files has {found.train_prompts} prompts, which do not fill one batch of {batch}. "
                f"Set data.train_batch_size={found.train_prompts} or less.",
            )
        )
        return None
    return per_epoch, config.trainer.total_training_steps or per_epoch * config.trainer.total_epochs


def _print_plan(
    console: Console, config: DictConfig, found: Findings, problems: list[Problem], steps: tuple[int, int] | None
) -> None:
    console.rule("Plan")
    table = Table(show_header=False)
    table.add_row("prompts for training", _figure(found.train_prompts))
    table.add_row("prompts for validation", _figure(found.val_prompts))
    batch_is_sound = not any(p.kind == WRONG and "batch" in p.key or p.key.endswith((".n", "nnodes")) for p in problems)
    plan = plan_batches(OmegaConf.to_container(config, resolve=True)) if batch_is_sound else None
    if plan is not None:
        for name, value in _plan_rows(plan):
            table.add_row(name, value)
    table.add_row("steps per epoch", _figure(steps and steps[0]))
    table.add_row("steps in all", _figure(steps and steps[1]))
    console.print(table)
    if plan is not None and found.hf_config is not None:
        console.print(_memory_table(config, found, plan))
    else:
        console.print("No memory estimate: it needs the model's config and batch sizes without problems.")


def _plan_rows(plan: BatchPlan) -> list[tuple[str, str]]:
    return [
        ("ranks", str(plan.ranks)),
        ("prompts a step", f"{plan.prompts:,}"),
        ("samples a step", f"{plan.samples:,} ({plan.prompts:,} prompts x {plan.samples_per_prompt})"),
        ("samples a step and rank", f"{plan.samples_per_rank:,}"),
        ("mini-batches a step", f"{plan.mini_batches:,} of {plan.samples_per_mini_batch:,} samples"),
        ("samples a mini-batch and rank", f"{plan.samples_per_mini_batch_and_rank:,}"),
        (
            "micro-batches a mini-batch and rank",
            f"{plan.micro_batches_per_mini_batch:,} of {plan.micro_batch_size:,} samples",
        ),
        (
            "optimizer steps a step",
            f"{plan.optimizer_steps:,} ({plan.mini_batches:,} mini-batches x {plan.epochs_per_batch} epochs)",
        ),
    ]


def _memory_table(config: DictConfig, found: Findings, plan: BatchPlan) -> Table:
    size = measure_model(found.hf_config, config.actor_rollout_ref.model.lora_rank)
    plain = OmegaConf.to_container(config, resolve=True)
    parts = estimate_memory(size, plain, plan.ranks, plan.micro_batch_size, plan.samples_per_rank)
    table = Table(title=f"Memory of one rank, roughly ({size.parameters:,} parameters, {size.trainable:,} trained)")
    table.add_column("part")
    table.add_column("MiB", justify="right")
    loader = config.actor_rollout_ref.model.loader.name
    if loader != "auto":
        table.caption = f"The plain model; parts that loader {loader} adds or freezes are not seen here."
    for name, count in parts.items():
        table.add_row(name, f"{count / 2**20:,.1f}")
    return table


def _print_problems(console: Console, problems: list[Problem]) -> None:
    console.rule("Problems")
    titles = {WRONG: "Wrong on every machine", ABSENT: "Absent on this machine"}
    for kind, title in titles.items():
        of_kind = [p for p in problems if p.kind == kind]
        console.print(f"[bold]{title}: {len(of_kind)}[/bold]")
        for problem in of_kind:
            console.print(f"  - {escape(redact_text(problem.message))}", highlight=False)
    if not any(p.kind == WRONG for p in problems):
        console.print("Nothing is wrong with this config. Leave out trainer.dry_run=true to start it.")


def _figure(value: int | None) -> str:
    return "unknown" if value is None else f"{value:,}"
