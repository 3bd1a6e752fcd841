"""Compares configuration keys with their defaults, and metric names, of an upstream release with ours."""

import ast
import functools
import re
from fnmatch import fnmatchcase

import yaml
from hydra import compose, initialize_config_module
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from scripts.audit.names import Finding
from scripts.audit.sources import flat, yaml_of
from verl.config import aliases
from verl.report.metric_names import all_metrics

CONFIG = "verl/trainer/config"
#: upstream's file -> our composed tree
TREES = {
    f"{CONFIG}/_generated_ppo_trainer.yaml": "ppo_trainer",
    f"{CONFIG}/sft_trainer.yaml": "sft_trainer",
    f"{CONFIG}/sft_trainer_engine.yaml": "sft_trainer_engine",
    f"{CONFIG}/generation.yaml": "generation",
    f"{CONFIG}/evaluation.yaml": "evaluation",
}
#: composed tree of ours -> the module of its yaml files
OURS = {
    **dict.fromkeys(TREES.values(), "verl.trainer.config"), "dapo_trainer": "recipe.dapo.config",
    "fully_async_ppo_trainer": "verl.trainer.config",
    "one_step_off_ppo_trainer": "verl.trainer.config", "spd_trainer": "recipe.spd.config",
    "iterative_refine": "dllm_reasoning.config",
}  # fmt: skip
FAMILIES = (
    "actor", "critic", "response_length", "response_length_non_aborted", "response", "prompt_length", "num_turns",
    "tool_call_counts", "global_seqlen", "training", "timing_s", "timing_per_token_ms", "perf", "rollout_corr",
    "val-core", "val-aux", "train", "val",
)  # fmt: skip
METRIC = re.compile(rf"(?:{'|'.join(FAMILIES)})/[\w@./()*\-]+")


def compare_trees(theirs: dict[str, object], tree: str) -> list[Finding]:
    """Keys of one tree: same default, another default, another name, missing, ours alone."""
    ours, findings = our_keys(tree), []
    for key, value in theirs.items():
        if key not in ours and (name := renamed(key, tree)) is not None:
            findings.append(Finding(tree, key, "renamed", name))
        elif key not in ours:
            findings.append(Finding(tree, key, "missing", f"default {shown(value)}"))
        elif not _equal(value, ours[key]):
            findings.append(Finding(tree, key, "differs", f"default {shown(value)}, ours {shown(ours[key])}"))
        else:
            findings.append(Finding(tree, key, "same"))
    own = [Finding(tree, k, "ours alone", f"default {shown(v)}") for k, v in ours.items() if k not in theirs]
    return findings + own


def renamed(key: str, tree: str) -> str | None:
    """What a key that `verl.config.aliases` accepts is here ("no effect" without a counterpart); None for others."""
    for alias in aliases.SFT if tree.startswith("sft") else aliases.RL:
        if key == alias.old or key.startswith(f"{alias.old}."):
            return alias.new or "accepted"
    return None


def upstream_keys(release: dict[str, str], file: str) -> dict[str, object]:
    """{key: default} of a tree of the release."""
    return _plain_keys(yaml_of(release, file))


@functools.cache
def our_keys(tree: str) -> dict[str, object]:
    """{key: default} of a composed tree of ours."""
    with initialize_config_module(OURS[tree], version_base=None):
        return _plain_keys(compose(tree))


def _plain_keys(config: DictConfig) -> dict[str, object]:
    machinery = ("hydra.", "defaults")
    keys = flat(_resolved(config))
    return {k: v for k, v in keys.items() if not k.startswith(machinery) and not k.endswith("_target_")}


def _equal(theirs: object, ours: object) -> bool:
    """Numbers as numbers (1 is 1.0), but true is not 1."""
    return theirs == ours and isinstance(theirs, bool) == isinstance(ours, bool)


def shown(value: object) -> str:
    """A value as yaml writes it on one line."""
    return yaml.safe_dump(value, default_flow_style=True).removesuffix("...\n").strip()


def _resolved(config: DictConfig) -> dict:
    """Plain values; an interpolation that points outside of the tree stays as its text."""
    try:
        return OmegaConf.to_container(config, resolve=True, throw_on_missing=False)
    except OmegaConfBaseException:
        plain = OmegaConf.to_container(config, resolve=False)
        return {k: _resolved_leaf(config, k, v) for k, v in plain.items()}


def _resolved_leaf(config: DictConfig, path: str, value: object) -> object:
    if isinstance(value, dict):
        return {k: _resolved_leaf(config, f"{path}.{k}", v) for k, v in value.items()}
    try:
        findings = OmegaConf.select(config, path)
    except OmegaConfBaseException:
        return value
    return OmegaConf.to_container(findings) if OmegaConf.is_config(findings) else findings


def metric_names(text: str) -> set[str]:
    """Texts of a module that look like a metric's name; a part that is filled in is *."""
    findings = set()
    tree = ast.parse(text)
    inside = {id(v) for node in ast.walk(tree) if isinstance(node, ast.JoinedStr) for v in node.values}
    for node in ast.walk(tree):
        if isinstance(node, ast.JoinedStr):
            findings.add("".join(str(v.value) if isinstance(v, ast.Constant) else "*" for v in node.values))
        elif isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in inside:
            findings.add(node.value)
    return {name for name in findings if METRIC.fullmatch(name)}


def metrics_of(release: dict[str, str]) -> set[str]:
    """Metric names in upstream's trainers, workers and utilities."""
    theirs: set[str] = set()
    for path, text in release.items():
        if path.endswith(".py") and path.startswith(("verl/trainer/", "verl/workers/", "verl/utils/")):
            theirs |= metric_names(text)
    return theirs


def compare_metric_names(theirs: set[str]) -> list[Finding]:
    """Metric names of a release against those that our page lists."""
    findings, used, ours = [], set(), all_metrics()
    for name in sorted(theirs):
        covering = [p for p in ours if fnmatchcase(name, p) or fnmatchcase(p, name)]
        used.update(covering)
        findings.append(Finding("metrics", name, "same" if covering else "missing"))
    return findings + [Finding("metrics", name, "ours alone") for name in ours if name not in used]
