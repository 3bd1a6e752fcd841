"""Schemas: calls decoded or refused, responses, parameters from any JSON schema."""

import pytest
from pydantic import ValidationError

from verl.agents.tools.schemas import (
    OpenAIFunctionCallSchema,
    OpenAIFunctionParametersSchema,
    OpenAIFunctionParsedSchema,
    OpenAIFunctionToolCall,
    OpenAIFunctionToolSchema,
    ToolResponse,
)


@pytest.mark.parametrize(
    "text, arguments, error",
    [
        ('{"a": 1}', {"a": 1}, False),
        ("{}", {}, False),
        ('{"a": 1', {}, True),
        ("[1]", {}, True),
        ("null", {}, True),
        ("", {}, True),
        ("[" * 100_000, {}, True),
        ('{"a": ' + "9" * 10_000 + "}", {}, True),  # Python refuses to convert so many digits
    ],
)
def test_arguments_are_a_json_object_or_a_decode_error(text, arguments, error):
    parsed = OpenAIFunctionParsedSchema(name="f", arguments=text)
    call, has_decode_error = OpenAIFunctionCallSchema.from_openai_function_parsed_schema(parsed)
    assert (call.name, call.arguments, has_decode_error) == ("f", arguments, error)


def test_a_tool_call_renders_as_templates_expect():
    call = OpenAIFunctionToolCall(id="1", function=OpenAIFunctionCallSchema(name="f", arguments={"a": 1}))
    assert call.model_dump() == {"id": "1", "type": "function", "function": {"name": "f", "arguments": {"a": 1}}}


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
    parameters = OpenAIFunctionParametersSchema.from_json_schema(schema)
    types = {name: prop.type for name, prop in parameters.properties.items()}
    anything = ["string", "number", "boolean", "object", "array", "null"]
    assert types == {"a": "integer", "b": ["number", "null"], "c": anything, "d": anything}
    assert parameters.required == [] and "title" not in parameters.properties["a"].model_dump()


def test_responses_know_what_they_hold_and_refuse_single_media():
    assert ToolResponse().is_empty() and ToolResponse(text="").is_empty()
    assert ToolResponse(text="a").is_text_only() and not ToolResponse(text="a").is_empty()
    picture = ToolResponse(text="a", image=[b"png"])
    assert not picture.is_text_only() and not picture.is_empty()
    for name in ("image", "video"):
        with pytest.raises(ValidationError, match=f"ToolResponse.{name} is a bytes; give a list"):
            ToolResponse(**{name: b"one"})
