"""Compatibility with verl: tools of `verl.workers.rollout.tools.tool_registry` by file."""

from verl.workers.rollout.tools.base_tool import BaseTool
from verl.workers.rollout.tools.tool_registry import (  # noqa: F401
    ToolType,
    get_tool_class,
    initialize_tools_from_config,
)


def load_all_tools(tool_config_path: str | None, function_tool_path: str | None) -> list[BaseTool]:
    """The tools of a yaml file, then those of a Python file; either may be None."""
    return initialize_tools_from_config(tool_config_path, function_tool_path)
