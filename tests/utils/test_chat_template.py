"""Chat templates: the same text as transformers', no code, no endless loop, no bomb."""

import os
import resource
import threading
import time

import psutil
import pytest

from tests.helpers.models import make_tokenizer
from verl.utils import chat_template
from verl.utils.chat_template import ChatTemplateError, render_chat, render_chats

CHAT = [{"role": "user", "content": "1 + 1 = \u2028 é"}, {"role": "assistant", "content": "2"}]
PLAIN = [
    "{% for m in messages %}<|{{ m.role }}|>{{ m['content'] }}{{ eos_token }}{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}",
    "{%- for m in messages if m.role != 'system' -%}{{ m | tojson }}{% if loop.first %}{% continue %}{% endif %}"
    "{% break %}{%- endfor -%} {{ thinking }}",
]


def with_template(template):
    tokenizer = make_tokenizer()
    tokenizer.chat_template = template
    return tokenizer


@pytest.mark.parametrize("template", PLAIN)
def test_a_template_gives_what_transformers_gives(template):
    tokenizer, settings = with_template(template), {"add_generation_prompt": True, "thinking": "yes"}
    assert render_chat(tokenizer, CHAT, **settings) == tokenizer.apply_chat_template(CHAT, tokenize=False, **settings)


def test_a_rendering_is_fast_once_the_process_is_there():
    tokenizer = with_template(PLAIN[0])
    render_chat(tokenizer, CHAT)
    began = time.perf_counter()
    for _ in range(200):
        render_chat(tokenizer, CHAT)
    assert (time.perf_counter() - began) / 200 < 0.01


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


ENDLESS = {
    "nested loops": "{% for a in range(99999) %}{% for b in range(99999) %}{% for c in range(99999) %}{% endfor %}"
    "{% endfor %}{% endfor %}",
    "a power": "{{ 10 ** (10 ** 9) }}",
    "a long text": "{{ 'a' * 10 ** 11 }}",
    "a doubling text": "{% set n = namespace(t='ab') %}{% for a in range(9999) %}{% set n.t = n.t + n.t %}{% endfor %}",
    "recursion": "{% macro m() %}{{ m() }}{% endmacro %}{{ m() }}",
    "a huge list": "{{ (range(99999) | list * 99999) | length }}",
}


@pytest.mark.parametrize("template", ENDLESS.values(), ids=ENDLESS)
def test_every_template_ends_within_two_seconds_of_work(template):
    """CPU seconds of the process, which is all that a template can spend: it cannot sleep."""
    render_chat(with_template(PLAIN[0]), CHAT)
    began = time.monotonic()
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    spent = sum(psutil.Process(chat_template._renderer().process.pid).cpu_times()[:2])  # by the texts before this one
    with pytest.raises(ChatTemplateError) as told:
        render_chat(with_template(template), CHAT)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    assert after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime - spent < 2
    assert time.monotonic() - began < chat_template.PATIENCE_S
    assert "chat template" in str(told.value) and "\n" not in str(told.value)
    assert render_chat(with_template("{{ messages[1].content }}"), CHAT) == "2"  # the next one has a new process


def test_a_wrong_template_and_a_missing_one_are_told():
    with pytest.raises(ChatTemplateError, match="TemplateSyntaxError"):
        render_chat(with_template("{% for %}"), CHAT)
    with pytest.raises(ChatTemplateError, match="chat_template is not set"):
        render_chat(with_template(None), CHAT)
    with pytest.raises(ChatTemplateError, match="not JSON serializable"):
        render_chat(with_template(PLAIN[0]), [{"role": "user", "content": {1, 2}}])


def test_of_many_conversations_each_has_its_own_text_or_error():
    tokenizer = with_template(
        "{% if messages[0].content == 'raise' %}{{ raise_exception('not this one') }}{% endif %}"
        "{% if messages[0].content == 'hang' %}{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}"
        "{% endfor %}{% endif %}{{ messages[0].content }}{{ mark }}"
    )
    said = ["a", "raise", "b", "hang", {1}, "c"]
    found = list(render_chats(tokenizer, [[{"role": "user", "content": text}] for text in said], mark="!"))
    assert [one for one in found if isinstance(one, str)] == ["a!", "b!", "c!"]
    for place, words in ((1, "not this one"), (3, "did not end within 1 s"), (4, "not JSON serializable")):
        assert isinstance(found[place], ChatTemplateError) and words in str(found[place])
    assert list(render_chats(tokenizer, [], mark="!")) == []


def test_the_process_has_no_descriptor_of_ours_and_outlives_the_thread_that_started_it():
    chat_template._of_this_process.clear()
    texts = []
    thread = threading.Thread(target=lambda: texts.append(render_chat(with_template(PLAIN[0]), CHAT)))
    thread.start()
    thread.join()
    child = chat_template._renderer().process.pid
    assert sorted(os.listdir(f"/proc/{child}/fd")) == ["0", "1", "2"]
    assert render_chat(with_template(PLAIN[0]), CHAT) == texts[0]
    assert chat_template._renderer().process.pid == child


def test_a_forked_process_has_a_renderer_of_its_own():
    expected = render_chat(with_template(PLAIN[0]), CHAT)
    child = os.fork()
    if child == 0:
        os._exit(0 if render_chat(with_template(PLAIN[0]), CHAT) == expected else 1)
    assert os.waitpid(child, 0)[1] == 0
    assert render_chat(with_template(PLAIN[0]), CHAT) == expected
