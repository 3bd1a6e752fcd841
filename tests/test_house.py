"""Rules of the tree: imports go down the floors, files stay short, documented commands are real."""

import ast
import contextlib
import functools
import importlib.util
import io
import os
import re
import runpy
import subprocess
import sys
from graphlib import TopologicalSorter
from pathlib import Path

import pytest
from hydra.core.override_parser.overrides_parser import OverridesParser
from omegaconf import OmegaConf

from scripts.audit.compat import is_compatibility
from scripts.audit.keys import OURS
from tests.helpers.configs import compose_ppo
from tests.helpers.documents import SETTINGS, commands, is_later_name, program_of, tracked

ROOT = Path(__file__).resolve().parents[1]
PRODUCT = ("verl", "recipe", "dllm_reasoning")
#: Every package and top-level module from the lowest layer to the highest: imports go to lower ones or stay inside.
LAYERS = (
    "verl.utils", "verl.config", "verl.protocol", "verl.algos", "verl.models", "verl.data", "verl.reward",
    "verl.profiling", "verl.training", "verl.single_controller", "verl.rollout", "verl.agents", "verl.roles",
    "verl.planning", "verl.report", "verl.trainer", "verl.model_merger", "recipe.dapo", "dllm_reasoning",
    "recipe.spd", "spd_scorer", "train_spd_scorer",
)  # fmt: skip
WITHOUT_RAY = LAYERS[: LAYERS.index("verl.single_controller")]
ROOTS = ("verl", "recipe", "setup")  # files that belong to no layer: __init__.py and setup.py
TOOLS = ("scripts", "examples", "benchmarks")


def product_files():
    return [f for f in tracked("*.py") if f.relative_to(ROOT).parts[0] in PRODUCT or f.parent == ROOT]


def module_of(file):
    return ".".join(file.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")


def package_of(module):
    return ".".join(module.split(".")[: 2 if module.split(".")[0] in ("verl", "recipe") else 1])


def live_files():
    """{module: file} of what is not there for imports of verl's users alone."""
    files = {module_of(file): file for file in product_files()}
    return {module: file for module, file in files.items() if not is_compatibility(file)}


def imports_of(file):
    """(line, dotted name) of every import of a file, relative ones spelt out."""
    module = module_of(file)
    package = module.split(".") if file.name == "__init__.py" else module.split(".")[:-1]
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            above = package[: len(package) - node.level + 1] if node.level else []
            base = ".".join([*above, *([node.module] if node.module else [])])
            yield from ((node.lineno, f"{base}.{alias.name}") for alias in node.names)


def test_imports_go_to_lower_layers_and_never_to_compatibility_modules():
    modules, live, wrong, seen = {module_of(file) for file in product_files()}, live_files(), [], 0
    assert {package_of(module) for module in live} == {*LAYERS, *ROOTS}
    assert len(modules - live.keys()) > 10
    tools = [file for file in tracked("*.py") if file.relative_to(ROOT).parts[0] in TOOLS]
    live_tools = {module_of(file): file for file in tools}
    for module, file in (live | live_tools).items():
        for line, name in imports_of(file):
            while name and name not in modules:
                name = name.rpartition(".")[0]
            layers = [LAYERS.index(package_of(m)) for m in (module, name) if package_of(m) in LAYERS]
            seen += len(layers) == 2
            if name and name not in live or len(layers) == 2 and layers[0] < layers[1]:
                wrong.append(f"{file.relative_to(ROOT)}:{line} imports {name}")
    assert seen > 1000 and not wrong


def test_verl_names_no_module_of_a_recipe():
    name = re.compile(r"""["'](recipe\.\w+|dllm_reasoning)\b[\w.]*["']""")
    files = [file for module, file in live_files().items() if module.startswith("verl.")]
    assert not [f"{file.relative_to(ROOT)}: {m.group()}" for file in files for m in name.finditer(file.read_text())]
    assert name.search('_REGISTRY["spd"] = "recipe.spd.rollout.SPDRollout"')


def imports_at_load(file, modules):
    """Product modules that a module imports when it is loaded: not inside functions, not for type checkers only."""

    def statements(body):
        for node in body:
            if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.dump(node.test):
                continue
            yield node
            yield from statements([*getattr(node, "body", []), *getattr(node, "orelse", [])]
                                  if isinstance(node, ast.If | ast.Try) else [])  # fmt: skip

    for node in statements(ast.parse(file.read_text()).body):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names if alias.name in modules)
        elif isinstance(node, ast.ImportFrom) and node.level == 0:
            for alias in node.names:
                name = f"{node.module}.{alias.name}"
                yield from (m for m in [name if name in modules else node.module] if m in modules)


def test_no_modules_import_each_other_when_they_are_loaded():
    files = {module_of(file): file for file in product_files()}
    graph = {module: set(imports_at_load(file, files)) - {module} for module, file in files.items()}
    assert sum(map(len, graph.values())) > 500
    assert len([*TopologicalSorter(graph).static_order()]) == len(graph)  # else CycleError, which names the circle


def test_no_file_is_longer_than_500_lines():
    long = [f"{f.relative_to(ROOT)}: {n}" for f in tracked("*.py") if (n := f.read_text().count("\n")) > 500]
    assert not long


def test_no_file_names_a_path_of_one_machine():
    place = re.compile(r"""["'\s=(]/(work|farm|root|home/\w+)/""")
    files = [f for f in tracked("*.py", "*.sh", "*.md", "*.yaml", "*.toml", "*.txt", "Makefile") if f != Path(__file__)]
    named = [f"{f.relative_to(ROOT)}: {m.group().strip()}" for f in files for m in place.finditer(f.read_text())]
    assert not named


@pytest.mark.process
def test_layers_below_the_single_controller_need_no_ray_and_no_process_group():
    """In one fresh process: all of their modules are imported, and neither Ray nor vLLM came with them."""
    modules = [m for m in live_files() if package_of(m) in WITHOUT_RAY and not m.endswith("__main__")]
    assert len(modules) > 100
    code = (
        "import importlib, sys\n"
        f"for name in {modules!r}:\n    importlib.import_module(name)\n"
        "import torch.distributed as dist\n"
        "assert not dist.is_initialized()\n"
        "print([m for m in ('ray', 'vllm') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert done.stdout.strip().endswith("[]"), done.stdout + done.stderr[-2000:]


# Documented commands: options and settings are parsed, nothing is started.
MAKE = set(re.findall(r"^([a-z0-9\-]+):", (ROOT / "Makefile").read_text(), re.M))


@functools.cache
def parser_options(target, *operation):
    """The options that a script or module, or one of its operations, lists in its help."""
    output = io.StringIO()
    argv, sys.argv = sys.argv, [target, *operation, "--help"]
    try:
        with contextlib.redirect_stdout(output), pytest.raises(SystemExit) as ended:
            if target.endswith(".py"):
                runpy.run_path(str(ROOT / target), run_name="__main__")
            else:
                runpy.run_module(target, run_name="__main__")
    finally:
        sys.argv = argv
    assert ended.value.code in (0, None)
    return set(re.findall(r"(?<![\w-])--[\w-]+", output.getvalue()))


HYDRA = [target for target in SETTINGS if not target.endswith(".py")]  # entries without options of their own
#: shell script -> the programs that its options and key=value words go to
SCRIPTS = {
    "dllm_reasoning/scripts/run_train.sh": ("dllm_reasoning.train_iterative_refine",),
    "recipe/dapo/run_dapo_qwen2.5_32b.sh": ("recipe.dapo.main_dapo",),
    "examples/scripts/rloo.sh": ("verl.trainer.main_ppo",),
}


@functools.cache
def settings_of(tree):
    """A composed tree."""
    return compose_ppo(config_dir=ROOT / OURS[tree].replace(".", "/"), config_name=tree)


def unknown_settings(target, settings):
    """Keys of key=value words that the target's tree has not, unless they are added (+)."""
    config, unknown = settings_of(SETTINGS[target]) if target in SETTINGS else OmegaConf.create(), []
    for override in OverridesParser.create().parse_overrides(settings):
        if target == "verl.trainer.main_ppo" and is_later_name(override.key_or_group):
            continue
        section, _, name = override.key_or_group.rpartition(".")
        parent = OmegaConf.select(config, section) if section else config
        # An empty section, such as reward_kwargs, takes any key.
        if not OmegaConf.is_dict(parent) or not (override.is_add() or (section and not parent) or name in list(parent)):
            unknown.append(override.key_or_group)
    return unknown


def unknown_words(targets, words):
    """Options and settings in `words` that none of the programs knows."""
    entries = [target for target in targets if target in SETTINGS]
    settings = [w for w in words if re.match(r"\+{0,2}[\w.@/]+=", w)]
    unknown = unknown_settings(entries[0] if entries else targets[0], settings)
    operation = [w for w in words[:1] if w.isalpha() and w.islower()]
    known = set().union(*(parser_options(target, *operation) for target in targets if target not in HYDRA))
    return unknown + [w for w in words if w.startswith("--") and w.split("=")[0] not in known]


@pytest.mark.parametrize(("page", "words"), commands(), ids=lambda v: v if isinstance(v, str) else None)
def test_a_documented_command_is_real(page, words):
    program, script = words[0], words[1] if words[0] == "bash" else words[0]
    if program == "make":
        assert words[1] in MAKE
    elif program in ("python", "torchrun", "python3"):
        target, rest = program_of(words)
        if target.startswith("vllm."):
            assert importlib.util.find_spec("vllm") is not None
        else:
            assert unknown_words([target], rest) == [], f"{page}: {target}"
    elif script.endswith(".sh"):
        assert os.access(ROOT / script, os.R_OK if program == "bash" else os.X_OK), f"{page}: {script} cannot be run"
        rest = words[words.index(script) + 1 :]
        assert not rest or unknown_words(SCRIPTS[script], rest) == [], f"{page}: {script}"
    else:
        assert program in ("pip", "ray", "git", "export", "cd", "hf", "curl", "umask"), f"{page}: what is {program}?"


@pytest.mark.parametrize(
    ("target", "words", "unknown"),
    [
        ("train_spd_scorer.py", "--patience 1 spd.seed=1 --step 3 spd.sed=1", ["spd.sed", "--step"]),
        ("dllm_reasoning/scripts/run_train.sh", "4 D iterative.noise_min=0 iterative.noise=0", ["iterative.noise"]),
        ("recipe.dapo.main_dapo", "algorithm.filter_groups.enable=true data.gen_batch=3", ["data.gen_batch"]),
        ("verl.trainer.main_ppo", "+data.x=1 ++nowhere.x=1 trainer.logger.x=1", ["nowhere.x", "trainer.logger.x"]),
        ("verl.trainer.main_ppo", "--dry-run data.train_files=x", ["--dry-run"]),
        ("verl.model_merger", "merge --backend fsdp --local_dirs D a=1", ["a", "--local_dirs"]),
    ],
)  # fmt: skip
def test_a_command_that_is_not_real_is_reported(target, words, unknown):
    assert unknown_words(SCRIPTS.get(target, [target]), words.split()) == unknown


# What the pages name in running text: options of the programs below, keys of any tree.
INLINE = re.compile(r"`([^`]+)`")
PROGRAMS = (
    "train_spd_scorer.py", "scripts/eval_spd_scorer.py", "scripts/spd_decode.py",
    "examples.spd_arithmetic.prepare_blocks", "examples.pretrained.spd.demo",
)  # fmt: skip


def test_options_and_settings_between_the_lines_are_real():
    guides = "spd quickstart sft resume_export_serve extending algorithms plugins scorers rewards".split()
    blocks, read = re.compile(r"^```.*?^```", re.S | re.M), ["README.md", *(f"docs/{name}.md" for name in guides)]
    texts = [blocks.sub("", (ROOT / page).read_text()) for page in read]
    pieces = [piece for text in texts for piece in INLINE.findall(text)]
    options = {w for p in pieces if p.startswith("--") for w in p.split() if w.startswith("--")}
    settings = {w for p in pieces for w in p.split() if re.match(r"[a-z_]+(\.[a-z_]+)+=", w)}
    known = set().union(*map(parser_options, PROGRAMS))
    assert len(options) > 5 and options <= known, options - known
    lost = {s for s in settings if all(unknown_settings(target, [s]) for target in SETTINGS)}
    assert len(settings) > 3 and not lost


def test_the_readme_is_short_and_its_links_lead_somewhere():
    text = (ROOT / "README.md").read_text()
    links = [link for link in re.findall(r"\]\(([^)]+)\)", text) if not link.startswith("http")]
    assert text.count("\n") <= 90 and len(links) > 15
    assert [link for link in links if not (ROOT / link.partition("#")[0]).exists()] == []
