"""Settings that are accepted and not read: those of which `verl.config.inert` says so."""

from collections.abc import Mapping

from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from verl.config.asynchronous import tree_type
from verl.config.compose import select
from verl.config.fields import field_metadata, field_types, known_names, section_type
from verl.planning.config_check import is_interpolation, paths, text
from verl.utils.problems import UNUSED, Problem


def unused_settings(config: DictConfig, config_type: type) -> list[Problem]:
    """A problem for each key that this run does not read and whose value is not the default.

    `config_type` is the dataclass of the tree. Keys that follow another key are left out: that one is reported.
    """
    try:
        plain, raw = (OmegaConf.to_container(config, resolve=r) for r in (True, False))
    except OmegaConfBaseException:  # tree_problems reports it
        return []
    config_type = tree_type(config_type, plain)
    rollout = select(plain, "actor_rollout_ref.rollout.name", select(plain, "rollout.name", None))
    mode = select(plain, "actor_rollout_ref.rollout.mode", select(plain, "rollout.mode", None))
    default, problems = config_type(), []
    for key in paths(plain):
        value = select(plain, key, None)
        reason = _unused_reason(config_type, key, (rollout, f"{rollout}/{mode}"))
        if key == "rollout.dtype":  # of main_generation, which loads a module in this type for rollout hf
            continue
        if not reason or key.endswith("._target_") or isinstance(value, Mapping):
            continue
        if not is_interpolation(select(raw, key, None)) and value != select(default, key, None):
            problem = Problem(UNUSED, key, f"{key}={text(value)} has no effect in this version: {reason}.")
            problems.append(problem)
    return problems


def _unused_reason(owner: type | None, key: str, rollouts: tuple[str | None, ...]) -> str | None:
    """What happens instead of reading a key, or a section that it is in; None if the setting has its effect.

    A reason may depend on the rollout: then it is looked up by each of `rollouts`, "name" and "name/mode".
    """
    for name in key.split("."):
        if owner is None or name not in known_names(owner):
            return None
        reason = field_metadata(owner, name)["unused"]
        if isinstance(reason, Mapping):
            reason = next((reason[rollout] for rollout in rollouts if rollout in reason), None)
        if reason:
            return reason
        owner = section_type(field_types(owner).get(name))
    return None
