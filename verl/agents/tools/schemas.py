"""What a tool accepts and what it answers, in the format of OpenAI's function calls."""

import json
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator

_ANY_TYPE = ["string", "number", "boolean", "object", "array", "null"]


class OpenAIFunctionPropertySchema(BaseModel):
    """One parameter, as JSON schema. Other keywords (items, minimum, ...) are kept."""

    model_config = ConfigDict(extra="allow")

    type: str | list[str]
    description: str | None = None
    enum: list[Any] | None = None


class OpenAIFunctionParametersSchema(BaseModel):
    """All parameters, as a JSON schema of type object. Other keywords are kept."""

    model_config = ConfigDict(extra="allow")

    type: str
    properties: dict[str, OpenAIFunctionPropertySchema]
    required: list[str]


def _typed(schema: Any) -> dict[str, Any]:
    """The schema of one property with a `type`, taken from its alternatives where it has none; without its title."""
    schema = {key: value for key, value in (schema if isinstance(schema, dict) else {}).items() if key != "title"}
    if "type" not in schema:
        kinds = [option.get("type") for option in schema.get("anyOf", schema.get("oneOf", []))]
        flat = [k for kind in kinds for k in (kind if isinstance(kind, list) else [kind])]
        schema["type"] = _ANY_TYPE if None in flat or not flat else list(dict.fromkeys(flat))
    return schema


class OpenAIFunctionSchema(BaseModel):
    """A function: its name, what it does, its parameters."""

    name: str
    description: str
    parameters: OpenAIFunctionParametersSchema = Field(
        default_factory=lambda: OpenAIFunctionParametersSchema(type="object", properties={}, required=[])
    )
    strict: bool = False


class OpenAIFunctionToolSchema(BaseModel):
    """An entry of the tools that a chat template gets; `type` is "function"."""

    type: str
    function: OpenAIFunctionSchema

    @classmethod
    def of(cls, name: str, description: str, parameters: dict[str, Any]) -> "OpenAIFunctionToolSchema":
        """The entry of a function.

        `parameters` is any JSON schema of an object, which may lack `properties`, `required` and types.
        """
        properties = {name: _typed(prop) for name, prop in (parameters.get("properties") or {}).items()}
        schema = {"type": "object", "required": [], **parameters, "properties": properties}
        function = OpenAIFunctionSchema(name=name, description=description, parameters=schema)
        return cls(type="function", function=function)


class OpenAIFunctionParsedSchema(BaseModel):
    """A call as the model wrote it; `arguments` is the text of a JSON object."""

    name: str
    arguments: str


class OpenAIFunctionCallSchema(BaseModel):
    """A call with decoded arguments."""

    name: str
    arguments: dict[str, Any]

    @staticmethod
    def from_openai_function_parsed_schema(
        parsed_schema: OpenAIFunctionParsedSchema,
    ) -> tuple["OpenAIFunctionCallSchema", bool]:
        """(call, has_decode_error). With a decode error the arguments are empty."""
        try:
            arguments, has_decode_error = decode_arguments(parsed_schema.arguments), False
        except ValueError:
            arguments, has_decode_error = {}, True
        return OpenAIFunctionCallSchema(name=parsed_schema.name, arguments=arguments), has_decode_error


def decode_arguments(text: str) -> dict[str, Any]:
    """The arguments of a call; ValueError, with the reason, where the text is not a JSON object."""
    try:
        arguments = json.loads(text)
    except RecursionError:
        raise ValueError("nested too deeply") from None
    if not isinstance(arguments, dict):
        raise ValueError(f"a JSON {type(arguments).__name__}, not an object")
    return arguments


def with_text_arguments(call: dict[str, Any]) -> dict[str, Any]:
    """A call of a message as OpenAI's API has it: its arguments as JSON text."""
    text = json.dumps(call["function"]["arguments"], ensure_ascii=False)
    return {**call, "function": {"name": call["function"]["name"], "arguments": text}}


class OpenAIFunctionToolCall(BaseModel):
    """A call with its id, as chat templates expect it in `tool_calls`."""

    id: str
    type: Literal["function"] = "function"
    function: OpenAIFunctionCallSchema


class ToolResponse(BaseModel):
    """What a tool answers: text, lists of images and videos, or nothing."""

    text: str | None = None
    image: list[Any] | None = None
    video: list[Any] | None = None

    @model_validator(mode="before")
    @classmethod
    def initialize_request(cls, values: Any) -> Any:
        """Refuse a single image or video: ValueError."""
        for name in ("image", "video") if isinstance(values, dict) else ():
            if values.get(name) is not None and not isinstance(values[name], list):
                raise ValueError(
                    f"ToolResponse.{name} is a {type(values[name]).__name__}; give a list, also for a single {name}"
                )
        return values

    def is_empty(self) -> bool:
        """Whether there is no text, image or video."""
        return not (self.text or self.image or self.video)

    def is_text_only(self) -> bool:
        """Whether there is text and neither image nor video."""
        return bool(self.text) and not (self.image or self.video)


class ToolResult(BaseModel):
    """The outcome of one call; with `failure`, one of runner.FAILURES, there is no reward, and `response` says why."""

    response: ToolResponse
    reward: float | None = None
    metrics: dict[Any, Any] = {}
    failure: str | None = None
