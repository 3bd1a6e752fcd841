"""Chat templates: the same text as transformers', no code, no endless loop; bombs: tests/adversary."""

from concurrent.futures import ThreadPoolExecutor

import pytest

from tests.helpers.models import make_tokenizer
from verl.data import chat_template
from verl.data.chat_template import ChatTemplateError, render_chat

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


NESTED = (
    "{% for a in range(99999) %}{% for b in range(99999) %}{% for c in range(99999) %}{% endfor %}{% endfor %}"
    "{% endfor %}"
)


def test_a_template_is_stopped_outside_the_main_thread_too(monkeypatch):
    plain = with_template(PLAIN[0])
    with ThreadPoolExecutor(1) as threads:
        assert threads.submit(render_chat, plain, CHAT).result() == render_chat(plain, CHAT)
        monkeypatch.setattr(chat_template, "LIMIT_S", 0.3)
        for call in (render_chat, lambda *args: threads.submit(render_chat, *args).result()):
            with pytest.raises(ChatTemplateError, match="did not end within 0.3 s"):
                call(with_template(NESTED), CHAT)


@pytest.mark.process
def test_a_wrong_template_and_a_missing_one_are_reported():
    with pytest.raises(ChatTemplateError, match="TemplateSyntaxError"):
        render_chat(with_template("{% for %}"), CHAT)
    with pytest.raises(ChatTemplateError, match="chat_template is not set"):
        render_chat(with_template(None), CHAT)
    with pytest.raises(ChatTemplateError, match="raised TemplateError: not this one") as caught:
        render_chat(with_template("{{ raise_exception('not\nthis one') }}"), CHAT)
    assert "\n" not in str(caught.value)
