"""The table of agent loops by name."""

import inspect
from pathlib import Path
from typing import Any

from omegaconf import OmegaConf

import verl
from verl.agents.agent_loop.base import AgentLoopBase
from verl.utils.import_utils import load_class_from_fqn

# Each entry has a class as `_target_`, and arguments of the class, as for hydra's `instantiate`.
_agent_loop_registry: dict[str, dict[str, Any]] = {
    "single_turn_agent": {"_target_": "verl.agents.agent_loop.single_turn_agent_loop.SingleTurnAgentLoop"},
    "environment_agent": {"_target_": "verl.agents.agent_loop.environment_agent_loop.EnvironmentAgentLoop"},
    "program_agent": {"_target_": "verl.agents.gateway.program_agent_loop.ProgramAgentLoop"},
    "tool_agent": {"_target_": "verl.agents.agent_loop.tool_agent_loop.ToolAgentLoop"},
}

#: Arguments of __init__ that one version of verl passes and another does not.
_NOT_IN_EVERY_VERSION = ("dataset_config", "data_config", "tools", "hf_model_type")


def register(agent_name: str) -> Any:
    """Decorator that registers a subclass of AgentLoopBase under a name; an entry with its arguments stays."""

    def decorator(subclass: type[AgentLoopBase]) -> type[AgentLoopBase]:
        target = f"{subclass.__module__}.{subclass.__qualname__}"
        if _agent_loop_registry.get(agent_name, {}).get("_target_") != target:
            _agent_loop_registry[agent_name] = {"_target_": target}
        return subclass

    return decorator


def make_agent_loop(name: str, **arguments: Any) -> AgentLoopBase:
    """A new instance of the loop registered under this name. Raises ValueError if there is none.

    A class whose __init__ has no **kwargs gets those of dataset_config, data_config, tools and hf_model_type that it
    names, so that classes for every version of verl can be constructed.
    """
    if name not in _agent_loop_registry:
        raise ValueError(
            f"agent_name={name!r} is unknown. Known: {', '.join(sorted(_agent_loop_registry))}. Register your own with "
            "verl.agents.agent_loop.registry.register, or in actor_rollout_ref.rollout.agent.agent_loop_config_path."
        )
    settings = dict(_agent_loop_registry[name])
    cls = load_class_from_fqn(settings.pop("_target_"), f"agent loop {name!r}")
    parameters = inspect.signature(cls).parameters
    if not any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values()):  # no **kwargs
        left_out = [argument for argument in _NOT_IN_EVERY_VERSION if argument not in parameters]
        arguments = {argument: value for argument, value in arguments.items() if argument not in left_out}
    return cls(**settings, **arguments)


def loops_in_file(config_path: str) -> dict[str, dict[str, Any]]:
    """{name: {_target_, arguments}} of a yaml list of {name, _target_, arguments}; ValueError for another entry."""
    entries = OmegaConf.to_container(OmegaConf.load(resolve_config_path(config_path)), resolve=True)
    for number, entry in enumerate(entries, 1):
        if not isinstance(entry, dict) or not {"name", "_target_"} <= entry.keys():
            raise ValueError(f"{config_path}, entry {number}: {entry!r} lacks name or _target_ (package.module.Class).")
    return {entry.pop("name"): entry for entry in entries}


def resolve_config_path(config_path: str) -> str:
    """The file for an absolute path, or for one below the working folder, the project's root or the package.

    Raises FileNotFoundError with the folders that were searched; ValueError for a relative path that leaves its root.
    """
    path, package = Path(config_path).expanduser(), Path(verl.__file__).parent
    roots = [path.parent] if path.is_absolute() else [Path.cwd(), package.parent, package]
    for root in roots:
        file = root / path
        if not path.is_absolute() and not file.resolve().is_relative_to(root.resolve()):
            raise ValueError(f"{config_path!r} leaves {root}; give an absolute path")
        if file.is_file():
            return str(file)
    raise FileNotFoundError(f"{config_path!r} is no file in {', '.join(str(root) for root in roots)}")
