"""The rule by which messages are added, on chat templates of many formats: every text by hand."""

import json

import pytest
from transformers import PreTrainedTokenizerBase

from tests.helpers.chat_templates import FORMATS, HERMES_CALLS, IM, IM_PROMPT, Format, byte_tokenizer, turns
from verl.agents.message_encoder import MessageEncoder
from verl.utils.chat_template import extract_system_prompt_and_generation, initialize_system_prompt

TOOL, USER = {"role": "tool", "content": "42", "name": "tool"}, {"role": "user", "content": "Again"}


def encoder_of(format) -> tuple[MessageEncoder, PreTrainedTokenizerBase]:
    tokenizer = byte_tokenizer(format)
    stops = tokenizer.convert_tokens_to_ids([format.stop, *format.more_stops])
    return MessageEncoder(tokenizer, stops), tokenizer


def test_half_a_surrogate_pair_is_replaced():
    """A model may write one into the arguments of a call; tokenizers refuse it."""
    encoder, tokenizer = encoder_of(FORMATS["qwen3"])
    half, whole = ([{"role": "user", "content": f"a{text}b"}] for text in ("\ud83c", "?"))
    assert encoder.prompt(half) == encoder.prompt(whole)
    assert encoder.encode_appended(half) == encoder.encode_appended(whole)


@pytest.mark.parametrize("role", ["tool", "user"])
@pytest.mark.parametrize("name", FORMATS)
def test_what_follows_the_end_of_a_turn(name, role):
    encoder, tokenizer = encoder_of(FORMATS[name])
    expected = getattr(FORMATS[name], role)
    message = TOOL if role == "tool" else USER
    if expected is None:
        with pytest.raises(ValueError, match=f"role '{role}'"):
            encoder.check([role])
        return
    encoder.check([role])
    assert tokenizer.decode(encoder.encode_appended([message])) == expected


@pytest.mark.parametrize("name", [name for name, format in FORMATS.items() if format.tool is not None])
def test_several_answers_of_tools(name):
    encoder, tokenizer = encoder_of(FORMATS[name])
    text = tokenizer.decode(encoder.encode_appended([TOOL, {**TOOL, "content": "58"}]))
    one = FORMATS[name].tool
    end = one[one.index("42") + 2 :]
    assert text.index("42") < text.index("58") and text.endswith((end, end.replace("call00000", "call00001")))


def test_a_template_that_names_the_call_of_an_answer_names_the_tool():
    """Some look the name, or the id, of an answer's call up in the turn before."""
    found = "{% for t in messages[loop.index0 - 1].tool_calls if t.id == m.tool_call_id %}{{ t.function.name }}: "
    template = turns(IM % "user", IM % "assistant", found + "{{ c }}{% endfor %}")
    encoder, tokenizer = encoder_of(Format(template, "<|im_end|>", None, None))
    message = {"role": "tool", "name": "look", "content": "42"}
    assert tokenizer.decode(encoder.encode_appended([message])) == "\nlook: 42"


@pytest.mark.parametrize(
    ("ended", "expected"),
    [("<|observation|>", "\n42<|assistant|>"), ("<|user|>", "<|observation|>\n42<|assistant|>"),
     ("x", "<|observation|>\n42<|assistant|>")],
)  # fmt: skip
def test_a_message_that_begins_with_the_stop_token_has_it_once(ended, expected):
    """GLM's turns end with the first token of the next message, unless the model chose another, or was cut off."""
    encoder, tokenizer = encoder_of(FORMATS["glm4"])
    after = tokenizer(ended, add_special_tokens=False)["input_ids"][-1]
    assert tokenizer.decode(encoder.encode_appended([TOOL], after=after)) == expected


@pytest.mark.parametrize("name", ["glm4", "apertus", "apriel", "chatml"])
def test_a_conversation_whose_last_turn_the_template_does_not_end_is_no_deviation(name):
    encoder, tokenizer = encoder_of(FORMATS[name])
    messages = [{"role": "user", "content": "Why?"}, {"role": "assistant", "content": "So."}]
    prompt = encoder.prompt(messages[:1])
    written = tokenizer("\n" * (name == "glm4") + "So." + FORMATS[name].stop, add_special_tokens=False)["input_ids"]
    assert encoder.deviation(prompt + written, messages) is None
    assert "against" in encoder.deviation(prompt + written[1:], messages)


def test_arguments_are_given_as_text_to_a_template_that_raises_for_an_object():
    shows = "<call>{{ '' + m.tool_calls[0].function.arguments }}</call><|im_end|>"
    tokenizer = byte_tokenizer(Format(turns(IM % "user", shows), "<|im_end|>", None, None))
    call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": {"a": [1, "é"]}}}
    messages = [{"role": "user", "content": "?"}, {"role": "assistant", "content": "", "tool_calls": [call]}]
    text = tokenizer.decode(MessageEncoder(tokenizer, []).prompt(messages))
    assert json.loads(text.partition("<call>")[2].partition("</call>")[0]) == {"a": [1, "é"]}
    assert call["function"]["arguments"] == {"a": [1, "é"]}, "the messages were changed"


MOVES = "{% if loop.last %}(rules){% endif %}"


def test_a_template_that_rewrites_turns_is_checked_by_what_it_renders_at_once():
    answer = "<|im_start|>assistant\n{{ c }}" + HERMES_CALLS + "<|im_end|>\n" + MOVES
    template = turns(IM % "user" + MOVES, answer, IM % "tool" + MOVES).replace("<|im_end|>\n", "!")
    encoder, tokenizer = encoder_of(Format(template, "<|im_end|>", None, None))
    for role in ("tool", "user"):
        hint = "Set actor_rollout_ref.rollout.multi_turn.row_per_turn=true"
        with pytest.raises(ValueError, match=f"role '{role}' cannot be added.* {hint}"):
            encoder.check([role])
        encoder.check([role], at_once=True)
    tokenizer.chat_template = template.replace(HERMES_CALLS, "")
    encoder.check(["user"], at_once=True)
    with pytest.raises(ValueError, match="calls of tools out. Set .*template to one that renders calls of tools"):
        encoder.check(["tool"], at_once=True)
    with pytest.raises(ValueError, match="leaves messages of role 'user' out. Set .*that renders messages of role 'u"):
        tokenizer.chat_template = turns("?", "<|im_start|>assistant\n{{ c }}<|im_end|>\n")
        encoder.check(["user"], at_once=True)
    with pytest.raises(ValueError, match="no tools"):
        encoder.check(["tool"], at_once=True)
    with pytest.raises(ValueError, match="role 'tool' cannot be added.*no (tools|system message). .*_chat_template"):
        encoder.check(["tool"])


SYSTEM = "<|im_start|>system\n{{ who or 'Be good.' }}<|im_end|>\n"


@pytest.mark.parametrize(
    ("template", "expected"),
    [
        (turns(IM % "user", IM % "assistant", start=SYSTEM, prompt=IM_PROMPT), SYSTEM),
        (turns(IM % "user", IM % "assistant", start=SYSTEM, prompt=IM_PROMPT, end="<|endoftext|>"), SYSTEM),
        (turns("{% if loop.index0 % 2 %}{{ raise_exception('roles must alternate') }}{% endif %}" + IM % "user",
               IM % "assistant", start=SYSTEM), SYSTEM),
        (FORMATS["olmo2"].template, "<|endoftext|>"),
        (FORMATS["chatml"].template, ""),
    ],
)  # fmt: skip
def test_the_default_system_prompt_is_what_stands_before_the_first_turn(template, expected):
    tokenizer = byte_tokenizer(Format(template, "<|im_end|>", None, None))
    if template == FORMATS["chatml"].template:
        assert tokenizer.decode(extract_system_prompt_and_generation(tokenizer)[1]) == IM_PROMPT
    for who in ("Be good.", "Be bad."):
        text = tokenizer.decode(initialize_system_prompt(tokenizer, who=who))
        assert text == expected.replace("{{ who or 'Be good.' }}", who)


@pytest.mark.parametrize("name", FORMATS)
def test_the_parts_of_a_conversation_are_the_ids_of_all_of_it(name):
    """Where a template renders earlier turns alike, the appended ids are those of the complete conversation."""
    format = FORMATS[name]
    encoder, tokenizer = encoder_of(format)
    question, answer = {"role": "user", "content": "Why?"}, {"role": "assistant", "content": "So."}
    if format.user is None or name == "qwen3":  # qwen3 drops the empty thought of an earlier turn
        return
    whole = encoder.prompt([question, answer, USER])
    prompt = encoder.prompt([question])
    written = tokenizer.decode(whole)[len(tokenizer.decode(prompt)) :].split(format.stop)[0] + format.stop
    generated = tokenizer(written, add_special_tokens=False)["input_ids"]
    assert prompt + generated + encoder.encode_appended([USER]) == whole
