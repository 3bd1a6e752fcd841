"""Parsers of tool calls against texts in the formats that the models' publishers describe."""

import asyncio
import json

import pytest

from verl.experimental.agent_loop.tool_parser import ToolParser
from verl.tools.schemas import OpenAIFunctionToolSchema


class Text:
    """A tokenizer whose ids are characters."""

    def decode(self, ids):
        return "".join(map(chr, ids))


def parse(name, text, tool_schemas=()):
    parser = ToolParser.get_tool_parser(name, Text(), tool_schemas)
    content, calls = asyncio.run(parser.extract_tool_calls([ord(c) for c in text]))
    arguments = [call.arguments if call.error else json.loads(call.arguments) for call in calls]
    return content, [(call.name, given, call.error) for call, given in zip(calls, arguments, strict=True)]


def test_hermes():
    text = 'Let me see.<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call>'
    text += '<tool_call>{"name": "now", "arguments": {}}</tool_call><|im_end|>'
    content, calls = parse("hermes", text)
    assert content == "Let me see.<|im_end|>" and calls == [("add", {"a": 1}, None), ("now", {}, None)]
    assert parse("hermes", "no call") == ("no call", [])


@pytest.mark.parametrize(
    ("text", "error"),
    [
        ("<tool_call>{'name': 'add'}</tool_call>", "the call is not valid JSON"),
        ("<tool_call>" + "[" * 100_000, "the call is not valid JSON"),
        ("<tool_call>[1]</tool_call>", "a call is a JSON object"),
        ('<tool_call>{"arguments": {}}</tool_call>', "a call is a JSON object"),
        ('<tool_call>{"name": 3}</tool_call>', "a call is a JSON object"),
        ("<tool_call>__import__('os').system('true')</tool_call>", "the call is not valid JSON"),
    ],
)
def test_hermes_malformed(text, error):
    _, [(name, _, got)] = parse("hermes", text)
    assert name == "" and got.startswith(error)


CALLS = {
    "hermes": '<tool_call>{"name": "add", "arguments": {"a": %s}}</tool_call>',
    "qwen3_coder": "<tool_call><function=add><parameter=a>%s</parameter></function></tool_call>",
    "llama3_json": '{"name": "add", "parameters": {"a": %s}}',
}


@pytest.mark.parametrize("name", CALLS)
def test_a_call_that_reasoning_quotes_is_text(name):
    quoted, made = CALLS[name] % 1, CALLS[name] % 2
    add = [("add", {"a": 2}, None)]
    thought = f"<think>\nI could write {quoted}.\n</think>"
    assert parse(name, f"{thought}\n\nNo.") == (f"{thought}\n\nNo.", [])
    content, calls = parse(name, f"{thought}{made}")
    assert calls == add and content == thought
    assert parse(name, f"<think>{quoted}") == (f"<think>{quoted}", [])  # cut before the thought ended
    begun = f"I could write {quoted}.</think>"  # after a prompt that ends with <think>
    assert parse(name, begun) == (begun, [])
    assert parse(name, f"{begun}{made}") == (begun, add)


@pytest.mark.parametrize("name", ["hermes", "qwen3_coder"])
def test_tags_of_reasoning_in_arguments_are_part_of_the_call(name):
    for tag in ('"<think>"', '"</think>"'):
        (called,) = parse(name, CALLS[name] % tag)[1]
        assert called[2] is None and called[1]["a"].strip('"') == tag.strip('"')
    several = f"<think>a</think>So <think>{CALLS[name] % 1}</think>then {CALLS[name] % 2}"
    assert parse(name, several)[1] == [("add", {"a": 2}, None)]


def test_a_prompt_that_begins_the_reasoning_leaves_its_end_open():
    parser = ToolParser.get_tool_parser("hermes", Text())
    parser.is_reasoning = True
    call = CALLS["hermes"] % 1
    for text, number in ((call, 0), (f"write <tool_call> first</think>{call}", 1), (f"{call}</think>{call}", 1)):
        assert len(asyncio.run(parser.extract_tool_calls([ord(c) for c in text]))[1]) == number


def test_llama3_json():
    call = '{"name": "add", "parameters": {"a": 1}}'
    assert parse("llama3_json", f"<|python_tag|>{call}; {call}<|eom_id|>") == ("", [("add", {"a": 1}, None)] * 2)
    assert parse("llama3_json", f"{call}<|eot_id|>")[1] == [("add", {"a": 1}, None)]
    assert parse("llama3_json", "a plain answer {}")[1] == []
    assert parse("llama3_json", '<|python_tag|>{"name": ')[1][0][2].startswith("the call is not valid JSON")


def test_qwen3_coder():
    text = (
        "I look.\n<tool_call>\n<function=search>\n<parameter=query>\nred foxes\n</parameter>\n<parameter=topk>\n3\n"
        '</parameter>\n<parameter=ids>\n[1, 2]\n</parameter>\n'
        '<parameter=quoted>"3"</parameter>\n</function>\n</tool_call>'
    )
    content, calls = parse("qwen3_coder", text)
    assert content == "I look.\n"
    assert calls == [("search", {"query": "red foxes", "topk": 3, "ids": [1, 2], "quoted": '"3"'}, None)]
    assert parse("qwen3_coder", "<tool_call><function=x>")[1][0][2].startswith("a call is written <function=name>")


@pytest.mark.parametrize(
    ("types", "text", "expected"),
    [
        ("string", "2024", "2024"), ("string", "true", "true"), ("string", "[1]", "[1]"), ("string", "null", "null"),
        ("integer", "2024", 2024), ("number", "2024", 2024), ("array", "[1]", [1]), ("integer", "many", "many"),
        (["string", "null"], "null", None), (["string", "null"], "2024", "2024"), (["string", "integer"], "7", 7),
        (["string", "boolean"], "7", "7"),
    ],
)  # fmt: skip
def test_qwen3_coder_keeps_text_where_the_schema_has_a_string(types, text, expected):
    schema = OpenAIFunctionToolSchema.of("find", "Finds.", {"properties": {"what": {"type": types}}})
    call = "<tool_call><function={}><parameter=what>\n{}\n</parameter></function></tool_call>"
    schemas = [schema.model_dump(exclude_unset=True, exclude_none=True)]
    assert parse("qwen3_coder", call.format("find", text), schemas)[1] == [("find", {"what": expected}, None)]
    assert parse("qwen3_coder", call.format("other", "2024"), schemas)[1] == [("other", {"what": 2024}, None)]


@pytest.mark.parametrize("parser", ["qwen3_coder", "hermes", "llama3_json", "gpt-oss"])
def test_nothing_that_a_model_wrote_is_evaluated(parser, tmp_path):
    code = f"__import__('os').mkdir({str(tmp_path / 'ran')!r})"
    texts = (
        f"<tool_call><function=f><parameter=a>{code}</parameter></function></tool_call>",
        f"<tool_call><function=f({code})><parameter={code}>1</parameter></function></tool_call>",
        f"<tool_call><function={code}</tool_call>",
        f'<tool_call>{{"name": "f", "arguments": {code}}}</tool_call>',
        f'<|python_tag|>{{"name": "f", "parameters": {code}}}',
        f"<|channel|>commentary to=functions.f<|message|>{code}<|call|>",
    )
    for text in texts:
        parse(parser, text)
    assert not (tmp_path / "ran").exists()


def test_gpt_oss():
    text = (
        "<|channel|>analysis<|message|>to=functions.no I think<|end|><|start|>assistant<|channel|>commentary "
        'to=functions.add <|constrain|>json<|message|>{"a": 1}<|call|>'
    )
    assert parse("gpt-oss", text) == ("", [("add", {"a": 1}, None)])
    assert parse("gpt-oss", "<|channel|>final<|message|>It is 3.<|return|>") == ("It is 3.", [])
    plain = "text without a message " * 2000  # read in linear time
    assert parse("gpt-oss", plain) == ("", []) == parse("gpt-oss", f"<|channel|>analysis<|message|>no<|end|>{plain}")
    broken = parse("gpt-oss", "<|channel|>commentary to=functions.add<|message|>{a<|call|>")[1][0]
    assert broken[0] == "add" and broken[2].startswith("the call is not valid JSON")


def test_unknown_and_own():
    with pytest.raises(ValueError, match="rollout.multi_turn.format='xml' is unknown. Known: gpt-oss, hermes, llama3"):
        ToolParser.get_tool_parser("xml", Text())

    @ToolParser.register("shout")
    class Shout(ToolParser):
        def parse(self, text):
            return text.upper(), []

    try:
        assert parse("shout", "a") == ("A", [])
    finally:
        del ToolParser._registry["shout"]
