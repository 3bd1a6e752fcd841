"""Chat templates that need memory or time without limit are refused, and the caller's memory does not grow.

Add a template by appending it to the table. Templates that read `messages` get 200 of them.
"""

import os
import threading
import time
import tracemalloc
from concurrent.futures import ThreadPoolExecutor

import psutil
import pytest

from tests.helpers.models import make_tokenizer
from verl.data import chat_template, template_process
from verl.data.chat_template import ChatTemplateError, render_chat

pytestmark = [pytest.mark.process, pytest.mark.timeout(300)]

CHAT = [{"role": "user", "content": "1 + 1"}, {"role": "assistant", "content": "2"}]
MANY = [{"role": "user", "content": "1 + 1" * 200}] * 200
NAMESPACE = "{% set n = namespace(t='ab', u='c', i=9, l=['a']) %}{% for a in range(9999) %}"

REFUSED = {
    "3.4 GB at once": "{{ 'x' * 800000000 }}",
    "2e9": "{% set x = 'x' * 2000000000 %}",
    "1e13": "{{ 'a' * 10000000000000 }}",
    "a list": "{{ ([1] * 800000000) | length }}",
    "a huge list": "{{ (range(99999) | list * 99999999) | length }}",
    "a power": "{{ 10 ** (10 ** 9) }}",
    "powers": "{{ 9 ** (9 ** (9 ** 9)) }}",
    "squares": NAMESPACE + "{% set n.i = n.i * n.i %}{% endfor %}",
    "nested loops": "{% for a in range(99999) %}{% for b in range(99999) %}{{ b }}{% endfor %}{% endfor %}",
    "nested loops without text": "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}",
    "loops over characters": "{% for a in messages %}{% for b in a.content %}{{ messages }}{% endfor %}{% endfor %}",
    "a set block": "{% set x %}{% for a in range(99999) %}{{ 'x' * 99999 }}{% endfor %}{% endset %}",
    "doubling": NAMESPACE + "{% set n.t = n.t + n.t %}{% endfor %}",
    "doubling by ~": NAMESPACE + "{% set n.t = n.t ~ n.t %}{% endfor %}",
    "doubling by two": NAMESPACE + "{% set n.t = n.t ~ n.u %}{% set n.u = n.u ~ n.t %}{% endfor %}",
    "doubling of a list": NAMESPACE + "{% set n.l = n.l + n.l %}{% endfor %}",
    "doubling by replace": NAMESPACE + "{% set n.t = n.t.replace('a', 'aa') %}{% endfor %}",
    "doubling by join": NAMESPACE + "{% set n.t = n.t.join(n.t) %}{% endfor %}",
    "recursion": "{% macro m() %}{{ m() }}{% endmacro %}{{ m() }}",
    "recursion with a text": "{% macro m(t) %}{{ m(t ~ t) }}{% endmacro %}{{ m('ab') }}",
    "recursion of two": "{% macro f() %}{{ g() }}{% endmacro %}{% macro g() %}{{ f() }}{% endmacro %}{{ f() }}",
    "macros in macros": "{% macro m0() %}xx{% endmacro %}"
    + "".join(f"{{% macro m{i + 1}() %}}{{{{ m{i}() }}}}{{{{ m{i}() }}}}{{% endmacro %}}" for i in range(40))
    + "{{ m40() }}",
    "a recursive loop": "{% for a in messages recursive %}{{ loop(messages) }}{% endfor %}",
    "a width": "{{ '%2000000000d' % 1 }}",
    "center": "{{ 'x' | center(2000000000) }}",
    "ljust": "{{ 'x'.ljust(2000000000) }}",
    "indent": "{{ ('x\n' * 9) | indent(800000000) }}",
    "tojson's indent": "{{ [[1]] | tojson(indent=2000000000) }}",
    "a number of many digits": "{{ ('9' * 900000000) | int }}",
    "lipsum": "{{ lipsum(9999999) }}",
    "sorted": "{{ range(99999) | map('string') | list * 9999 | sort | join }}",
}  # fmt: skip


@pytest.fixture
def short_limits(monkeypatch):
    monkeypatch.setattr(chat_template, "LIMIT_S", 1.0)
    monkeypatch.setattr(template_process, "MEMORY_BYTES", 256 << 20)


def with_template(template):
    tokenizer = make_tokenizer()
    tokenizer.name_or_path = "models/evil"
    tokenizer.chat_template = template
    return tokenizer


@pytest.fixture(scope="module", autouse=True)
def started():
    """Start the subprocess before the first test, whose time is measured."""
    assert render_chat(with_template("{{ messages | length }}"), CHAT) == "2"


@pytest.mark.parametrize("template", REFUSED.values(), ids=REFUSED)
def test_a_template_without_end_is_refused_and_takes_no_memory_here(template, short_limits):
    tokenizer, began = with_template(template), time.monotonic()
    tracemalloc.start()
    before = tracemalloc.get_traced_memory()[0]
    try:
        with pytest.raises(ChatTemplateError) as caught:
            render_chat(tokenizer, MANY if "messages" in template else CHAT)
        assert tracemalloc.get_traced_memory()[1] - before < 20 << 20
    finally:
        tracemalloc.stop()
    assert str(caught.value).startswith("models/evil: the chat template ") and "\n" not in str(caught.value)
    assert time.monotonic() - began < 15  # with the start of another process


@pytest.mark.parametrize(
    ("template", "problem"),
    [
        (REFUSED["3.4 GB at once"], "needed more than 256 MiB of memory and was stopped. Correct it, or set another"),
        (REFUSED["a power"], "did not end within 1 s of processor time and was stopped. Correct it, or set"),
        ("{% for i in range(70) %}{{ 'x' * 1000000 }}{% endfor %}",
         "made a text of more than 67108864 characters, which was not taken. Correct it"),
        (REFUSED["recursion"], "raised RecursionError"),
    ],
)  # fmt: skip
def test_the_message_names_folder_and_limit(template, problem, short_limits):
    with pytest.raises(ChatTemplateError) as caught:
        render_chat(with_template(template), CHAT)
    assert str(caught.value).startswith(f"models/evil: the chat template {problem}")


def test_threads_share_a_subprocess_and_a_forked_process_starts_another():
    tokenizer = with_template("{{ messages[0].content }}")
    chats = [[{"role": "user", "content": str(i)}] for i in range(40)]
    with ThreadPoolExecutor(4) as threads:
        assert list(threads.map(lambda chat: render_chat(tokenizer, chat), chats)) == [str(i) for i in range(40)]
    mine = [p for p in psutil.Process().children() if "template_process" in " ".join(p.cmdline())]
    assert len(mine) == 1
    if (child := os.fork()) == 0:
        code = 1
        try:
            code = 0 if render_chat(tokenizer, chats[7]) == "7" else 1
        finally:
            os._exit(code)
    assert render_chat(tokenizer, chats[8]) == "8"
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert mine[0].is_running() and threading.active_count() < 50


def test_a_subprocess_that_was_killed_is_replaced():
    tokenizer = with_template("x")
    (process,) = [p for p in psutil.Process().children() if "template_process" in " ".join(p.cmdline())]
    process.terminate()
    process.wait(10)
    assert render_chat(tokenizer, CHAT) == "x"
    assert [p for p in psutil.Process().children() if "template_process" in " ".join(p.cmdline())] != [process]
