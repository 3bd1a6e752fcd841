"""Parsers of tool calls in generated text. They only parse; generated text is never evaluated."""

import ast
import functools
import json
import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Any

from pydantic import BaseModel

from verl.utils.registry import Registry


class FunctionCall(BaseModel):
    """A generated tool call.

    `arguments` is the text of a JSON object. `error` is the reason if the call cannot be parsed. `id` is the call's id
    in formats in which the model generates one.
    """

    arguments: str
    name: str
    error: str | None = None
    id: str | None = None

    def as_message(self) -> dict[str, Any] | None:
        """The call as an entry of a message's `tool_calls`, with arguments as an object; None if it is malformed."""
        if self.error is not None or named_call(self.name, self.arguments).error is not None:
            return None
        function = {"name": self.name, "arguments": json.loads(self.arguments)}
        return {"id": self.id, "type": "function", "function": function}


@functools.cache
def _tagged(think_tags: tuple[str, str], call_tags: tuple[str, str]) -> re.Pattern[str]:
    """Matches reasoning, a call (which may contain reasoning tags), or a closing reasoning tag without opening tag."""
    think, end_think, call, end_call = map(re.escape, think_tags + call_tags)
    return re.compile(rf"{think}.*?(?:{end_think}|\Z)|{call}.*?(?:{end_call}|\Z)|{end_think}", re.DOTALL)


class ToolParser(ABC):
    """Base class of parsers. A malformed call is returned with its `error`, not left out.

    A call inside reasoning (between THINK_TAGS) is text, not a call. `tool_schemas` are the schemas in the prompt, for
    formats that do not state the types of arguments.
    """

    tool_schemas: Sequence[dict[str, Any]] = ()
    _registry: Registry[str, type["ToolParser"]] = Registry(
        "actor_rollout_ref.rollout.multi_turn.format", "Register your own with @ToolParser.register(name)."
    )
    #: Additional stop tokens of a turn with calls; tokens that the tokenizer lacks are ignored.
    STOPS: tuple[str, ...] = ()
    #: Opening and closing tag of reasoning; None if `parse` handles reasoning.
    THINK_TAGS: tuple[str, str] | None = ("<think>", "</think>")
    #: Opening and closing tag of a call, or of all calls of a turn.
    TAGS = ("<tool_call>", "</tool_call>")

    def __init__(self, tokenizer: Any) -> None:
        self.tokenizer = tokenizer

    async def extract_tool_calls(
        self, responses_ids: list[int], starts_reasoning: bool = False
    ) -> tuple[str, list[FunctionCall]]:
        """(the text without calls, the calls in order).

        `starts_reasoning`: the prompt ends with the opening tag of reasoning, so the generated text starts inside it.
        """
        content, calls = "", []
        for text, is_reasoning in self._parts(self.tokenizer.decode(responses_ids), starts_reasoning):
            rest, parsed = (text, []) if is_reasoning else self.parse(text)
            content += rest
            calls += parsed
        return content, calls

    def _parts(self, text: str, starts_reasoning: bool) -> list[tuple[str, bool]]:
        """The text split into (part, whether it is reasoning)."""
        if not self.THINK_TAGS:
            return [(text, False)]
        opened, closed = self.THINK_TAGS
        tagged = _tagged(self.THINK_TAGS, self.TAGS)
        if starts_reasoning:
            end = text.index(closed) + len(closed) if closed in text else len(text)
        else:  # a closing tag without an opening one ends reasoning that the prompt started
            end = next((tag.end() for tag in tagged.finditer(text) if tag[0] == closed), 0)
        parts = [(text[:end], True)]
        for tag in tagged.finditer(text, end):
            if tag[0].startswith(opened):
                parts += [(text[end : tag.start()], False), (tag[0], True)]
                end = tag.end()
        parts.append((text[end:], False))
        return [(part, is_reasoning) for part, is_reasoning in parts if part]

    def begins_reasoning(self, prompt_ids: list[int]) -> bool:
        """Whether a prompt ends with the opening tag of reasoning."""
        return bool(self.THINK_TAGS) and self.tokenizer.decode(prompt_ids[-8:]).rstrip().endswith(self.THINK_TAGS[0])

    def message(
        self, ids: list[int], starts_reasoning: bool = False, calls: Sequence[FunctionCall] = ()
    ) -> dict[str, Any]:
        """The assistant message of a turn (ids without the stop token): content, reasoning_content, tool_calls.

        All text is content if one of the calls is malformed.
        """
        made = [call.as_message() for call in calls]  # entries of `tool_calls`
        if None in made:
            return {"role": "assistant", "content": self.tokenizer.decode(ids)}
        content, reasoning = "", ""
        for text, is_reasoning in self._parts(self.tokenizer.decode(ids), starts_reasoning):
            if is_reasoning:
                reasoning += text.removeprefix(self.THINK_TAGS[0]).removesuffix(self.THINK_TAGS[1])
            else:
                content += self.parse(text)[0]
        message: dict[str, Any] = {"role": "assistant", "content": content.strip()}
        if reasoning.strip():
            message["reasoning_content"] = reasoning.strip()
        if made:
            message["tool_calls"] = made
        return message

    @property
    def stop_token_ids(self) -> list[int]:
        """The ids of STOPS."""
        ids = self.tokenizer.convert_tokens_to_ids(list(self.STOPS))
        return [i for i in ids if i not in (None, self.tokenizer.unk_token_id)]

    def typed_call(self, name: str, parameters: list[tuple[str, str]]) -> FunctionCall:
        """A call in a format that writes arguments as (key, text) pairs without types.

        Text that is valid JSON, except for JSON strings, is parsed; other text is a string. If the tool's schema allows
        a string, JSON of a type that the schema does not allow is a string as well.
        """
        function = next((s["function"] for s in self.tool_schemas if s["function"]["name"] == name), {})
        properties = function.get("parameters", {}).get("properties", {})
        arguments = {}
        for key, text in parameters:
            types = properties.get(key.strip(), {}).get("type", ())
            arguments[key.strip()] = _value(text, [types] if isinstance(types, str) else types)
        return FunctionCall(name=name, arguments=json.dumps(arguments))

    @abstractmethod
    def parse(self, text: str) -> tuple[str, list[FunctionCall]]:
        """(the text without calls, the calls in order), for text with special tokens and without reasoning."""

    @classmethod
    def get_tool_parser(cls, name: str, tokenizer: Any, tool_schemas: Sequence[dict[str, Any]] = ()) -> "ToolParser":
        """The parser of that name (rollout.multi_turn.format); ValueError for an unknown one."""
        parser = cls._registry.find(name)(tokenizer)
        parser.tool_schemas = tool_schemas
        return parser

    @classmethod
    def register(cls, name: str) -> Callable[[type["ToolParser"]], type["ToolParser"]]:
        """Decorator that registers a parser for rollout.multi_turn.format. ValueError if another one has the name."""
        return cls._registry.register(name)


def json_call(text: str, arguments_key: str = "arguments") -> FunctionCall:
    """Parses a call in the form {"name": ..., "arguments": {...}}."""
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


def json_end(text: str, begin: int = 0) -> int:
    """Where the JSON value that starts at `begin` ends; the end of the text if it is malformed."""
    try:
        return json.JSONDecoder().raw_decode(text, begin)[1]
    except (ValueError, RecursionError):
        return len(text)


def malformed_call(expected: str, text: str) -> FunctionCall:
    """A call that is not written in its format."""
    return FunctionCall(name="", arguments=text, error=f"a call is written {expected}")


def named_call(name: str, arguments: str, id: str | None = None) -> FunctionCall:
    """A call in a format that writes the name separately from the JSON object of arguments."""
    try:
        problem = None if isinstance(json.loads(arguments), dict) else "the arguments are not a JSON object"
    except (ValueError, RecursionError) as error:
        problem = f"the call is not valid JSON: {error}"
    return FunctionCall(name=name, arguments=arguments.strip() if problem is None else arguments, error=problem, id=id)


@ToolParser.register("hermes")
class HermesToolParser(ToolParser):
    """<tool_call>{"name": ..., "arguments": {...}}</tool_call>, the format of Hermes and Qwen models."""

    def parse(self, text: str) -> tuple[str, list[FunctionCall]]:
        begin, end = map(re.escape, self.TAGS)
        section = re.compile(rf"{begin}(.*?)(?:{end}|$)", re.DOTALL)
        return section.sub("", text), [call for body in section.findall(text) for call in self._calls(body)]

    def _calls(self, body: str) -> list[FunctionCall]:
        """The calls in the text between TAGS."""
        return [json_call(body.strip())]


@ToolParser.register("json")
class JsonToolParser(ToolParser):
    """{"name": ..., "arguments": {...}} anywhere in the text, optionally in a code block.

    For models that never learned the tags of their chat template, such as Qwen2.5-Coder. Other JSON is text.
    """

    START = re.compile(r'(?:```(?:json)?\s*)?(?=\{\s*"name"\s*:\s*"[^"]*"\s*,\s*"arguments"\s*:)')
    CLOSING = re.compile(r"\s*```")

    def parse(self, text: str) -> tuple[str, list[FunctionCall]]:
        content, calls, end = "", [], 0
        while begin := self.START.search(text, end):
            content += text[end : begin.start()]
            end = json_end(text, begin.end())
            calls.append(json_call(text[begin.end() : end]))
            if begin[0] and (closing := self.CLOSING.match(text, end)):
                end = closing.end()
        return content + text[end:], calls


@ToolParser.register("llama3_json")
class Llama3JsonToolParser(ToolParser):
    """{"name": ..., "parameters": {...}} as the whole turn, optionally after <|python_tag|>.

    Several calls are separated by semicolons.
    """

    STOPS = ("<|eom_id|>", "<|eot_id|>")
    SPECIAL = re.compile(r"<\|(?:python_tag|eot_id|eom_id|end_of_text)\|>")

    def parse(self, text: str) -> tuple[str, list[FunctionCall]]:
        plain = self.SPECIAL.sub("", text).strip()
        if "<|python_tag|>" not in text and not re.match(r'\{\s*"(?:name|type|parameters)"', plain):
            return text, []
        calls = []
        while plain:
            end = json_end(plain)
            calls.append(json_call(plain[:end], "parameters"))
            plain = plain[end:].lstrip("; \n")
        return "", calls


@ToolParser.register("qwen3_coder")
class Qwen3CoderToolParser(HermesToolParser):
    """<tool_call><function=name><parameter=key>value</parameter></function></tool_call>; see `typed_call`."""

    FUNCTION = re.compile(r"\s*<function=([^>\n]+)>(.*?)</function>\s*", re.DOTALL)
    PARAMETER = re.compile(r"<parameter=([^>\n]+)>(.*?)</parameter>", re.DOTALL)
    EXPECTED = "<function=name><parameter=key>value</parameter></function>"

    def _calls(self, body: str) -> list[FunctionCall]:
        function = self.FUNCTION.fullmatch(body)
        if function is None:
            return [malformed_call(self.EXPECTED, body)]
        return [self.typed_call(function[1].strip(), self.PARAMETER.findall(function[2]))]


@ToolParser.register("glm45")
class Glm45ToolParser(HermesToolParser):
    """<tool_call>name<arg_key>key</arg_key><arg_value>value</arg_value></tool_call>, the format of GLM 4.5 to 4.7.

    The parts may be separated by line breaks; see `typed_call` for values.
    """

    STOPS = ("<|observation|>", "<|user|>")
    PAIR = re.compile(r"<arg_key>(.*?)</arg_key>\s*<arg_value>(.*?)</arg_value>", re.DOTALL)
    EXPECTED = "name<arg_key>key</arg_key><arg_value>value</arg_value>"

    def _calls(self, body: str) -> list[FunctionCall]:
        name = self.PAIR.sub("", body).strip()
        if not body.lstrip().startswith(name) or not re.fullmatch(r"[^<>\s]+", name):
            return [malformed_call(self.EXPECTED, body)]
        return [self.typed_call(name, self.PAIR.findall(body))]


@ToolParser.register("minimax_m2")
class MinimaxM2ToolParser(HermesToolParser):
    """<minimax:tool_call><invoke name="name"><parameter name="key">value</parameter></invoke></minimax:tool_call>.

    One block may contain several calls; see `typed_call` for values.
    """

    TAGS = ("<minimax:tool_call>", "</minimax:tool_call>")
    CALL = re.compile(r'<invoke name="([^"\n]+)">(.*?)</invoke>', re.DOTALL)
    PARAMETER = re.compile(r'<parameter name="([^"\n]+)">(.*?)</parameter>', re.DOTALL)
    EXPECTED = '<invoke name="name"><parameter name="key">value</parameter></invoke>'

    def _calls(self, body: str) -> list[FunctionCall]:
        calls = [self.typed_call(name, self.PARAMETER.findall(text)) for name, text in self.CALL.findall(body)]
        rest = self.CALL.sub("", body).strip()
        return [*calls, malformed_call(self.EXPECTED, rest)] if rest else calls


class _TokenToolParser(HermesToolParser):
    """Calls between special tokens BEGIN and END, in a section between TAGS. CALL matches the text of a call."""

    BEGIN: str
    END: str
    CALL: re.Pattern[str]
    EXPECTED: str

    def _calls(self, body: str) -> list[FunctionCall]:
        calls = []
        for part in body.split(self.BEGIN)[1:]:
            text = part.partition(self.END)[0]
            match = self.CALL.fullmatch(text)
            if match is None:
                calls.append(malformed_call(self.EXPECTED, text))
            else:
                calls.append(named_call(match["name"], match["arguments"], match.groupdict().get("id")))
        return calls


@ToolParser.register("kimi_k2")
class KimiK2ToolParser(_TokenToolParser):
    """<|tool_call_begin|>functions.name:0<|tool_call_argument_begin|>{...}<|tool_call_end|>, in a section of calls.

    "functions.name:0" is also the call's id, which the template renders with the tool's response.
    """

    TAGS = ("<|tool_calls_section_begin|>", "<|tool_calls_section_end|>")
    BEGIN, END = "<|tool_call_begin|>", "<|tool_call_end|>"
    CALL = re.compile(
        r"\s*(?P<id>(?:functions\.)?(?P<name>[^\s:<>]+):\d+)\s*<\|tool_call_argument_begin\|>(?P<arguments>.*)",
        re.DOTALL,
    )
    EXPECTED = "functions.name:0<|tool_call_argument_begin|>{...}"


@ToolParser.register("deepseek_v3")
class DeepseekV3ToolParser(_TokenToolParser):
    """function<｜tool▁sep｜>name, then the arguments in a json code block: the format of DeepSeek V3 and R1."""

    TAGS = ("<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>")
    BEGIN, END = "<｜tool▁call▁begin｜>", "<｜tool▁call▁end｜>"
    CALL = re.compile(r"\s*function<｜tool▁sep｜>(?P<name>[^\s<>]+)\s*```json\s*\n(?P<arguments>.*)```\s*", re.DOTALL)
    EXPECTED = "function<｜tool▁sep｜>name, then the arguments in ```json ... ```"


@ToolParser.register("deepseek_v31")
class DeepseekV31ToolParser(DeepseekV3ToolParser):
    """name<｜tool▁sep｜>{...}, the format of DeepSeek V3.1."""

    CALL = re.compile(r"\s*(?P<name>[^\s<>]+)<｜tool▁sep｜>(?P<arguments>.*)", re.DOTALL)
    EXPECTED = "name<｜tool▁sep｜>{...}"


@ToolParser.register("mistral")
class MistralToolParser(ToolParser):
    """[TOOL_CALLS][{"name": ..., "arguments": {...}, "id": ...}].

    Newer models write [TOOL_CALLS]name[CALL_ID]id[ARGS]{...} for each call, where [CALL_ID]id is optional.
    """

    TAGS = ("[TOOL_CALLS]", "</s>")
    THINK_TAGS = ("[THINK]", "[/THINK]")
    CALL = re.compile(r"\s*(?P<name>[^\s\[\]{}]+)(?:\[CALL_ID\](?P<id>\w+))?\[ARGS\](?P<arguments>.*)", re.DOTALL)

    def parse(self, text: str) -> tuple[str, list[FunctionCall]]:
        content, *parts = text.split("[TOOL_CALLS]")
        return content, [call for part in parts for call in self._calls(part.removesuffix("</s>"))]

    def _calls(self, text: str) -> list[FunctionCall]:
        if match := self.CALL.fullmatch(text):
            return [named_call(match["name"], match["arguments"], match["id"])]
        try:
            calls = json.loads(text)
            if not isinstance(calls, list):
                raise ValueError("it is not a list")
        except (ValueError, RecursionError) as error:
            return [FunctionCall(name="", arguments=text, error=f"the calls are not a JSON list: {error}")]
        parsed = [json_call(json.dumps(call)) for call in calls]
        for result, call in zip(parsed, calls, strict=True):
            if isinstance(call, dict) and isinstance(call.get("id"), str):
                result.id = call["id"]
        return parsed


@ToolParser.register("llama4_pythonic")
class Llama4PythonicToolParser(ToolParser):
    """[name(key="value"), ...] as the whole turn, a Python list of calls with keyword arguments (Llama 4).

    Arguments must be Python literals, or true, false or null. Other expressions are errors and are never evaluated.
    """

    STOPS = ("<|eom|>", "<|eot|>")
    SPECIAL = re.compile(r"<\|(?:python_start|python_end|eom|eot|end_of_text)\|>")
    START = re.compile(r"\[\s*[A-Za-z_][\w.]*\(")
    WORDS = {"true": True, "false": False, "null": None}

    def parse(self, text: str) -> tuple[str, list[FunctionCall]]:
        plain = self.SPECIAL.sub("", text).strip()
        if not self.START.match(plain):
            return text, []
        try:
            (statement,) = ast.parse(plain).body
            if not isinstance(statement, ast.Expr) or not isinstance(statement.value, ast.List):
                raise ValueError("another expression")
            return "", [self._call(call, plain) for call in statement.value.elts]
        except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
            problem = f"the calls are not a Python list [name(key=value), ...]: {error}"
            return "", [FunctionCall(name="", arguments=plain, error=problem)]

    def _call(self, call: ast.expr, text: str) -> FunctionCall:
        source = ast.get_source_segment(text, call) or text
        if not isinstance(call, ast.Call) or call.args or any(keyword.arg is None for keyword in call.keywords):
            return FunctionCall(name="", arguments=source, error="a call is written name(key=value)")
        name = ast.unparse(call.func)
        try:
            arguments = {keyword.arg: self._literal(keyword.value) for keyword in call.keywords}
            return FunctionCall(name=name, arguments=json.dumps(arguments, allow_nan=False))
        except (ValueError, TypeError, RecursionError) as error:
            return FunctionCall(name=name, arguments=source, error=f"an argument is not a literal: {error}")

    def _literal(self, node: ast.expr) -> Any:
        if isinstance(node, ast.Name) and node.id in self.WORDS:
            return self.WORDS[node.id]
        if isinstance(node, ast.List | ast.Tuple):
            return [self._literal(item) for item in node.elts]
        if isinstance(node, ast.Dict):
            keys = [None if key is None else ast.literal_eval(key) for key in node.keys]
            if not all(isinstance(key, str) for key in keys):
                raise ValueError("keys of an object are strings")
            return {key: self._literal(value) for key, value in zip(keys, node.values, strict=True)}
        return ast.literal_eval(node)


JSON_TYPES = {
    bool: ("boolean",), int: ("integer", "number"), float: ("number", "integer"), list: ("array",), dict: ("object",),
    type(None): ("null",),
}  # fmt: skip


def _value(text: str, types: Sequence[str]) -> Any:
    """An argument from its text and the types that the schema allows; see `ToolParser.typed_call`."""
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

    Calls in the analysis channel, which contains the reasoning, are ignored.
    """

    STOPS = ("<|call|>", "<|return|>")
    THINK_TAGS = None
    MESSAGE = re.compile(
        r"(?:<\|start\|>)?(?:assistant)?(?P<head>(?:(?!<\|message\|>).)*?)<\|message\|>(?P<body>.*?)"
        r"(?:<\|end\|>|<\|call\|>|<\|return\|>|$)|.+",
        re.DOTALL,
    )
    ANALYSIS = re.compile(r"<\|channel\|>analysis<\|message\|>(.*?)(?:<\|end\|>|<\|call\|>|<\|return\|>|$)", re.DOTALL)
    RECIPIENT = re.compile(r"to=functions\.([\w.-]+)")

    def message(
        self, ids: list[int], starts_reasoning: bool = False, calls: Sequence[FunctionCall] = ()
    ) -> dict[str, Any]:
        """Also returns the analysis as `thinking`, which the template accepts only in messages without content."""
        message = super().message(ids, starts_reasoning, calls)
        thinking = "".join(self.ANALYSIS.findall(self.tokenizer.decode(ids)))
        return message | ({"thinking": thinking} if thinking and not message["content"] else {})

    def parse(self, text: str) -> tuple[str, list[FunctionCall]]:
        content, calls = "", []
        for message in self.MESSAGE.finditer(text):
            if message["head"] is None:  # text without a message
                continue
            recipient = self.RECIPIENT.search(message["head"])
            if recipient is not None:
                calls.append(named_call(recipient[1], message["body"]))
            elif "analysis" not in message["head"]:
                content += message["body"]
        return content, calls
