"""Compares configuration keys with their defaults, and metric names, of an upstream release with ours."""

from __future__ import annotations

import ast
import re
from fnmatch import fnmatchcase
from pathlib import Path

import yaml
from hydra import compose, initialize_config_module
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

import verl.trainer.config
from scripts.audit.names import Finding
from scripts.audit.sources import flat, yaml_of
from verl.utils.metric.names import METRICS

CONFIG = "verl/trainer/config"
#: upstream's file -> our composed tree
TREES = {
    f"{CONFIG}/_generated_ppo_trainer.yaml": "ppo_trainer",
    f"{CONFIG}/sft_trainer.yaml": "sft_trainer",
    f"{CONFIG}/generation.yaml": "generation",
    f"{CONFIG}/evaluation.yaml": "evaluation",
}
FAMILIES = (
    "actor", "critic", "response_length", "response_length_non_aborted", "response", "prompt_length", "num_turns",
    "tool_call_counts", "global_seqlen", "training", "timing_s", "timing_per_token_ms", "perf", "rollout_corr",
    "val-core", "val-aux", "train", "val",
)  # fmt: skip
METRIC = re.compile(rf"(?:{'|'.join(FAMILIES)})/[\w@./()*\-]+")


def compare_keys(release: dict[str, str], file: str, tree: str) -> list[Finding]:
    """Keys of one tree: same default, another default, missing, ours alone."""
    theirs = flat(_resolved(OmegaConf.create(yaml_of(release, file))))
    theirs = {k: v for k, v in theirs.items() if not _machinery(k)}
    if not (Path(verl.trainer.config.__file__).parent / f"{tree}.yaml").is_file():
        return [Finding(tree, key, "missing", "no such tree") for key in theirs]
    with initialize_config_module("verl.trainer.config", version_base=None):
        ours = {k: v for k, v in flat(_resolved(compose(tree))).items() if not _machinery(k)}
    found = []
    for key, value in theirs.items():
        if key not in ours and not any(k.startswith(f"{key}.") for k in ours):
            found.append(Finding(tree, key, "missing", f"default {_shown(value)}"))
        elif key in ours and ours[key] != value:
            found.append(Finding(tree, key, "differs", f"default {_shown(value)}, ours {_shown(ours[key])}"))
        else:
            found.append(Finding(tree, key, "same"))
    alone = [k for k in ours if k not in theirs and not any(t.startswith(f"{k}.") for t in theirs)]
    return found + [Finding(tree, key, "ours alone", f"default {_shown(ours[key])}") for key in alone]


def _machinery(key: str) -> bool:
    return key.startswith(("hydra.", "defaults")) or key.endswith("_target_")


def _shown(value: object) -> str:
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
        found = OmegaConf.select(config, path)
    except OmegaConfBaseException:
        return value
    return OmegaConf.to_container(found) if OmegaConf.is_config(found) else found


def metric_names(text: str) -> set[str]:
    """Texts of a module that look like a metric's name; a part that is filled in is *."""
    found = set()
    tree = ast.parse(text)
    inside = {id(v) for node in ast.walk(tree) if isinstance(node, ast.JoinedStr) for v in node.values}
    for node in ast.walk(tree):
        if isinstance(node, ast.JoinedStr):
            found.add("".join(str(v.value) if isinstance(v, ast.Constant) else "*" for v in node.values))
        elif isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in inside:
            found.add(node.value)
    return {name for name in found if METRIC.fullmatch(name)}


def compare_metrics(release: dict[str, str]) -> list[Finding]:
    """Metric names in upstream's trainers, workers and utilities against those that our page lists."""
    theirs: set[str] = set()
    for path, text in release.items():
        if path.endswith(".py") and path.startswith(("verl/trainer/", "verl/workers/", "verl/utils/")):
            theirs |= metric_names(text)
    found, used = [], set()
    for name in sorted(theirs):
        covering = [p for p in METRICS if fnmatchcase(name, p) or fnmatchcase(p, name)]
        used.update(covering)
        found.append(Finding("metrics", name, "same" if covering else "missing"))
    return found + [Finding("metrics", name, "ours alone") for name in METRICS if name not in used]
