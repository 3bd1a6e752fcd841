"""Compatibility with verl: `function_tool`, a decorator for functions as tools, and what it registers."""

import inspect
from collections.abc import Callable
from typing import Any

from verl.agents.tools import function_tool as live
from verl.agents.tools.function_tool import function_schema, load_function_tools  # noqa: F401
from verl.agents.tools.schemas import OpenAIFunctionToolSchema, ToolResponse

_TOOLS: dict[str, "FunctionTool"] = {}


class FunctionTool(live.FunctionTool):
    """A function as a tool, which may also return (response, step reward, metrics)."""

    def __init__(self, function: Callable, schema: OpenAIFunctionToolSchema | None = None) -> None:
        super().__init__(function, schema)
        self.fn, self.is_async = function, inspect.iscoroutinefunction(function)

    async def call(self, parameters: dict[str, Any]) -> Any:
        """What the function returns for these arguments."""
        result = self.fn(**parameters)
        return await result if self.is_async else result

    async def execute(
        self, instance_id: str, parameters: dict[str, Any], **kwargs: Any
    ) -> tuple[ToolResponse, float, dict]:
        """Call the function with checked arguments: (response, step reward, metrics)."""
        arguments = {**parameters, **kwargs}
        called = self._function(**arguments) if self._is_async else live.in_thread(self._function, **arguments)
        return normalize_function_tool_return(await called)


def function_tool(
    name: str | Callable | None = None, *, schema: OpenAIFunctionToolSchema | dict | None = None
) -> Callable:
    """Decorator, with or without arguments: registers a function as a tool and returns it unchanged.

    `name` and `schema` replace those of the function, its type hints and its docstring. A file named by
    rollout.multi_turn.function_tool_path offers its decorated functions alone. Raises ValueError for a name that
    another function has.
    """

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


def normalize_function_tool_return(ret: Any) -> tuple[ToolResponse, float, dict]:
    """(response, step reward, metrics) of what a function returns: any value, or a tuple of up to these three."""
    response, reward, metrics = (*ret, *(None, 0.0, {})[len(ret) :]) if _is_triple(ret) else (ret, 0.0, {})
    if not isinstance(response, ToolResponse):
        text = response if isinstance(response, str) else live.json.dumps(response, ensure_ascii=False)
        response = ToolResponse(text=text)
    return response, float(reward or 0.0), dict(metrics or {})


def _is_triple(ret: Any) -> bool:
    return isinstance(ret, tuple) and 2 <= len(ret) <= 3 and isinstance(ret[1], int | float | None)


__all__ = [
    "FunctionTool", "function_schema", "function_tool", "get_function_tool", "load_function_tools",
    "load_function_tools_from_path", "normalize_function_tool_return",
]  # fmt: skip
