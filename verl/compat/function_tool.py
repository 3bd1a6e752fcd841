"""Compatibility with verl: `function_tool`, a decorator for functions as tools, and what it registers."""

import inspect
from collections.abc import Callable
from typing import Any

from verl.agents.tools import function_tool as live
from verl.agents.tools.function_tool import function_schema, load_function_tools  # noqa: F401
from verl.agents.tools.schemas import OpenAIFunctionToolSchema, ToolResponse

_TOOLS: dict[str, "FunctionTool"] = {}


def normalize_function_tool_return(ret: Any) -> tuple[ToolResponse, float, dict]:
    """(response, step reward, metrics) of what a function returns: any value, or a tuple of up to these three."""
    if not (isinstance(ret, tuple) and 2 <= len(ret) <= 3 and isinstance(ret[1], int | float | None)):
        return live.FunctionTool.returned(ret)
    response, reward, metrics = (*ret, {})[:3]
    return live.FunctionTool.returned(response)[0], float(reward or 0.0), dict(metrics or {})


class FunctionTool(live.FunctionTool):
    """A function as a tool, which may also return (response, step reward, metrics)."""

    returned = staticmethod(normalize_function_tool_return)

    def __init__(self, function: Callable, schema: OpenAIFunctionToolSchema | None = None) -> None:
        super().__init__(function, schema)
        self.fn, self.is_async = function, inspect.iscoroutinefunction(function)

    async def call(self, parameters: dict[str, Any]) -> Any:
        """What the function returns for these arguments."""
        result = self.fn(**parameters)
        return await result if self.is_async else result



def function_tool(
    name: str | Callable | None = None, *, schema: OpenAIFunctionToolSchema | dict | None = None
) -> Callable:
    """Decorator, with or without arguments: registers a function as a tool, under a name and schema of its own."""

    def decorate(function: Callable) -> Callable:
        described = OpenAIFunctionToolSchema.model_validate(schema) if isinstance(schema, dict) else schema
        described = function_schema(function) if described is None else described
        if isinstance(name, str):
            called = described.function.model_copy(update={"name": name})
            described = described.model_copy(update={"function": called})
        tool = FunctionTool(function, described)
        other = _TOOLS.get(tool.name)
        if other is not None and (other.fn.__module__, other.fn.__qualname__) != (
            function.__module__, function.__qualname__
        ):  # fmt: skip
            raise ValueError(f"a function tool {tool.name!r} is already registered; give the second one another name")
        _TOOLS[tool.name] = function.as_tool = tool
        return function

    return decorate(name) if callable(name) else decorate


def get_function_tool(name: str) -> FunctionTool:
    """The registered tool of that name; KeyError if there is none."""
    if name not in _TOOLS:
        raise KeyError(f"no function tool {name!r} is registered. Registered: {', '.join(sorted(_TOOLS)) or 'none'}.")
    return _TOOLS[name]


def load_function_tools_from_path(path: str) -> list[live.FunctionTool]:
    """The tools of a Python file: its decorated functions, or else all public ones."""
    return load_function_tools(path)
