"""Names of settings in later versions of verl, listed in old_keys.yaml, become those of this project when a config is
composed. A resolved config then has one name for each setting.
"""

import copy
import json
import sys
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from loguru import logger
from omegaconf import DictConfig, OmegaConf, open_dict

from verl.config.asynchronous import AsyncTrainingConfig, RolloutPoolConfig
from verl.config.compose import leaves, to_plain
from verl.config.inert import OLD_KEYS
from verl.config.ppo import PPOConfig
from verl.utils.problems import ConfigError, Problem, wrong

ABSENT = object()
_PLAIN = (str, bool, int, float, type(None))
MODE = "trainer.v1.trainer_mode"
_MODEL, _ACTOR, _ROLLOUT = (f"actor_rollout_ref.{name}" for name in ("model", "actor", "rollout"))


@dataclass(frozen=True)
class Alias:
    """A row of old_keys.yaml (see its header): `old`, a key or section of verl since `since`, is `new` here."""

    old: str
    since: str
    new: str = ""
    note: str = ""
    no_effect: str = ""
    values: Mapping[Any, Any] = field(default_factory=dict)
    accepts: Sequence[Any] | None = None
    otherwise: str = ""

    @property
    def text(self) -> str:
        """The mapping in the words of docs/verl_names.md."""
        if self.no_effect:
            return f"accepted without effect: {self.no_effect}"
        if self.accepts is None or self.note:
            return self.note or "the same value"
        shown = " or ".join("null" if value is None else str(value).lower() for value in self.accepts)
        return f"{shown or 'nothing'} is accepted; otherwise: {self.otherwise}"

    @property
    def is_schedule(self) -> bool:
        """Whether the value is a schedule of torch.profiler, which becomes a range of updates."""
        return self.old.endswith(".torch.schedule")

    def changes(self, value: Any) -> bool:
        """Whether a value (ABSENT: none) is replaced; where both names are the same, only keys of `values` are."""
        return value is not ABSENT and (self.old != self.new or (isinstance(value, _PLAIN) and value in self.values))

    def settings(self, value: Any) -> Mapping[str, Any]:
        """{key: value} of a value that is no section. Raises ValueError for a value that has no counterpart."""
        if self.accepts is not None and value not in self.accepts:
            raise ValueError(self.otherwise)
        if not self.new:
            return {}
        if self.is_schedule:
            return _recorded(self.new.rpartition(".")[0], value)
        if self.values and isinstance(value, _PLAIN):
            return {self.new: self.values.get(value, self.values.get("*", value))}
        return {self.new: value}


def _recorded(torch: str, schedule: Mapping[str, int]) -> dict[str, Any]:
    """The range of updates that a schedule of torch.profiler records, as keys of the section `torch`."""
    counts = {"skip_first": 0, "wait": 0, "warmup": 0, "active": 0, "repeat": 0, **schedule}
    if counts["repeat"] > 1:
        raise ValueError("one range of updates is recorded in each profiled step. Set repeat to 0 or 1.")
    start = counts["skip_first"] + counts["wait"] + counts["warmup"]
    return {f"{torch}.step_start": start, f"{torch}.step_end": start + counts["active"] if counts["active"] else None}


RL, SFT = ([Alias(old, **row) for old, row in OLD_KEYS[tree].items()] for tree in ("RL", "SFT"))

#: Sections that this project does not have; what is left in them is refused.
SECTIONS = {
    "RL": ("reward", "skip", "distillation", "trainer.v1", "critic.fsdp", f"{_ROLLOUT}.checkpoint_engine",
           "model_engine", f"{_MODEL}.lora", "critic.model.lora"),
    "SFT": ("engine", "checkpoint", "profiler"),
}  # fmt: skip


def with_current_names(config: DictConfig, given: Collection[str] = ()) -> DictConfig:
    """The config with the names of this project; itself where it has no other. `given`: keys that the user sets.

    Raises ConfigError where a value has no counterpart here, or both names are given with different values.
    """
    rl = "actor_rollout_ref" in config
    table, sections = (RL, SECTIONS["RL"]) if rl else (SFT, SECTIONS["SFT"])
    if not rl and not {"model", "optim"} <= config.keys():
        return config
    if _select(config, MODE) == "separate_async":
        config = _with_separate_ranks(config)
    present = [alias for alias in table if alias.changes(_select(config, alias.old))]
    if not present and all(_select(config, section) is ABSENT for section in sections):
        return config
    renaming = _Renaming(copy.deepcopy(config), given, PPOConfig() if rl else {})
    with open_dict(renaming.config):
        for alias in present:
            renaming.apply(alias)
        for section in sections:
            renaming.refuse_rest_of(section)
    if renaming.problems:
        raise ConfigError(renaming.problems)
    return renaming.config


class _Renaming:
    """Moves the values of old names within `config`, and collects the problems of those that cannot be moved.

    `given`: keys that the user sets; `defaults`: the tree of defaults, where other values are the user's as well.
    """

    def __init__(self, config: DictConfig, given: Collection[str], defaults: Mapping[str, Any]) -> None:
        self.config, self.given, self.defaults = config, given, defaults
        self.problems: list[Problem] = []
        self._sources: dict[str, tuple[str, Any]] = {}  # current name -> the old name that set it, and the value

    def apply(self, alias: Alias) -> None:
        """Remove the old name, and set the current ones to what it means."""
        value = _take(self.config, alias.old)
        if alias.no_effect:
            logger.info("{}={} of verl {} is {}", alias.old, text(value), alias.since, alias.text)
        if alias.new and isinstance(value, Mapping) and not alias.is_schedule:  # a section that is renamed as a whole
            for name, below in _settings_in(value):
                self._move(f"{alias.old}.{name}", f"{alias.new}.{name}", below)
            return
        try:
            settings = alias.settings(value)
        except ValueError as e:
            self.problems.append(wrong(alias.old, f"{alias.old}={text(value)}: {e}"))
            return
        for new, wanted in settings.items():
            self._move(alias.old, new, wanted)

    def refuse_rest_of(self, section: str) -> None:
        """Remove a section, with a problem for each setting that is left in it."""
        if _select(self.config, section) is not ABSENT:
            for name, _ in _settings_in({section: _take(self.config, section)}):
                text = f"{name} has no counterpart here: check its spelling, or leave it out."
                self.problems.append(wrong(name, text))

    def _move(self, old: str, new: str, value: Any) -> None:
        if other := self._other_value(old, new, value):
            self.problems.append(wrong(new, f"{old}={text(value)} and {other} are one setting. Give one."))
        self._sources[new] = (old, value)
        OmegaConf.update(self.config, new, value, force_add=True)

    def _other_value(self, old: str, new: str, wanted: Any) -> str:
        """`name=value` of another name by which the user sets `new`, to another value; else empty."""
        if new in self._sources:
            other, value = self._sources[new]
            return f"{other}={text(value)}" if value != wanted else ""
        value, default = _select(self.config, new), _select(self.defaults, new)
        if value is ABSENT or value == wanted or new == old or str(value).startswith("${"):
            return ""
        is_set = new in self.given or (default is not ABSENT and value != default)
        return f"{new}={text(value)}" if is_set else ""


def _settings_in(section: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """(dotted key, value) of the settings in a section."""
    return ((name, value) for name, value in leaves(section) if value != {} and not name.endswith("_target_"))


def _with_separate_ranks(config: DictConfig) -> DictConfig:
    """The config of trainer.v1.trainer_mode=separate_async as one of fully_async_ppo_trainer."""
    config = copy.deepcopy(config)
    training = to_plain(AsyncTrainingConfig(staleness_threshold=1.0, stale_samples="drop", max_staleness=8))
    given = {"trigger_parameter_sync_step": "trainer.v1.separate_async.parameter_sync_step",
             "max_staleness": "trainer.v1.sampler.max_off_policy_threshold",
             "stale_samples": "trainer.v1.sampler.max_off_policy_strategy"}  # fmt: skip
    pool = to_plain(RolloutPoolConfig(total_rollout_steps=None, n=1))
    with open_dict(config):
        training |= {name: _take(config, key) for name, key in given.items() if _select(config, key) is not ABSENT}
        for name in ("nnodes", "n_gpus_per_node"):
            if _select(config, f"{_ROLLOUT}.{name}") is not ABSENT:
                pool[name] = _take(config, f"{_ROLLOUT}.{name}")
        if _select(config, f"{_ROLLOUT}.checkpoint_engine.backend") is not ABSENT:
            _take(config, f"{_ROLLOUT}.checkpoint_engine.backend")
        pool["total_epochs"], pool["test_freq"] = "${trainer.total_epochs}", "${trainer.test_freq}"
        config.async_training, config.rollout = training, pool
        changes = {"actor_rollout_ref.hybrid_engine": False, f"{_ROLLOUT}.mode": "async",
                   f"{_ROLLOUT}.calculate_log_probs": True, f"{_ACTOR}.use_rollout_log_probs": True,
                   f"{_ROLLOUT}.agent.command_journal": False, "data.train_batch_size": 0, MODE: "sync"}  # fmt: skip
        for key, value in changes.items():
            OmegaConf.update(config, key, value)
    return config


def current_names_or_exit(config: DictConfig) -> DictConfig:
    """`with_current_names` of an entry's config; exits with the message where that is refused."""
    from hydra.core.hydra_config import HydraConfig

    # Unresolved: an interpolation that cannot be resolved is reported with the other problems.
    overrides = HydraConfig.get().overrides.task if HydraConfig.initialized() else OmegaConf.create([])
    overrides = OmegaConf.to_container(overrides, resolve=False)
    given = {override.lstrip("+").partition("=")[0] for override in overrides}
    try:
        return with_current_names(config, given)
    except ConfigError as e:
        sys.exit(str(e))


def _select(node: Any, path: str) -> Any:
    """The raw value at a dotted path, ABSENT where there is none."""
    for part in path.split("."):
        if not isinstance(node, Mapping | DictConfig) or part not in node:
            return ABSENT
        node = node._get_node(part) if isinstance(node, DictConfig) else node[part]
    if OmegaConf.is_config(node):
        return OmegaConf.to_container(node, resolve=False)
    return node._value() if hasattr(node, "_value") else node


def _take(config: DictConfig, path: str) -> Any:
    """The value at a path, which is removed."""
    value, (parent, _, name) = _select(config, path), path.rpartition(".")
    del (OmegaConf.select(config, parent) if parent else config)[name]
    return value


def text(value: Any) -> str:
    """A value as it is written on the command line."""
    return value if isinstance(value, str) else json.dumps(value, default=str)
