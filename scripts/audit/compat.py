"""The modules that exist only for imports of verl 0.7.0, read from their docstrings: the table of docs/migrating.md."""

import ast
from pathlib import Path

MARK = "Compatibility with verl:"  # how the docstring of such a module begins
#: Modules of this kind at paths that verl does not have: names of earlier versions of this project.
OF_EARLIER_VERSIONS = (
    "verl.experimental.agent_loop.base", "verl.tools.code_tool", "verl.tools.function_tool",
    "verl.utils.dataset.spd_dataset", "verl.utils.reward_score.spd_scorer_reward",
    "verl.workers.rollout.spd_rollout",
)  # fmt: skip
#: Modules of this kind at paths of later releases of verl.
OF_LATER_RELEASES = (
    "verl.experimental.fully_async_policy", "verl.experimental.fully_async_policy.fully_async_main",
    "verl.experimental.one_step_off_policy", "verl.experimental.one_step_off_policy.main_ppo",
)  # fmt: skip


def is_compatibility(file: Path) -> bool:
    """Whether the module in this file exists only for imports of verl."""
    return file.read_text(encoding="utf-8").startswith(f'"""{MARK}')


def compatibility_modules(root: Path) -> dict[str, str]:
    """{module: first sentence of its docstring, without the mark} of verl/ below `root`, sorted."""
    modules = {}
    for file in sorted((root / "verl").rglob("*.py")):
        if is_compatibility(file):
            name = ".".join(file.relative_to(root).with_suffix("").parts).removesuffix(".__init__")
            text = ast.get_docstring(ast.parse(file.read_text(encoding="utf-8"))) or ""
            modules[name] = " ".join(text.removeprefix(MARK).partition("\n\n")[0].split())
    return modules


def table(root: Path) -> str:
    """The table in Markdown."""
    rows = [f"| {name} | {content[0].upper()}{content[1:]} |" for name, content in compatibility_modules(root).items()]
    return "\n".join(["| module for imports of verl alone | content |", "|---|---|", *rows]) + "\n"


def misplaced(root: Path, release: dict[str, str]) -> list[str]:
    """Errors: such modules at paths that neither a release of verl nor an earlier version of this project has."""
    theirs = {path.removesuffix(".py").replace("/", ".").removesuffix(".__init__") for path in release}
    known = theirs | {*OF_EARLIER_VERSIONS, *OF_LATER_RELEASES}
    return [
        f"{name} begins with {MARK!r}, and verl has no module of that name"
        for name in compatibility_modules(root)
        if name not in known
    ]
