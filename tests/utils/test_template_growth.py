"""Bounds on what chat templates make: by hand, against what they make, and none for templates that grow."""

import pytest
from jinja2 import Environment

from tests.helpers.chat_templates import FORMATS, byte_tokenizer
from verl.data.chat_template import _size
from verl.data.template_growth import growth
from verl.data.template_process import TEXT_LENGTH


def characters(template, size):
    bound = growth(template)
    return float("inf") if bound is None else sum(factor * size**n for n, factor in enumerate(bound))


@pytest.mark.parametrize(
    ("template", "bound"),
    [
        ("", ()),
        ("abc", (3,)),
        ("{{ messages[0].content }}", (0, 1)),
        ("{{ 'ab' ~ messages[0].content }}", (4 - 2, 1)),
        ("{% for m in messages %}{{ m.content }}{% endfor %}", (0, 1)),  # contents together are as long as the messages
        ("{% for m in messages %}<|{{ m.role }}|>{{ m.content }}{% endfor %}", (0, 6)),
        ("{% for m in messages %}{% for p in m.content %}{{ p.text }}-{% endfor %}{% endfor %}", (0, 2)),
        ("{% for m in messages %}{% for o in messages %}.{% endfor %}{% endfor %}", (0, 0, 1)),
        ("{% for m in messages %}{% for o in messages %}{{ m.content }}{% endfor %}{% endfor %}", (0, 0, 1)),
        ("{% for i in range(9) %}{% for j in range(8) %}abc{% endfor %}{% endfor %}", (216,)),
        ("{% macro f(c) %}[{{ c }}]{% endmacro %}{% for m in messages %}{{ f(m.content) }}{% endfor %}", (0, 5)),
        ("{% set n = namespace(t='') %}{% for m in messages %}{% set n.t = n.t + m.content %}{% endfor %}{{ n.t }}",
         (0, 2)),  # made and printed
    ],
)  # fmt: skip
def test_bounds_by_hand(template, bound):
    found = growth(template)
    assert len(found) <= max(len(bound), 3)
    # Results of expressions count too, so a bound can be a few times larger than what is printed.
    assert all(low <= high <= 4 * low + 80 for low, high in zip(bound, found, strict=False)), found
    assert not any(found[len(bound) :])


@pytest.mark.parametrize("format", FORMATS.values(), ids=FORMATS)
def test_formats_of_publishers_stay_in_this_process(format):
    assert characters(format.template, 100_000) < TEXT_LENGTH and len(growth(format.template)) == 2
    tokenizer = byte_tokenizer(format)
    chat = [{"role": "user", "content": "\n\u2028<" * 50}, {"role": "assistant", "content": ""}] * 20
    text = tokenizer.apply_chat_template(chat, tokenize=False)
    assert 2000 < len(text) <= characters(format.template, _size(chat))


ROUNDS = "{% for a in messages %}{% for b in a.content %}"
END = "{% endfor %}{% endfor %}"
GROWING = {
    "a long text": "{{ 'x' * 800000000 }}",
    "a long text by a number of the data": "{{ 'x' * messages[0].number }}",
    "a long text by a length": "{{ 'x' * 100000 * messages | length }}",
    "a long text in a list": "{{ ['x'] * 800000000 }}",
    "a length times a length": "{{ ('x' * (messages | length)) * (messages | length) }}",
    "a power": "{{ 10 ** (10 ** 9) }}",
    "range": "{% for a in range(800000000) %}x{% endfor %}",
    "range of a text's number": "{% for a in range('800000000' | int) %}x{% endfor %}",
    "range of a quotient": "{% for a in range((1 / 0.000000001) | int) %}x{% endfor %}",
    "range of a quotient without int": "{% for a in range(1 // 0.000000001) %}x{% endfor %}",
    "range of a remainder": "{% for a in range(-1 % 800000000) %}x{% endfor %}",
    "range of a counter": "{% set n = namespace(i=9) %}{% for a in messages %}{% set n.i = n.i * 9 %}{% endfor %}"
    "{% for a in range(n.i) %}x{% endfor %}",
    "nested ranges": "{% for a in range(99999) %}{% for b in range(99999) %}x{% endfor %}{% endfor %}",
    "rounds over characters": f"{ROUNDS}{{{{ messages[0].content }}}}{END}",
    "rounds over characters and a copy": f"{ROUNDS}{{% set x = messages[0].content %}}{{{{ x }}}}{END}",
    "doubling": "{% set n = namespace(t='ab') %}{% for a in messages %}{% set n.t = n.t + n.t %}{% endfor %}",
    "doubling by ~": "{% set n = namespace(t='ab') %}{% for a in messages %}{% set n.t = n.t ~ n.t %}{% endfor %}",
    "doubling by a copy": "{% set n = namespace(t='ab') %}{% for a in messages %}{% set c = n.t %}"
    "{% set n.t = c ~ c %}{% endfor %}",
    "doubling by two": "{% set n = namespace(a='a', b='b') %}{% for a in messages %}{% set n.a = n.a ~ n.b %}"
    "{% set n.b = n.b ~ n.a %}{% endfor %}",
    "doubling of a list": "{% set n = namespace(t=['a']) %}{% for a in messages %}{% for x in n.t %}"
    "{% set n.t = n.t + [x] %}{% endfor %}{% endfor %}",
    "doubling by a filter": "{% set n = namespace(t='ab') %}{% for a in messages %}"
    "{% set n.t = n.t | replace('a', 'aa') %}{% endfor %}",
    "doubling by a macro": "{% macro f(x) %}{{ x }}{{ x }}{% endmacro %}{% set n = namespace(t='ab') %}"
    "{% for a in messages %}{% set n.t = f(n.t) %}{% endfor %}",
    "doubling by a block": "{% set n = namespace(t='ab') %}{% for a in messages %}"
    "{% set n.t %}{{ n.t }}{{ n.t }}{% endset %}{% endfor %}",
    "doubling by another name": "{% set n = namespace(t='ab') %}{% set k = n %}{% for a in messages %}"
    "{% set k.t = n.t ~ n.t %}{% endfor %}",
    "doubling by tojson": "{% set n = namespace(t='a') %}{% for a in messages %}{% set n.t = n.t | tojson %}"
    "{% endfor %}",
    "doubling of a number": "{% set n = namespace(i=2) %}{% for a in messages %}{% set n.i = n.i + n.i %}{% endfor %}",
    "squares": "{% set n = namespace(t=99) %}{% for a in messages %}{% set n.t = n.t * n.t %}{% endfor %}",
    "forty doublings": "{% set a = messages[0].content %}" + "{% set a = a ~ a %}" * 40,
    "macros in macros": "{% macro m0() %}xx{% endmacro %}"
    + "".join(f"{{% macro m{i + 1}() %}}{{{{ m{i}() }}}}{{{{ m{i}() }}}}{{% endmacro %}}" for i in range(30))
    + "{{ m30() }}",
    "recursion": "{% macro m() %}{{ m() }}{% endmacro %}{{ m() }}",
    "a recursive loop": "{% for a in messages recursive %}x{{ loop(messages) }}{% endfor %}",
    "a width": "{{ '%800000000d' % 1 }}",
    "a width of the data": "{{ bos_token % 1 }}",
    "a width in a variable": "{% set w = '%800000000d' %}{{ w % 1 }}",
    "a width by format": "{{ '{:800000000}'.format(1) }}",
    "a width by the filter format": "{{ '%800000000d' | format(1) }}",
    "center": "{{ 'x' | center(800000000) }}",
    "ljust": "{{ 'x'.ljust(800000000) }}",
    "zfill": "{{ 'x'.zfill(800000000) }}",
    "indent": "{{ 'x\ny' | indent(800000000) }}",
    "tojson's indent": "{{ messages | tojson(indent=800000000) }}",
    "a separator": "{{ messages | join('x' * 800000000) }}",
    "a separator of the data": "{{ messages | join(messages[0].content) }}",
    "a method's separator": "{{ messages[0].content.join(messages) }}",
    "a replacement": "{{ messages[0].content.replace('', messages[0].content) }}",
    "a default for each": "{{ messages | map('default', 'x' * 800000000) | join }}",
    "an attribute's default for each": "{{ messages | map(attribute='y', default=messages[0].content) | join }}",
    "escapes": "{% set n = namespace(t='<') %}{% for a in messages %}{% set n.t = ('' | safe) ~ n.t %}{% endfor %}",
    "batch": "{{ messages | batch(800000000, 'x') | list }}",
    "lipsum": "{{ lipsum(800000) }}",
    "a set that a branch hides": "{% if false %}{% set messages = 1 %}{% endif %}" + ROUNDS + "{{ messages }}" + END,
    "what a macro sees of a branch": "{% set x = '' %}{% macro m() %}{{ x }}{% endmacro %}{% if true %}"
    "{% set x = 'x' * 800000000 %}{{ m() }}{% endif %}",
    "an attribute of another object": "{% macro m(n) %}" + ROUNDS + "{{ n.content }}" + END + "{% endmacro %}"
    "{% set n = namespace(content=1) %}{{ m(messages[0]) }}",
    "rounds over a namespace": "{% set n = namespace(t='') %}{% for a in messages %}{% for b in messages %}"
    "{% set n.t = n.t ~ a.content %}{% endfor %}{% endfor %}{% for c in n.t %}{{ messages }}{% endfor %}",
    "rounds over parts of a namespace": "{% set n = namespace(t=[]) %}{% for a in messages %}"
    "{% set n.t = n.t + [a.content ~ 'xxxxxxxx' ~ a.content] %}{% endfor %}{% for c in n.t %}{% for d in c %}"
    "{{ messages }}{% endfor %}{% endfor %}",
    "many empty texts": "{% for a in range(9999) %}{% for b in range(9999) %}{{ '' }}{% endfor %}{% endfor %}",
    "many pieces": "{{ ('a b ' * 15000000).split(' ') | length }}",
    "a loop over a constant": "{% for x in 'x' * 90000 %}{% for y in 'x' * 90000 %}{{ y }}{% endfor %}{% endfor %}",
}  # fmt: skip


@pytest.mark.parametrize("template", GROWING.values(), ids=GROWING)
def test_templates_that_grow_have_no_small_bound(template):
    Environment(extensions=["jinja2.ext.loopcontrols"]).parse(template)
    assert characters(template, 10_000) > TEXT_LENGTH


def test_an_analysis_ends_soon():
    many = "".join(f"{{% set n.a{i + 1} = n.a{i} %}}" for i in range(300))
    assert growth("{% set n = namespace(a0='x') %}{% for a in messages %}" + many + "{% endfor %}") is None
    assert growth("{{ " + "(" * 5000 + "1" + ")" * 5000 + " }}") is None
    assert growth("{% for %}") is None
    assert len(growth("{{ " + "1 + " * 100 + "1 }}{{ " + "9" * 400 + " }}")) == 1
