"""Chat templates: the text is that of transformers, and no code runs. Limits: tests/adversary/test_templates.py."""

import os
import signal
import subprocess
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
from transformers import PreTrainedTokenizerFast

from tests.helpers.chat_templates import FORMATS
from tests.helpers.models import make_tokenizer
from verl.data import chat_template
from verl.data.chat_template import ChatTemplateError, answer_text, render_chat

CHAT = [{"role": "user", "content": "1 + 1 = \u2028 é"}, {"role": "assistant", "content": "2"}]
PLAIN = [
    "{% for m in messages %}<|{{ m.role }}|>{{ m['content'] }}{{ eos_token }}{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}",
    "{%- for m in messages if m.role != 'system' -%}{{ m | tojson }}{% if loop.first %}{% continue %}{% endif %}"
    "{% break %}{%- endfor -%} {{ thinking }}",
    "{{ messages | tojson(indent=2, sort_keys=true) }}{{ eos_token }}{{ tools }}{{ documents }}{{ padding }}\ud800\n",
    "{% for m in messages %}\n  {% generation %}{% set x = m.content %}<{{ x }}>{% endgeneration %}\n{% endfor %}",
    "{{ tools | tojson }}{{ strftime_now('%Y') }}{{ namespace(a='<b>').a ~ ('&' | e) }}{{ range is defined }}",
]


def with_template(template):
    tokenizer = make_tokenizer()
    tokenizer.chat_template = template
    return tokenizer


def add(left: int, right: int) -> int:
    """Add two numbers.

    Args:
        left: the first.
        right: the second.
    """
    return left + right


@pytest.mark.parametrize("template", [*PLAIN, *(format.template for format in FORMATS.values())])
def test_a_template_gives_what_transformers_gives(template):
    tokenizer = with_template(template)
    for settings in (
        {},
        {"add_generation_prompt": True, "thinking": "yes", "range": 3, "padding": True},
        {"tools": [{"a": "é"}, add]},
        {"documents": [{"title": "a", "text": "b"}], "bos_token": "<b>"},
        {"chat_template": PLAIN[0]},
    ):
        expected = tokenizer.apply_chat_template(CHAT, tokenize=False, **settings)
        assert render_chat(tokenizer, CHAT, **settings) == expected


def test_messages_are_continued_as_by_transformers():
    thought = [{"role": "assistant", "content": "4", "thought": "2 + 2 "}]
    by_thought = "{% for m in messages %}{{ m.content }}<think>{{ m.thought }}</think>{% endfor %}"
    for template, messages, field in ((PLAIN[0], CHAT, True), (by_thought, thought, "thought")):
        tokenizer, settings = with_template(template), {"continue_final_message": field}
        text = render_chat(tokenizer, messages, **settings)
        assert text == tokenizer.apply_chat_template(messages, tokenize=False, **settings)
        assert text.endswith("2" if field is True else "2 + 2 ")
    with pytest.raises(ChatTemplateError, match="are not compatible"):
        render_chat(tokenizer, CHAT, add_generation_prompt=True, continue_final_message=True)


class WithRendering(PreTrainedTokenizerFast):
    """A tokenizer with Python code of its own, as some models have."""

    def apply_chat_template(self, messages, tokenize, pause):
        ends = time.monotonic() + pause
        while time.monotonic() < ends:  # computes: a limit counts processor time
            pass
        return "rendered here"


ESCAPES = [
    "{{ ''.__class__.__mro__[1].__subclasses__() }}",
    "{{ cycler.__init__.__globals__.os.system('touch SENTINEL') }}",
    "{{ messages.__class__.__base__.__subclasses__()[0].__init__.__globals__ }}",
    "{{ self.__init__.__globals__['__builtins__']['open']('SENTINEL', 'w') }}",
    "{{ raise_exception.__globals__['sys'].modules['os'].system('touch SENTINEL') }}",
    "{{ (messages | attr('__class__') | attr('__base__')).__subclasses__() }}",
    "{{ lipsum.__globals__['os'].popen('touch SENTINEL').read() }}",
    "{% include 'SENTINEL' %}",
    "{{ '%s'.format.__self__.__class__.__mro__ }}",
    "{{ messages.append({'role': 'x'}) }}",
]


@pytest.mark.process
@pytest.mark.parametrize("template", ESCAPES)
def test_no_template_runs_code(template, tmp_path):
    sentinel = tmp_path / "ran"
    try:
        text = render_chat(with_template(template.replace("SENTINEL", str(sentinel))), CHAT)
    except ChatTemplateError as error:
        assert "\n" not in str(error)
    else:  # jinja's sandbox makes an undefined value of it
        assert "class" not in text and "module" not in text
    assert not sentinel.exists()


def test_a_tokenizer_that_renders_in_python_has_a_time_limit_in_every_thread(monkeypatch):
    tokenizer = WithRendering(tokenizer_object=make_tokenizer().backend_tokenizer)
    monkeypatch.setattr(chat_template, "LIMIT_S", 0.3)
    with ThreadPoolExecutor(1) as threads:
        for call in (render_chat, lambda *args, **kwargs: threads.submit(render_chat, *args, **kwargs).result()):
            assert call(tokenizer, CHAT, pause=0) == "rendered here"
            with pytest.raises(ChatTemplateError, match="did not end within 0.3 s of processor time"):
                call(tokenizer, CHAT, pause=60)


@pytest.mark.process
def test_a_busy_machine_is_no_reason_to_refuse_a_template(monkeypatch):
    monkeypatch.setattr(chat_template, "LIMIT_S", 0.5)
    tokenizer = with_template("{{ messages[0]['content'] }}")
    render_chat(tokenizer, CHAT)
    pid = chat_template._process._process.pid
    os.kill(pid, signal.SIGSTOP)
    subprocess.Popen(["sh", "-c", f"sleep 1.5; kill -CONT {pid}"])
    assert render_chat(tokenizer, CHAT) == CHAT[0]["content"]
    assert chat_template._process._process.pid == pid


@pytest.mark.process
def test_a_wrong_template_and_a_missing_one_are_reported():
    with pytest.raises(ChatTemplateError, match="TemplateSyntaxError"):
        render_chat(with_template("{% for %}"), CHAT)
    with pytest.raises(ChatTemplateError, match="chat_template is not set"):
        render_chat(with_template(None), CHAT)
    with pytest.raises(ChatTemplateError, match="raised TemplateError: not this one") as caught:
        render_chat(with_template("{{ raise_exception('not\nthis one') }}"), CHAT)
    assert "\n" not in str(caught.value)


def test_an_answers_text_keeps_markers_and_leaves_out_ends_of_turns_and_padding():
    left_out = ["<|im_end|>", "<|image_pad|>", "[PAD]"]
    kept = ["<think>", "<scratchpad>", "[/TOOL]"]
    tokenizer = make_tokenizer([*left_out, *kept, "a", "b"])
    tokenizer.add_special_tokens({"additional_special_tokens": left_out + kept})
    tokenizer.chat_template = "{% for m in messages %}{{ m.content }}<|im_end|> {% endfor %}"
    ids = tokenizer("<pad> <bos> a <think> <|image_pad|> b <|im_end|> <scratchpad> [PAD] [/TOOL] <eos> b")["input_ids"]
    assert answer_text(tokenizer, ids) == "a <think> b <scratchpad> [/TOOL] b"
    assert answer_text(tokenizer, []) == ""


def test_without_a_template_ends_are_those_of_the_tokenizer():
    tokenizer = make_tokenizer(["a", "<think>"])
    tokenizer.add_special_tokens({"additional_special_tokens": ["<think>"]})
    tokenizer.chat_template = None
    assert answer_text(tokenizer, tokenizer("<think> a <eos> <pad>")["input_ids"]) == "<think> a"
