"""Plain Python functions as tools."""

import asyncio
import threading
from typing import Literal

import pytest
from pydantic import ValidationError

from verl.agents.tools import schemas
from verl.agents.tools.function_tool import FunctionTool, function_schema, load_function_tools
from verl.agents.tools.runner import ToolRunner
from verl.agents.tools.schemas import OpenAIFunctionToolSchema, ToolResponse


def weather(city: str, days: int = 1, unit: Literal["C", "F"] = "C", points: list[float] | None = None) -> dict:
    """Forecast the weather.

    It is never right.

    Args:
        city (str): Name of the city,
            in English.
        days: How far ahead.

    Returns:
        dict: the forecast.
    """
    return {"city": city, "days": days, "unit": unit, "points": points}


async def greet(name: str) -> str:
    """Say hello.

    :param name: Whom.
    """
    return f"Hallo {name}, grüß dich"


def test_the_schema_follows_hints_and_docstring():
    function = function_schema(weather).function
    assert (function.name, function.description) == ("weather", "Forecast the weather. It is never right.")
    assert function.parameters.required == ["city"]
    assert {name: prop.model_dump(exclude_unset=True) for name, prop in function.parameters.properties.items()} == {
        "city": {"type": "string", "description": "Name of the city, in English."},
        "days": {"type": "integer", "default": 1, "description": "How far ahead."},
        "unit": {"type": "string", "enum": ["C", "F"], "default": "C"},
        "points": {"type": ["array", "null"], "default": None,
                   "anyOf": [{"type": "array", "items": {"type": "number"}}, {"type": "null"}]},
    }  # fmt: skip
    greeting = function_schema(greet).function
    assert greeting.description == "Say hello." and greeting.parameters.properties["name"].description == "Whom."


def run(tool, arguments, kwargs=None, **settings):
    async def call():
        runner = ToolRunner([tool], max_tool_response_length=1000, **settings)
        async with runner.conversation({tool.name: {"execute_kwargs": kwargs}}) as tools:
            return await tools.call(tool.name, arguments)

    return asyncio.run(call())


def test_calls_convert_arguments_and_write_results():
    result = run(FunctionTool(weather), '{"city": "Bonn", "points": [1]}', {"days": 3})
    assert result.response.text == '{"city": "Bonn", "days": 3, "unit": "C", "points": [1.0]}'
    assert result.reward == 0.0
    assert run(FunctionTool(greet), '{"name": "Ada"}').response.text == "Hallo Ada, grüß dich"
    refused = run(FunctionTool(weather), '{"city": "Bonn", "unit": "K"}')
    assert refused.failure == "invalid_arguments" and "unit: 'K' is not one of ['C', 'F']" in refused.response.text
    assert run(FunctionTool(weather), '{"city": "Bonn", "town": 1}').failure == "invalid_arguments"


def test_a_response_passes_and_blocking_exiting_and_flooding_functions_harm_nobody():
    def picture() -> ToolResponse:
        """Draw."""
        return ToolResponse(text="here", image=[b"png"])

    def leave() -> str:
        """Leave."""
        raise SystemExit(3)

    def flood() -> str:
        """Say much."""
        return "ab" * 50_000_000

    end = threading.Event()

    def block() -> str:
        """Block."""
        end.wait(60)
        return "late"

    assert run(FunctionTool(picture), "{}").response == ToolResponse(text="here", image=[b"png"])
    assert run(FunctionTool(leave), "{}").response.text == "Error: 'leave' raised RuntimeError: SystemExit: 3."
    assert run(FunctionTool(flood), "{}").response.text == "ab" * 250 + "...(truncated)..." + "ab" * 250
    assert run(FunctionTool(block), "{}", timeout=0.1).failure == "timeout"
    end.set()


def test_functions_that_cannot_be_tools_are_named():
    def bare(a: int):
        pass

    def unhinted(a):
        """Do."""

    def many(*a: int):
        """Do."""

    def strange(a: threading.Lock):
        """Do."""

    for function, message in (
        (bare, "has no docstring"), (unhinted, "parameter 'a' has no type hint"),
        (many, "parameter 'a' cannot be passed by name"), (strange, "have no JSON schema|hints"),
    ):  # fmt: skip
        with pytest.raises(ValueError, match=rf"{function.__name__} \(.*test_function_tool.py:\d+\).*{message}"):
            function_schema(function)


def test_a_file_gives_its_public_functions(tmp_path):
    file = tmp_path / "my_tools.py"
    file.write_text(
        'from os.path import join\ndef _hidden(): pass\ndef f(a: int) -> int:\n    "Double."\n    return 2 * a\n'
    )
    tools = load_function_tools(str(file))
    assert [tool.name for tool in tools] == ["f"] and run(tools[0], '{"a": 21}').response.text == "42"
    chosen = tmp_path / "chosen_tools.py"
    chosen.write_text('__all__ = ["g"]\ndef f(a: int): pass\ndef g() -> None:\n    "Nothing."\n')
    assert [tool.name for tool in load_function_tools(str(chosen))] == ["g"]
    empty = tmp_path / "no_tools.py"
    empty.write_text("x = 1\n")
    with pytest.raises(ValueError, match="no_tools.py' defines no public function"):
        load_function_tools(str(empty))
    assert load_function_tools("") == []


@pytest.mark.parametrize(
    "text, arguments, error",
    [
        ('{"a": 1}', {"a": 1}, False),
        ('{"a": 1', {}, True),
        ("[1]", {}, True),
        ("[" * 100_000, {}, True),
        ('{"a": ' + "9" * 10_000 + "}", {}, True),  # Python refuses to convert so many digits
    ],
)
def test_arguments_are_a_json_object_or_a_decode_error(text, arguments, error):
    parsed = schemas.OpenAIFunctionParsedSchema(name="f", arguments=text)
    call, has_decode_error = schemas.OpenAIFunctionCallSchema.from_openai_function_parsed_schema(parsed)
    assert (call.name, call.arguments, has_decode_error) == ("f", arguments, error)


def test_a_schema_keeps_every_keyword_and_parameters_are_optional():
    prop = {"type": "array", "items": {"type": "string"}, "minItems": 1}
    parameters = {"type": "object", "properties": {"q": prop}, "required": ["q"]}
    given = {"type": "function", "function": {"name": "f", "description": "d", "parameters": parameters}}
    assert OpenAIFunctionToolSchema(**given).model_dump(exclude_unset=True) == given
    bare = OpenAIFunctionToolSchema(type="function", function={"name": "f", "description": "d"})
    assert bare.function.parameters.model_dump() == {"type": "object", "properties": {}, "required": []}


def test_parameters_of_any_json_schema_get_types():
    schema = {"properties": {
        "a": {"title": "A", "type": "integer"},
        "b": {"anyOf": [{"type": "number"}, {"type": "null"}], "title": "B"},
        "c": {},
        "d": True,
    }}  # fmt: skip
    parameters = schemas.OpenAIFunctionToolSchema.of("f", "d", schema).function.parameters
    types = {name: prop.type for name, prop in parameters.properties.items()}
    anything = ["string", "number", "boolean", "object", "array", "null"]
    assert types == {"a": "integer", "b": ["number", "null"], "c": anything, "d": anything}
    assert parameters.required == [] and "title" not in parameters.properties["a"].model_dump()


def test_responses_know_what_they_hold_and_refuse_single_media():
    assert ToolResponse(text="").is_empty() and ToolResponse(text="a").is_text_only()
    picture = ToolResponse(text="a", image=[b"png"])
    assert not picture.is_text_only() and not picture.is_empty()
    for name in ("image", "video"):
        with pytest.raises(ValidationError, match=f"ToolResponse.{name} is a bytes; give a list"):
            ToolResponse(**{name: b"one"})
