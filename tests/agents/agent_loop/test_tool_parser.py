"""Parsers of tool calls against texts in the formats that the models' publishers describe."""

import asyncio
import json

import pytest

from verl.agents.agent_loop.tool_parser import ToolParser
from verl.agents.tools.schemas import OpenAIFunctionToolSchema


class Text:
    """A tokenizer whose ids are characters."""

    def decode(self, ids):
        return "".join(map(chr, ids))


def parse(name, text, tool_schemas=()):
    parser = ToolParser.get_tool_parser(name, Text(), tool_schemas)
    content, calls = asyncio.run(parser.extract_tool_calls([ord(c) for c in text]))
    arguments = [call.arguments if call.error else json.loads(call.arguments) for call in calls]
    return content, [(call.name, given, call.error) for call, given in zip(calls, arguments, strict=True)]


CALLS = {
    "hermes": '<tool_call>{"name": "add", "arguments": {"a": %s}}</tool_call>',
    "qwen3_coder": "<tool_call><function=add><parameter=a>%s</parameter></function></tool_call>",
    "llama3_json": '{"name": "add", "parameters": {"a": %s}}',
    "json": '{"name": "add", "arguments": {"a": %s}}',
    "glm45": "<tool_call>add\n<arg_key>a</arg_key>\n<arg_value>%s</arg_value>\n</tool_call>",
    "kimi_k2": "<|tool_calls_section_begin|><|tool_call_begin|>functions.add:0<|tool_call_argument_begin|>"
    '{"a": %s}<|tool_call_end|><|tool_calls_section_end|>',
    "minimax_m2": '<minimax:tool_call>\n<invoke name="add">\n<parameter name="a">%s</parameter>\n</invoke>\n'
    "</minimax:tool_call>",
    "deepseek_v3": "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>add\n```json\n"
    '{"a": %s}\n```<｜tool▁call▁end｜><｜tool▁calls▁end｜>',
    "deepseek_v31": '<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>add<｜tool▁sep｜>{"a": %s}<｜tool▁call▁end｜>'
    "<｜tool▁calls▁end｜>",
    "llama4_pythonic": "[add(a=%s)]",
    "mistral": '[TOOL_CALLS][{"name": "add", "arguments": {"a": %s}, "id": "call00000"}]',
}


@pytest.mark.parametrize("name", [name for name in CALLS if name != "mistral"])
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


UNTAGGED = ("json", "llama3_json", "llama4_pythonic", "mistral")


@pytest.mark.parametrize("name", [name for name in CALLS if name not in UNTAGGED])
def test_tags_of_reasoning_in_arguments_are_part_of_the_call(name):
    for tag in ('"<think>"', '"</think>"'):
        (called,) = parse(name, CALLS[name] % tag)[1]
        assert called[2] is None and called[1]["a"].strip('"') == tag.strip('"')
    several = f"<think>a</think>So <think>{CALLS[name] % 1}</think>then {CALLS[name] % 2}"
    assert parse(name, several)[1] == [("add", {"a": 2}, None)]


NESTED = {"where": {"tags": ["a", {"b": None}], "deep": [[1.5, True]]}, "text": 'He said "no", \\ é\n]}'}
NESTED_TEXT = {name: json.dumps(value) if name == "where" else value for name, value in NESTED.items()}
#: Two calls in one turn, find(**NESTED) and now(), as each family writes them.
SEVERAL = {
    "hermes": '<tool_call>\n{{"name": "find", "arguments": {all}}}\n</tool_call>'
    '<tool_call>{{"name": "now", "arguments": {{}}}}</tool_call><|im_end|>',
    "glm45": "<tool_call>find<arg_key>where</arg_key><arg_value>{where}</arg_value><arg_key>text</arg_key>"
    "<arg_value>{text}</arg_value></tool_call><tool_call>now\n</tool_call><|observation|>",
    "minimax_m2": '<minimax:tool_call><invoke name="find"><parameter name="where">{where}</parameter>'
    '<parameter name="text">{text}</parameter></invoke>\n<invoke name="now"></invoke></minimax:tool_call>[e~[',
    "kimi_k2": "<|tool_calls_section_begin|><|tool_call_begin|>functions.find:3<|tool_call_argument_begin|>{all}"
    "<|tool_call_end|><|tool_call_begin|>functions.now:4<|tool_call_argument_begin|>{{}}<|tool_call_end|>"
    "<|tool_calls_section_end|><|im_end|>",
    "deepseek_v3": "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>find\n```json\n{all}\n```"
    "<｜tool▁call▁end｜>\n<｜tool▁call▁begin｜>function<｜tool▁sep｜>now\n```json\n{{}}\n```<｜tool▁call▁end｜>"
    "<｜tool▁calls▁end｜><｜end▁of▁sentence｜>",
    "deepseek_v31": "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>find<｜tool▁sep｜>{all}<｜tool▁call▁end｜>"
    "<｜tool▁call▁begin｜>now<｜tool▁sep｜>{{}}<｜tool▁call▁end｜><｜tool▁calls▁end｜><｜end▁of▁sentence｜>",
    "mistral": "[TOOL_CALLS]find[CALL_ID]call00003[ARGS]{all}[TOOL_CALLS]now[ARGS]{{}}</s>",
    "llama4_pythonic": "<|python_start|>[find(where={literal}, text={quoted}), now()]<|python_end|><|eom|>",
}
LEFT = {"hermes": "<|im_end|>", "glm45": "<|observation|>", "minimax_m2": "[e~[", "kimi_k2": "<|im_end|>",
        "llama4_pythonic": "", "mistral": "",
        "deepseek_v3": "<｜end▁of▁sentence｜>", "deepseek_v31": "<｜end▁of▁sentence｜>"}  # fmt: skip


@pytest.mark.parametrize("name", SEVERAL)
def test_several_calls_with_nested_arguments(name):
    text = SEVERAL[name].format(
        **NESTED_TEXT, all=json.dumps(NESTED), literal=repr(NESTED["where"]), quoted=repr(NESTED["text"])
    )
    before = "" if name == "llama4_pythonic" else "I look.\n"
    content, calls = parse(name, before + text)
    assert calls == [("find", NESTED, None), ("now", {}, None)]
    assert content == before + LEFT[name]
    assert parse(name, "I add [a] {b}.") == ("I add [a] {b}.", [])


@pytest.mark.parametrize(
    ("name", "text", "expected"),
    [
        ("hermes", "<think>\nHm.\n</think>\n\nYes." + CALLS["hermes"] % 1,
         {"content": "Yes.", "reasoning_content": "Hm."}),
        ("glm45", "\n<think></think>\nYes.", {"content": "Yes."}),
        ("deepseek_v31", "Hm.</think>" + CALLS["deepseek_v31"] % 1, {"content": "", "reasoning_content": "Hm."}),
        ("gpt-oss", "<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant<|channel|>commentary "
         "to=functions.add<|message|>{}", {"content": "", "thinking": "Hm."}),
        ("gpt-oss", "<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant<|channel|>final<|message|>Yes.",
         {"content": "Yes."}),
    ],
)  # fmt: skip
def test_the_message_of_a_turn_has_its_parts(name, text, expected):
    parser = ToolParser.get_tool_parser(name, Text())
    assert parser.message([ord(c) for c in text]) == {"role": "assistant", **expected}


@pytest.mark.parametrize(
    ("name", "text", "ids"),
    [
        ("kimi_k2", SEVERAL["kimi_k2"].format(all="{}"), ["functions.find:3", "functions.now:4"]),
        ("mistral", SEVERAL["mistral"].format(all="{}"), ["call00003", None]),
        ("hermes", CALLS["hermes"] % 1, [None]),
    ],
)
def test_a_call_has_the_id_that_the_model_gave_it(name, text, ids):
    assert [call.id for call in ToolParser.get_tool_parser(name, Text()).parse(text)[1]] == ids


@pytest.mark.parametrize(
    ("name", "text", "named", "error"),
    [
        ("hermes", "<tool_call>{'name': 'add'}</tool_call>", "", "the call is not valid JSON"),
        ("hermes", "<tool_call>" + "[" * 100_000, "", "the call is not valid JSON"),
        ("hermes", '<tool_call>{"name": 3}</tool_call>', "", "a call is a JSON object"),
        ("llama3_json", '<|python_tag|>{"name": ', "", "the call is not valid JSON"),
        ("json", 'So 3.\n```json\n{"name": "add", "arguments": {"a": ', "", "the call is not valid JSON"),
        ("qwen3_coder", "<tool_call><function=x>", "", "a call is written <function=name>"),
        ("gpt-oss", "<|channel|>commentary to=functions.add<|message|>{a<|call|>", "add", "the call is not valid JSON"),
        ("glm45", "<tool_call>add<arg_key>a</arg_key><arg_value>1</tool_call>", "", "a call is written name<"),
        ("minimax_m2", '<minimax:tool_call><invoke name="add"><parameter name="a">1', "", "a call is written <invoke"),
        ("kimi_k2", "<|tool_calls_section_begin|><|tool_call_begin|>add<|tool_call_end|>", "", "a call is writt"),
        ("kimi_k2", CALLS["kimi_k2"] % "'1'", "add", "the call is not valid JSON"),
        ("kimi_k2", (CALLS["kimi_k2"] % 1).replace('{"a": 1}', "[1]"), "add", "the arguments are not a JSON object"),
        ("deepseek_v3", CALLS["deepseek_v3"] % "", "add", "the call is not valid JSON"),
        ("deepseek_v31", CALLS["deepseek_v31"] % ("[" * 100_000), "add", "the call is not valid JSON"),
        ("mistral", "[TOOL_CALLS]add[ARGS]{'a': 1}", "add", "the call is not valid JSON"),
        ("mistral", '[TOOL_CALLS]{"name": "add"}', "", "the calls are not a JSON list: it is not a list"),
        ("mistral", "[TOOL_CALLS]" + "[" * 100_000, "", "the calls are not a JSON list"),
        ("llama4_pythonic", "[add(a=1)", "", "the calls are not a Python list"),
        ("llama4_pythonic", "[add(1)]", "", "a call is written name(key=value)"),
        ("llama4_pythonic", "[add(a=__import__('os').system('true'))]", "add", "an argument is not a literal"),
        ("llama4_pythonic", "[add(a={1: 2})]", "add", "an argument is not a literal"),
        ("llama4_pythonic", "[add(a=1e999)]", "add", "an argument is not a literal"),
        ("llama4_pythonic", "[add(a=" + "(" * 10_000, "", "the calls are not a Python list"),
    ],
)  # fmt: skip
def test_a_broken_call_is_returned_with_its_error(name, text, named, error):
    _, [(got, _, reason)] = parse(name, text)
    assert got == named and reason.startswith(error)


def test_calls_in_json_stand_anywhere_in_the_text():
    bare, add = CALLS["json"] % 1, ("add", {"a": 1}, None)
    for written, rest in ((f"So 3.\n```json\n{bare}\n```", "So 3.\n"), (f"```\n{bare}\n```\nDone.", "\nDone."),
                          (f"#### 3\n\n{bare} Done.", "#### 3\n\n Done.")):  # fmt: skip
        assert parse("json", written) == (rest, [add])
    assert parse("json", f"{bare}, {bare}") == (", ", [add, add])
    for text in ('```json\n{"name": "Tom", "age": 3}\n```', "x = {'name': 'add', 'arguments': {}}"):
        assert parse("json", text) == (text, [])


def test_words_of_json_are_literals_of_llama_4():
    assert parse("llama4_pythonic", "[f(a=true, b=[null, false], c=-1)]")[1] == [
        ("f", {"a": True, "b": [None, False], "c": -1}, None)
    ]


@pytest.mark.parametrize("name", ["glm45", "minimax_m2"])
def test_values_follow_the_schema_in_the_formats_without_types(name):
    schema = OpenAIFunctionToolSchema.of("add", "Adds.", {"properties": {"a": {"type": "string"}}})
    schemas = [schema.model_dump(exclude_unset=True, exclude_none=True)]
    assert parse(name, CALLS[name] % 2024, schemas)[1] == [("add", {"a": "2024"}, None)]
    assert parse(name, CALLS[name] % 2024)[1] == [("add", {"a": 2024}, None)]


def test_reading_broken_calls_takes_no_longer_than_their_length_allows():
    pair = "<arg_key>a</arg_key><arg_value>1</arg_value>"
    assert parse("glm45", f"<tool_call>add{pair * 2000}<</tool_call>")[1][0][2].startswith("a call is written")


def test_mistral_reasons_in_tags_of_its_own():
    quoted, made = CALLS["mistral"] % 1, CALLS["mistral"] % '"[THINK]"'
    thought = f"[THINK]I could write {quoted}.[/THINK]"
    assert parse("mistral", f"{thought}No.</s>") == (f"{thought}No.</s>", [])
    assert parse("mistral", thought + made) == (thought, [("add", {"a": "[THINK]"}, None)])
    parser = ToolParser.get_tool_parser("mistral", Text())
    assert parser.message([ord(c) for c in f"{thought}No."])["reasoning_content"] == f"I could write {quoted}."


def test_a_prompt_that_begins_the_reasoning_leaves_its_end_open():
    parser = ToolParser.get_tool_parser("hermes", Text())
    call = CALLS["hermes"] % 1
    for text, number in ((call, 0), (f"write <tool_call> first</think>{call}", 1), (f"{call}</think>{call}", 1)):
        assert len(asyncio.run(parser.extract_tool_calls([ord(c) for c in text], True))[1]) == number


def test_llama3_json():
    call = '{"name": "add", "parameters": {"a": 1}}'
    assert parse("llama3_json", f"<|python_tag|>{call}; {call}<|eom_id|>") == ("", [("add", {"a": 1}, None)] * 2)
    assert parse("llama3_json", f"{call}<|eot_id|>")[1] == [("add", {"a": 1}, None)]
    assert parse("llama3_json", "a plain answer {}")[1] == []


def test_qwen3_coder():
    text = (
        "I look.\n<tool_call>\n<function=search>\n<parameter=query>\nred foxes\n</parameter>\n<parameter=topk>\n3\n"
        '</parameter>\n<parameter=ids>\n[1, 2]\n</parameter>\n'
        '<parameter=quoted>"3"</parameter>\n</function>\n</tool_call>'
    )
    content, calls = parse("qwen3_coder", text)
    assert content == "I look.\n"
    assert calls == [("search", {"query": "red foxes", "topk": 3, "ids": [1, 2], "quoted": '"3"'}, None)]


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


def test_unknown_and_own():
    with pytest.raises(ValueError, match="format='xml' is unknown. Known: deepseek_v3, .*, gpt-oss, hermes"):
        ToolParser.get_tool_parser("xml", Text())

    @ToolParser.register("shout")
    class Shout(ToolParser):
        def parse(self, text):
            return text.upper(), []

    try:
        assert parse("shout", "a") == ("A", [])
    finally:
        del ToolParser._registry["shout"]
