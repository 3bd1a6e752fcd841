"""The import paths of verl that `verl.compat` serves: the table of docs/verl_names.md, and a check of their names."""

import importlib
from pathlib import Path

from scripts.audit.page import table_of

paths = importlib.import_module("verl.compat.table")

MARK = "Compatibility with verl:"  # how the docstring of a module with code for such paths begins
#: Old paths that verl does not have: names of earlier versions of this project.
OF_EARLIER_VERSIONS = (
    "verl.checkpoint", "verl.environments", "verl.experimental.agent_loop.base", "verl.reward.managers.registry",
    "verl.tools.function_tool",
    "verl.utils.dataset.spd_dataset", "verl.utils.metric.validation", "verl.utils.reward_score.spd_scorer_reward",
    "verl.workers.policy", "verl.workers.roles", "verl.workers.rollout.agent_loop", "verl.workers.rollout.gateway",
    "verl.workers.rollout.interactions", "verl.workers.rollout.spd_rollout", "verl.workers.rollout.tools",
)  # fmt: skip
#: Old paths of later releases of verl.
OF_LATER_RELEASES = (
    "verl.experimental.fully_async_policy", "verl.experimental.fully_async_policy.fully_async_main",
    "verl.experimental.one_step_off_policy", "verl.experimental.one_step_off_policy.main_ppo",
    "recipe.fully_async_policy", "recipe.fully_async_policy.fully_async_main", "recipe.one_step_off_policy",
    "recipe.one_step_off_policy.main_ppo",
)  # fmt: skip


def is_compatibility(file: Path) -> bool:
    """Whether the module in this file exists only for imports of verl."""
    return file.read_text(encoding="utf-8").startswith(f'"""{MARK}')


def rows() -> dict[str, str]:
    """{old path: the live modules that it stands for}, sorted."""
    found = {**paths.MODULES, **{old: f"{new}, with all its modules" for old, new in paths.PACKAGES.items()}}
    for old, sources in paths.NAMES.items():
        found[old] = ", ".join(dict.fromkeys(source.partition(":")[0] for source in sources)) or "(a package)"
    return dict(sorted(found.items()))


def table() -> str:
    """The table in Markdown."""
    return table_of(("import path of verl", "here"), rows().items()) + "\n"


def misplaced(release: dict[str, str]) -> list[str]:
    """Errors: old paths that neither a release of verl nor an earlier version of this project has."""
    theirs = {path.removesuffix(".py").replace("/", ".").removesuffix(".__init__") for path in release}
    theirs |= {".".join(name.split(".")[:n]) for name in theirs for n in range(1, name.count(".") + 1)}
    known = theirs | {*OF_EARLIER_VERSIONS, *OF_LATER_RELEASES}
    return [f"verl.compat.table has {old}, and verl has no module of that name" for old in rows() if old not in known]
