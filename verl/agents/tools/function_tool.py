"""Plain Python functions as tools: the schema comes from type hints and docstring."""

import inspect
import json
import re
import typing
from collections.abc import Callable
from typing import Any

from pydantic import TypeAdapter, validate_call

from verl.agents.tools.base_tool import EXAMPLES, BaseTool
from verl.agents.tools.schemas import OpenAIFunctionToolSchema, ToolResponse
from verl.utils.import_utils import load_module
from verl.utils.threads import in_thread
from verl.utils.user_code import defined_at

# "name: text" or "name (type): text" under Args:, with continuation lines that are indented further.
_ARGUMENT = re.compile(r"^ {4,}(\w+)(?: *\([^)\n]*\))?: *(.+(?:\n {8,}\S.*)*)", re.MULTILINE)
_PARAM = re.compile(r"^ *:param(?: [^:\n]+)? (\w+): *(.+)", re.MULTILINE)
_SECTION = re.compile(r"\n\s*(?:(?:Args|Arguments|Parameters|Returns|Raises|Yields|Examples?):\s*\n|:\w+[^:\n]*:)")


def function_schema(function: Callable) -> OpenAIFunctionToolSchema:
    """The schema of a function: its name, the docstring up to the first section, and its annotated parameters.

    Descriptions of parameters come from "Args:" or ":param name:". Parameters without a default are required.
    ValueError, with the function's file and line, where a hint or the docstring is missing.
    """
    where, doc = defined_at(function), inspect.getdoc(function)
    if not doc:
        raise ValueError(f"{where} has no docstring; the model needs a description of what it does")
    hints = typing.get_type_hints(function)
    for name, parameter in inspect.signature(function).parameters.items():
        if parameter.kind in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD, parameter.POSITIONAL_ONLY):
            raise ValueError(f"{where}: parameter {name!r} cannot be passed by name; use plain parameters")
        if name not in hints:
            raise ValueError(f"{where}: parameter {name!r} has no type hint")
    try:
        schema = TypeAdapter(function).json_schema()
    except Exception as error:
        raise ValueError(f"{where}: its type hints have no JSON schema: {error}") from error
    described = {name: " ".join(text.split()) for form in (_ARGUMENT, _PARAM) for name, text in form.findall(doc)}
    for name, prop in schema.get("properties", {}).items():
        if name in described:
            prop.setdefault("description", described[name])
    summary = " ".join(_SECTION.split(f"\n{doc}")[0].split())
    return OpenAIFunctionToolSchema.of(function.__name__, summary, schema)


class FunctionTool(BaseTool):
    """Calls a Python function with the model's arguments, converted to the types of its hints.

    `execute_kwargs` of the row take the place of arguments of the same name. An `async def` is awaited; any other
    function runs in a thread of its own. The result is text, a ToolResponse, or a value that is written as JSON.

    The function's attributes `example_arguments` and `example_kwargs`, if it has them, are the tool's settings.
    """

    parallel_calls = True

    def __init__(self, function: Callable, schema: OpenAIFunctionToolSchema | None = None) -> None:
        schema = function_schema(function) if schema is None else schema
        super().__init__({name: value for name, value in vars(function).items() if name in EXAMPLES}, schema)
        self.source = function
        self._function = validate_call(function)
        self.is_async = inspect.iscoroutinefunction(function)

    async def execute(
        self, instance_id: str, parameters: dict[str, Any], **kwargs: Any
    ) -> tuple[ToolResponse, float, dict]:
        """Call the function. It gives no step reward: 0."""
        arguments = {**parameters, **kwargs}
        call = self._function(**arguments) if self.is_async else in_thread(self._function, **arguments)
        return self.returned(await call)

    @staticmethod
    def returned(result: Any) -> tuple[ToolResponse, float, dict]:
        """(response, step reward, metrics) for what the function returned."""
        if not isinstance(result, ToolResponse):
            text = result if isinstance(result, str) else json.dumps(result, ensure_ascii=False)
            result = ToolResponse(text=text)
        return result, 0.0, {}


def load_function_tools(function_tool_path: str) -> list[FunctionTool]:
    """A tool for each public function that a Python file (or `pkg://module`) defines, in their order there.

    If the module has `__all__`, its names are used instead; if any of its functions has an attribute `as_tool`, a
    FunctionTool, those tools alone. Raises ValueError if there is no function.
    """
    module = load_module(function_tool_path)
    if module is None:
        return []
    functions = {name: value for name, value in vars(module).items() if inspect.isfunction(value)}
    marked = [getattr(function, "as_tool", None) for function in functions.values()]
    if marked := [tool for tool in marked if isinstance(tool, FunctionTool)]:
        return marked
    names = getattr(module, "__all__", None)
    if names is None:
        own = [name for name, function in functions.items() if function.__module__ == module.__name__]
        names = [name for name in own if not name.startswith("_")]
    if not names:
        raise ValueError(f"function_tool_path={function_tool_path!r} defines no public function")
    return [FunctionTool(getattr(module, name)) for name in names]
