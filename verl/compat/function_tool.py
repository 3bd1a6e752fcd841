"""Compatibility with verl: `function_tool`, a decorator for functions as tools, and what it registers."""

from collections.abc import Callable
from typing import Any

from verl.agents.tools import function_tool as live
from verl.agents.tools.function_tool import function_schema, load_function_tools  # noqa: F401
from verl.agents.tools.schemas import OpenAIFunctionToolSchema, ToolResponse
from verl.utils.registry import Registry

_FUNCTIONS: Registry[str, Callable] = Registry("function_tool", "Your own: decorate a function with function_tool.")


def normalize_function_tool_return(ret: Any) -> tuple[ToolResponse, float, dict]:
    """(response, step reward, metrics) of what a function returns: any value, or a tuple of up to these three."""
    if not (isinstance(ret, tuple) and 2 <= len(ret) <= 3 and isinstance(ret[1], int | float | None)):
        return live.FunctionTool.returned(ret)
    response, reward, metrics = (*ret, {})[:3]
    return live.FunctionTool.returned(response)[0], float(reward or 0.0), dict(metrics or {})


class FunctionTool(live.FunctionTool):
    """A function as a tool, which may also return (response, step reward, metrics)."""

    returned = staticmethod(normalize_function_tool_return)
    fn = property(lambda self: self.source)

    async def call(self, parameters: dict[str, Any]) -> Any:
        """What the function returns for these arguments."""
        result = self.source(**parameters)
        return await result if self.is_async else result


def function_tool(
    name: str | Callable | None = None, *, schema: OpenAIFunctionToolSchema | dict | None = None
) -> Callable:
    """Decorator, with or without arguments: registers a function as a tool, under a name and schema of its own."""

    def decorate(function: Callable) -> Callable:
        described = function_schema(function) if schema is None else OpenAIFunctionToolSchema.model_validate(schema)
        if isinstance(name, str):
            called = described.function.model_copy(update={"name": name})
            described = described.model_copy(update={"function": called})
        function.as_tool = FunctionTool(function, described)
        return _FUNCTIONS.register(function.as_tool.name)(function)

    return decorate(name) if callable(name) else decorate


def get_function_tool(name: str) -> FunctionTool:
    """The registered tool of that name; KeyError if there is none."""
    if name not in _FUNCTIONS:
        raise KeyError(f"no @function_tool {name!r}. Registered: {', '.join(sorted(_FUNCTIONS)) or 'none'}.")
    return _FUNCTIONS[name].as_tool


def load_function_tools_from_path(path: str) -> list[live.FunctionTool]:
    """The tools of a Python file: its decorated functions, or else all public ones."""
    return load_function_tools(path)
