"""Finds the tool calls in what a model wrote. Only JSON and plain text are read; nothing is evaluated."""

import json
import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Any

from pydantic import BaseModel


class FunctionCall(BaseModel):
    """A call as the model wrote it: `arguments` is the text of a JSON object. `error` says why it cannot be read."""

    arguments: str
    name: str
    error: str | None = None


# Reasoning, a call (which may have such a tag in its arguments), or the end of reasoning that the prompt began.
_TAGGED = re.compile(r"<think>.*?(?:</think>|\Z)|<tool_call>.*?(?:</tool_call>|\Z)|</think>", re.DOTALL)


class ToolParser(ABC):
    """Finds calls in generated ids. A call that cannot be read is returned with its `error`, not left out.

    Reasoning in <think> tags is text: a call that it quotes is none. With `is_reasoning` the prompt ends with <think>.
    `tool_schemas` are those of the prompt, for a format that leaves the types of arguments open.
    """

    tool_schemas: Sequence[dict[str, Any]] = ()
    _registry: dict[str, type["ToolParser"]] = {}
    #: Tokens that end a turn with calls in this format, where the tokenizer has them.
    STOPS: tuple[str, ...] = ()
    #: Whether models of this format reason in <think> tags.
    THINK_TAGS = True
    is_reasoning = False

    def __init__(self, tokenizer: Any) -> None:
        self.tokenizer = tokenizer

    async def extract_tool_calls(self, responses_ids: list[int]) -> tuple[str, list[FunctionCall]]:
        """(the text without its calls, the calls in order)."""
        content, calls = "", []
        for text, is_reasoning in self._parts(self.tokenizer.decode(responses_ids)):
            rest, found = (text, []) if is_reasoning else self.parse(text)
            content, calls = content + rest, calls + found
        return content, calls

    def _parts(self, text: str) -> list[tuple[str, bool]]:
        """The text in parts, and whether each is reasoning."""
        if not self.THINK_TAGS:
            return [(text, False)]
        if self.is_reasoning:
            begun, end, _ = text.partition("</think>")
        else:
            last = next((tag.end() for tag in _TAGGED.finditer(text) if tag[0] == "</think>"), 0)
            begun, end = text[:last], ""
        start = len(begun) + len(end)
        parts = [(text[:start], True)]
        for tag in _TAGGED.finditer(text, start):
            if tag[0].startswith("<think>"):
                parts += [(text[start : tag.start()], False), (tag[0], True)]
                start = tag.end()
        return [part for part in (*parts, (text[start:], False)) if part[0]]

    @property
    def stop_token_ids(self) -> list[int]:
        """The ids of STOPS."""
        ids = self.tokenizer.convert_tokens_to_ids(list(self.STOPS))
        return [i for i in ids if i not in (None, self.tokenizer.unk_token_id)]

    @abstractmethod
    def parse(self, text: str) -> tuple[str, list[FunctionCall]]:
        """The same for text that is not reasoning, special tokens included."""

    @classmethod
    def get_tool_parser(cls, name: str, tokenizer: Any, tool_schemas: Sequence[dict[str, Any]] = ()) -> "ToolParser":
        """The parser of that name (rollout.multi_turn.format); ValueError for an unknown one."""
        if name not in cls._registry:
            known = ", ".join(sorted(cls._registry))
            raise ValueError(f"rollout.multi_turn.format={name!r} is unknown. Known: {known}.")
        parser = cls._registry[name](tokenizer)
        parser.tool_schemas = tool_schemas
        return parser

    @classmethod
    def register(cls, name: str) -> Callable[[type["ToolParser"]], type["ToolParser"]]:
        """Decorator: enter a parser under a name."""

        def decorator(subclass: type["ToolParser"]) -> type["ToolParser"]:
            cls._registry[name] = subclass
            return subclass

        return decorator


def json_call(text: str, arguments_key: str = "arguments") -> FunctionCall:
    """A call written as {"name": ..., "arguments": {...}}."""
    try:
        call = json.loads(text)
        name, arguments = call["name"], call.get(arguments_key, {})
        if not isinstance(name, str):
            raise TypeError("name is not a string")
    except (ValueError, RecursionError) as error:
        return FunctionCall(name="", arguments=text, error=f"the call is not valid JSON: {error}")
    except (TypeError, KeyError, AttributeError):
        expected = f'{{"name": ..., "{arguments_key}": {{...}}}}'
        return FunctionCall(name="", arguments=text, error=f"a call is a JSON object {expected}")
    return FunctionCall(name=name, arguments=arguments if isinstance(arguments, str) else json.dumps(arguments))


@ToolParser.register("hermes")
class HermesToolParser(ToolParser):
    """<tool_call>{"name": ..., "arguments": {...}}</tool_call>, as Hermes and Qwen models write it."""

    CALL = re.compile(r"<tool_call>(.*?)(?:</tool_call>|$)", re.DOTALL)

    def parse(self, text: str) -> tuple[str, list[FunctionCall]]:
        return self.CALL.sub("", text), [json_call(call.strip()) for call in self.CALL.findall(text)]


@ToolParser.register("llama3_json")
class Llama3JsonToolParser(ToolParser):
    """The full turn is a JSON object {"name": ..., "parameters": {...}}, after <|python_tag|> or not; several are
    separated by semicolons.
    """

    STOPS = ("<|eom_id|>", "<|eot_id|>")

    SPECIAL = re.compile(r"<\|(?:python_tag|eot_id|eom_id|end_of_text)\|>")

    def parse(self, text: str) -> tuple[str, list[FunctionCall]]:
        plain = self.SPECIAL.sub("", text).strip()
        if "<|python_tag|>" not in text and not re.match(r'\{\s*"(?:name|type|parameters)"', plain):
            return text, []
        calls, decoder = [], json.JSONDecoder()
        while plain:
            try:
                _, end = decoder.raw_decode(plain)
            except (ValueError, RecursionError):
                end = len(plain)
            calls.append(json_call(plain[:end], "parameters"))
            plain = plain[end:].lstrip("; \n")
        return "", calls


@ToolParser.register("qwen3_coder")
class Qwen3CoderToolParser(ToolParser):
    """<tool_call><function=name><parameter=key>value</parameter></function></tool_call>.

    A value that is JSON other than a string is taken as such, any other as text. Where the tool's schema allows for a
    string, JSON of a type that it does not name is text as well.
    """

    CALL = re.compile(r"<tool_call>(.*?)(?:</tool_call>|$)", re.DOTALL)
    FUNCTION = re.compile(r"\s*<function=([^>\n]+)>(.*?)</function>\s*", re.DOTALL)
    PARAMETER = re.compile(r"<parameter=([^>\n]+)>(.*?)</parameter>", re.DOTALL)

    def parse(self, text: str) -> tuple[str, list[FunctionCall]]:
        return self.CALL.sub("", text), [self._call(call) for call in self.CALL.findall(text)]

    def _call(self, text: str) -> FunctionCall:
        function = self.FUNCTION.fullmatch(text)
        if function is None:
            expected = "<function=name><parameter=key>value</parameter></function>"
            return FunctionCall(name="", arguments=text, error=f"a call is written {expected}")
        name, parameters = function.group(1).strip(), self.PARAMETER.findall(function.group(2))
        types = _types(self.tool_schemas, name)
        arguments = {key.strip(): _value(value, types.get(key.strip(), ())) for key, value in parameters}
        return FunctionCall(name=name, arguments=json.dumps(arguments))


JSON_TYPES = {
    bool: ("boolean",), int: ("integer", "number"), float: ("number", "integer"), list: ("array",), dict: ("object",),
    type(None): ("null",),
}  # fmt: skip


def _types(tool_schemas: Sequence[dict[str, Any]], name: str) -> dict[str, list[str]]:
    """The types that the schema of the tool `name` allows for each of its parameters."""
    functions = (schema["function"] for schema in tool_schemas)
    known = next((function for function in functions if function["name"] == name), {})
    properties = known.get("parameters", {}).get("properties", {})
    kinds = {key: schema["type"] for key, schema in properties.items()}
    return {key: [kind] if isinstance(kind, str) else kind for key, kind in kinds.items()}


def _value(text: str, types: Sequence[str]) -> Any:
    text = text.removeprefix("\n").removesuffix("\n")
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        return text
    if isinstance(value, str) or ("string" in types and not set(JSON_TYPES[type(value)]) & set(types)):
        return text
    return value


@ToolParser.register("gpt-oss")
class GptOssToolParser(ToolParser):
    """Harmony: <|start|>assistant<|channel|>commentary to=functions.name <|constrain|>json<|message|>{...}<|call|>.

    The analysis channel, where the model thinks, holds no calls.
    """

    STOPS = ("<|call|>", "<|return|>")
    THINK_TAGS = False

    MESSAGE = re.compile(
        r"(?:<\|start\|>)?(?:assistant)?(?P<head>(?:(?!<\|message\|>).)*?)<\|message\|>(?P<body>.*?)"
        r"(?:<\|end\|>|<\|call\|>|<\|return\|>|$)|.+",
        re.DOTALL,
    )
    RECIPIENT = re.compile(r"to=functions\.([\w.-]+)")

    def parse(self, text: str) -> tuple[str, list[FunctionCall]]:
        content, calls = [], []
        for message in self.MESSAGE.finditer(text):
            head, body = message.group("head"), message.group("body")
            if head is None:  # text without a message
                continue
            recipient = self.RECIPIENT.search(head)
            if "analysis" in head and recipient is None:
                continue
            if recipient is None:
                content.append(body)
                continue
            try:
                json.loads(body)
                calls.append(FunctionCall(name=recipient.group(1), arguments=body.strip()))
            except (ValueError, RecursionError) as error:
                problem = f"the call is not valid JSON: {error}"
                calls.append(FunctionCall(name=recipient.group(1), arguments=body, error=problem))
        return "".join(content), calls
