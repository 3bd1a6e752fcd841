"""How long the texts of a chat template can get, by its syntax tree: a bound for every conversation of a given size.

A loop adds up what its body makes: its elements together are as long as what the loop runs through, anything else
counts once for each element. Macros are followed at each call. What is not known here has no bound.
"""

from __future__ import annotations

import functools
import math
import re
from collections import defaultdict
from collections.abc import Iterable
from typing import Any

from jinja2 import Environment, nodes
from jinja2.exceptions import TemplateError
from jinja2.ext import Extension

from verl.data import template_sizes as sizes
from verl.data.template_sizes import (
    ALONE,
    GIVEN,
    NUMBER_LENGTH,
    WILD,
    Growth,
    Size,
    any_of,
    constant,
    number_of,
    total,
)

Names = dict[str, Size]

_STEPS, _PASSES = 20_000, 4  # of an analysis: calls of macros within macros can multiply
# What makes nothing longer than it was.
_KEEPING = set(
    "trim lower upper capitalize title list items dictsort first last sort unique reverse min max select reject "
    "selectattr rejectattr default d strip lstrip rstrip removeprefix removesuffix keys values get".split()
)
_COUNTING = set(
    "length count startswith endswith find rfind index isdigit isnumeric isalpha isalnum isspace isupper "
    "islower".split()
)
_NUMBERS = {"int", "float", "abs", "round"}
_SPLITTING = {"split", "rsplit", "splitlines", "partition", "rpartition"}  # an empty text becomes one piece
_ESCAPING = {"tojson": 6, "string": 10}  # by how much a character can get longer
_ENTRY = 16  # characters that one entry of a list takes the memory of
_INFINITE = 1e300
_MARKUP = 5  # by how much a character can get longer in a text that is added to a "safe" one
_LOOP_NUMBERS = {"index", "index0", "revindex", "revindex0", "length", "depth", "depth0", "first", "last"}
_PLAIN_FORMAT = re.compile(r"(?:[^{}]|\{\w*\})*")  # no width


class _Generation(Extension):
    tags = {"generation"}  # of transformers

    def parse(self, parser: Any) -> nodes.Node:
        line = next(parser.stream).lineno
        return nodes.Scope(parser.parse_statements(("name:endgeneration",), drop_needle=True)).set_lineno(line)


class Unbounded(Exception):
    """The template may make texts of any length, or uses what the analysis does not know."""


@functools.lru_cache(maxsize=64)
def growth(template: str) -> Growth | None:
    """The bound on all that a rendering makes; None where there is none, or the analysis finds none.

    (a, b, c) stands for a + b S + c S**2 characters, where S is the size of what the template is given: characters of
    its texts, one for each entry of its lists and objects, and 20 for each number.
    """
    environment = Environment(extensions=[_Generation, "jinja2.ext.loopcontrols"], trim_blocks=True, lstrip_blocks=True)
    try:
        tree = environment.parse(template)
        texts: set[Any] = set()  # attributes of namespaces that are not always numbers
        for _ in range(_PASSES):
            analysis = _Analysis(tree, texts)
            bound = analysis.run(tree)
            if analysis.texts == texts:
                return bound
            texts = analysis.texts
    except (Unbounded, TemplateError, RecursionError):
        pass
    return None


class _Analysis:
    def __init__(self, tree: nodes.Template, texts: set[Any]) -> None:
        self.steps = 0
        self.loops: list[Size] = []  # what each runs through, as a bound that holds in all rounds of other loops
        self.made = Size()  # printed so far, in one round of the current loop
        self.added: dict[Any, Size] = {}  # to attributes of namespaces, likewise
        self.put: dict[Any, list[Size]] = defaultdict(list)  # into attributes of namespaces, one after another
        self.seen: list[Size] = []  # results of expressions, which are there one at a time
        self.held: list[Size] = []  # values of names
        self.macros = {macro.name: macro for macro in tree.find_all(nodes.Macro)}
        self.calls: list[str] = []
        self.top: dict[str, Size] = {}
        self.spaces = {a.target.name for a in tree.find_all(nodes.Assign) if isinstance(a.target, nodes.Name)
                       and isinstance(a.node, nodes.Call) and isinstance(a.node.node, nodes.Name)
                       and a.node.node.name == "namespace"}  # fmt: skip
        self.known_texts, self.texts = texts, set(texts)

    def run(self, tree: nodes.Template) -> Growth:
        self.block(tree.body, self.top)
        inside: dict[Any, Growth] = {}
        for owner in {*self.added, *self.put}:
            self.resolve(owner, inside, ())
        largest = sizes.largest(*(sizes.polynomial(value, inside) for value in self.seen))
        held = (sizes.polynomial(value, inside) for value in (self.made, *self.held))
        return sizes.added(largest, *held, *inside.values())

    def resolve(self, owner: Any, inside: dict[Any, Growth], waiting: tuple[Any, ...]) -> None:
        """Put the bound of an attribute, after those it is made of, into `inside`."""
        if owner in waiting:
            raise Unbounded
        if owner not in inside:
            values = [*self.put[owner], self.added.get(owner, Size())]
            for other in {one for value in values for one, _ in value.terms if isinstance(one, tuple)}:
                self.resolve(other, inside, (*waiting, owner))
            inside[owner] = sizes.added(*(sizes.polynomial(value, inside) for value in values))

    def step(self) -> None:
        self.steps += 1
        if self.steps > _STEPS:
            raise Unbounded

    def everywhere(self, value: Size) -> Size:
        """A bound that holds in every round of the loops around it."""
        parts = []
        for (owner, n), k in value.terms.items():
            whole = self.loops[owner].terms if isinstance(owner, int) else {(owner, 0): 1.0}
            parts += [Size({(root, n + m): k * times}) for (root, m), times in whole.items()]
        return Size(total(parts).terms, value.number, value.markup)

    # statements

    def block(self, body: Iterable[nodes.Node], names: Names) -> None:
        for node in body:
            self.step()
            handle = getattr(self, f"do_{type(node).__name__.lower()}", None)
            if handle is None:
                raise Unbounded
            handle(node, names)

    def do_output(self, node: nodes.Output, names: Names) -> None:
        parts = [self.value(part, names).text() for part in node.nodes]
        self.made = total([self.made, constant(len(parts)), *parts])  # an empty text has its place in a list

    def do_if(self, node: nodes.If, names: Names) -> None:
        self.value(node.test, names)
        branches, top = [], self.top
        for body in (node.body, *([e] for e in node.elif_), node.else_):
            own = dict(names)
            if names is top:  # macros see what is set here
                self.top = own
            self.block(body, own)
            branches.append(own)
        self.top = top
        for name in {name for own in branches for name in own}:
            values = [self.named(name, own) for own in branches]
            names[name] = values[0] if all(value is values[0] for value in values) else any_of(values)

    def do_for(self, node: nodes.For, names: Names) -> None:
        if node.recursive:
            raise Unbounded
        elements, before = self.value(node.iter, names), (self.made, self.added)
        if elements.of(WILD):
            raise Unbounded
        loop, own = len(self.loops), dict(names)
        self.loops.append(self.everywhere(elements))
        each = self.loops[loop] if elements.number else Size({(loop, 0): 1.0}, markup=elements.markup)  # range()
        self.assign(node.target, each, own)
        own["loop"] = elements  # `loop.index` and the like
        if node.test is not None:
            self.value(node.test, own)
        self.made, self.added = Size(), {}
        self.block(node.body, own)
        self.made = total([before[0], self.rounds(self.made, loop, elements)])
        added = {owner: self.rounds(value, loop, elements) for owner, value in self.added.items()}
        self.added = before[1] | {owner: total([before[1].get(owner, Size()), v]) for owner, v in added.items()}
        self.block(node.else_, dict(names))

    def rounds(self, value: Size, loop: int, elements: Size) -> Size:
        """What all rounds of a loop make of this in each."""
        parts = []
        for (owner, n), k in value.terms.items():
            if owner in (loop, ALONE):  # together as much as what the loop runs through
                parts += [Size({(whole, n + m): k * times}) for (whole, m), times in elements.terms.items()]
                continue
            for (root, m), times in self.loops[loop].terms.items():  # the same again, as often as there are elements
                if isinstance(root, tuple):
                    raise Unbounded
                parts.append(Size({(owner, n + m + (root == GIVEN)): k * times}))
        return total(parts)

    def do_assign(self, node: nodes.Assign, names: Names) -> None:
        if isinstance(node.target, nodes.Name) and node.target.name in self.spaces:
            call = node.node
            if not isinstance(call, nodes.Call) or call.args or call.dyn_args or call.dyn_kwargs:
                raise Unbounded
            for pair in call.kwargs:
                self.keep((node.target.name, pair.key), self.value(pair.value, names))
        else:
            self.assign(node.target, self.value(node.node, names), names)

    def do_assignblock(self, node: nodes.AssignBlock, names: Names) -> None:
        if node.filter is not None:
            raise Unbounded
        self.assign(node.target, self.printed(node.body, dict(names)), names)

    def do_macro(self, node: nodes.Macro, names: Names) -> None:
        if self.macros[node.name] is not node:
            raise Unbounded  # another one of this name

    def do_scope(self, node: nodes.Scope, names: Names) -> None:
        self.block(node.body, dict(names))

    def do_with(self, node: nodes.With, names: Names) -> None:
        own = dict(names)
        for target, value in zip(node.targets, node.values, strict=True):
            self.assign(target, self.value(value, names), own)
        self.block(node.body, own)

    def do_continue(self, node: nodes.Continue, names: Names) -> None:
        pass

    do_break = do_continue

    def printed(self, body: Iterable[nodes.Node], names: Names) -> Size:
        """What statements print."""
        before, self.made = self.made, Size()
        self.block(body, names)
        made, self.made = self.made, before
        self.seen.append(self.everywhere(made))
        return made

    def assign(self, target: nodes.Node, value: Size, names: Names) -> None:
        if isinstance(target, nodes.NSRef):
            if target.name not in self.spaces:
                raise Unbounded  # another name of a namespace
            self.keep((target.name, target.attr), value)
        elif isinstance(target, nodes.Name):
            if target.name in self.macros or target.name in self.spaces or target.name == "loop":
                raise Unbounded
            names[target.name] = value
            if any(k != 1 or n for (_, n), k in value.terms.items()):  # else it is a part of what is there
                self.held.append(self.everywhere(value.text()))
        elif isinstance(target, nodes.Tuple | nodes.List):
            for part in target.items:
                self.assign(part, value, names)
        else:
            raise Unbounded

    def keep(self, owner: tuple[str, str], value: Size) -> None:
        """Put a value into an attribute of a namespace: it replaces another, or is it with an addition."""
        if not value.number:
            self.texts.add(owner)
        value = value.text()
        whole = self.everywhere(value)
        own = sum(k if n == 0 else math.inf for (one, n), k in whole.terms.items() if one == owner)
        if value.markup or own > 1:
            raise Unbounded
        if own:
            addition = Size({key: k for key, k in value.terms.items() if key[0] != owner})
            self.added[owner] = total([self.added.get(owner, Size()), addition])
        else:
            self.put[owner].append(whole)

    # expressions

    def value(self, node: nodes.Node, names: Names) -> Size:
        self.step()
        handle = getattr(self, f"of_{type(node).__name__.lower()}", None)
        if handle is None:
            raise Unbounded
        value = handle(node, names)
        if any(k != 1 or n for (_, n), k in value.terms.items()):
            self.seen.append(self.everywhere(value.text()))
        return value

    def of_templatedata(self, node: nodes.TemplateData, names: Names) -> Size:
        return constant(len(node.data))

    def of_const(self, node: nodes.Const, names: Names) -> Size:
        if isinstance(node.value, int | float):
            return Size({(ALONE, 0): min(abs(node.value), _INFINITE)}, number=True)
        return constant(len(str(node.value)))

    def of_name(self, node: nodes.Name, names: Names) -> Size:
        if node.name in self.macros:
            raise Unbounded
        return self.named(node.name, names)

    def named(self, name: str, names: Names) -> Size:
        if name in self.spaces:
            raise Unbounded  # the namespace itself, not an attribute
        return names[name] if name in names else self.top.get(name, Size({(GIVEN, 0): 1.0}))

    def of_list(self, node: nodes.List, names: Names) -> Size:
        return total([constant(len(node.items)), *(self.value(item, names).text() for item in node.items)])

    of_tuple = of_list

    def of_dict(self, node: nodes.Dict, names: Names) -> Size:
        parts = [part for pair in node.items for part in (pair.key, pair.value)]
        return total([constant(len(parts)), *(self.value(part, names).text() for part in parts)])

    def of_getattr(self, node: nodes.Getattr, names: Names) -> Size:
        if isinstance(node.node, nodes.Name) and node.node.name in self.spaces:
            owner = (node.node.name, node.attr)
            if owner in self.known_texts:
                return Size({(owner, 0): 1.0})
            return Size({(WILD, 0): 1.0}, number=True)
        base = self.value(node.node, names)
        if isinstance(node.node, nodes.Name) and node.node.name == "loop" and node.attr in _LOOP_NUMBERS:
            return Size(self.everywhere(base).terms, number=True)
        return Size(base.terms, markup=base.markup)

    def of_getitem(self, node: nodes.Getitem, names: Names) -> Size:
        self.value(node.arg, names)
        base = self.value(node.node, names)
        return Size(base.terms, markup=base.markup)

    def of_slice(self, node: nodes.Slice, names: Names) -> Size:
        for part in (node.start, node.stop, node.step):
            if part is not None:
                self.value(part, names)
        return constant(0)

    def of_add(self, node: nodes.Add, names: Names) -> Size:
        left, right = self.value(node.left, names), self.value(node.right, names)
        if left.number or right.number:
            return _sum_of(left, right)
        both = total([left, right])
        return both.times(_MARKUP) if both.markup else both

    def of_sub(self, node: nodes.Sub, names: Names) -> Size:
        return _sum_of(self.value(node.left, names), self.value(node.right, names))

    def of_mul(self, node: nodes.Mul, names: Names) -> Size:
        left, right = self.value(node.left, names), self.value(node.right, names)
        for one, other, known in ((left, right, node.left), (right, left, node.right)):
            if isinstance(known, nodes.Const) and (one.number or other.number):
                if other.of(WILD):
                    raise Unbounded
                product = other.times(max(1.0, sum(one.terms.values())))
                return Size(product.terms, one.number and other.number, product.markup)
        raise Unbounded

    def of_mod(self, node: nodes.Mod, names: Names) -> Size:
        left, right = self.value(node.left, names), self.value(node.right, names)
        if not left.number:  # a text can have widths: "%99999d"
            raise Unbounded
        return number_of(left, right)

    def of_div(self, node: nodes.BinExpr, names: Names) -> Size:
        left = self.value(node.left, names)
        if not (isinstance(node.right, nodes.Const) and isinstance(node.right.value, int) and node.right.value):
            raise Unbounded  # a fraction makes the number larger
        return number_of(left, left)

    of_floordiv = of_div

    def of_concat(self, node: nodes.Concat, names: Names) -> Size:
        whole = total([self.value(part, names).text() for part in node.nodes])
        return whole.times(_MARKUP) if whole.markup else whole

    def of_condexpr(self, node: nodes.CondExpr, names: Names) -> Size:
        self.value(node.test, names)
        return any_of(self.value(e, names) for e in (node.expr1, node.expr2) if e is not None)

    def of_and(self, node: nodes.BinExpr, names: Names) -> Size:
        return any_of([self.value(node.left, names), self.value(node.right, names)])

    of_or = of_and

    def of_not(self, node: nodes.Not, names: Names) -> Size:
        self.value(node.node, names)
        return Size({(ALONE, 0): 1.0}, number=True)

    def of_neg(self, node: nodes.UnaryExpr, names: Names) -> Size:
        return self.value(node.node, names)

    def of_compare(self, node: nodes.Compare, names: Names) -> Size:
        for part in (node.expr, *(operand.expr for operand in node.ops)):
            self.value(part, names)
        return Size({(ALONE, 0): 1.0}, number=True)

    def of_test(self, node: nodes.Test, names: Names) -> Size:
        for part in (node.node, *(node.args or ())):
            if not (isinstance(part, nodes.Name) and part.name in self.macros):  # `is defined`
                self.value(part, names)
        return Size({(ALONE, 0): 1.0}, number=True)

    def of_filter(self, node: nodes.Filter, names: Names) -> Size:
        if node.node is None or node.dyn_args or node.dyn_kwargs:
            raise Unbounded
        return self.changed(node.name, node.node, self.value(node.node, names), node.args, node.kwargs, names)

    def of_call(self, node: nodes.Call, names: Names) -> Size:
        if node.dyn_args or node.dyn_kwargs:
            raise Unbounded
        called = node.node
        if isinstance(called, nodes.Getattr):
            if isinstance(called.node, nodes.Name) and called.node.name == "loop":
                raise Unbounded
            base = self.value(called.node, names)
            return self.changed(f".{called.attr}", called.node, base, node.args, node.kwargs, names)
        if not isinstance(called, nodes.Name):
            raise Unbounded
        if called.name in self.macros and called.name not in names:
            return self.of_macro(self.macros[called.name], node, names)
        values = [self.value(arg, names) for arg in (*node.args, *(pair.value for pair in node.kwargs))]
        if called.name in names or called.name in self.top:
            raise Unbounded
        if called.name == "range" and all(v.number and not v.of(WILD) for v in values):
            return total(values, number=True)
        if called.name == "raise_exception":
            return constant(0)
        if called.name == "strftime_now" and all(isinstance(arg, nodes.Const) for arg in node.args):
            return total(values).times(256)  # the most that Python makes of a character
        raise Unbounded

    def of_macro(self, macro: nodes.Macro, call: nodes.Call, names: Names) -> Size:
        known = [arg.name for arg in macro.args]
        if macro.name in self.calls or len(call.args) > len(known) or self.spaces & set(known):
            raise Unbounded
        given = [self.value(arg, names) for arg in call.args]  # further arguments by name are not read
        own = dict(self.top)
        for arg, default in zip(known[len(known) - len(macro.defaults) :], macro.defaults, strict=True):
            own[arg] = self.value(default, own)
        own |= dict(zip(known, given, strict=False))
        own |= {pair.key: self.value(pair.value, names) for pair in call.kwargs}
        self.calls.append(macro.name)
        made = self.printed(macro.body, own)
        self.calls.pop()
        return made

    def changed(
        self, name: str, node: nodes.Node, base: Size, args: list[nodes.Expr], kwargs: list[nodes.Keyword],
        names: Names,
    ) -> Size:  # fmt: skip
        """The result of a filter, or of a method where the name begins with a dot."""
        values = [self.value(arg, names) for arg in (*args, *(pair.value for pair in kwargs))]
        texts, plain = [arg.value for arg in args if isinstance(arg, nodes.Const)], name.removeprefix(".")
        longest = max((len(text) for text in texts if isinstance(text, str)), default=0)
        if name == "safe":
            return Size(base.text().terms, markup=True)
        if plain in _COUNTING:
            return Size(base.terms, number=True)
        if name in _NUMBERS:
            return number_of(base, base)
        if name == "map":
            self.seen.append(self.everywhere(base.times(_ENTRY)))
            by_name = len(args) == len(texts) == 1 and not kwargs and texts[0] in {*_KEEPING, *_COUNTING, *_ESCAPING}
            if not by_name and (args or [pair.key for pair in kwargs] != ["attribute"]):
                raise Unbounded
            return base.times(_ESCAPING.get(texts[0], NUMBER_LENGTH) if texts else 1)
        if plain in _SPLITTING | {"list", "sort", "unique"}:
            self.seen.append(self.everywhere(base.times(_ENTRY)))
        if plain in _SPLITTING:
            return total([base, constant(1)])
        if plain in _KEEPING:
            base = Size(base.terms, base.number and not name.startswith("."), base.markup)
            return any_of([base, *values]) if plain in ("default", "d", "get") else base
        if base.markup or any(value.markup for value in values):
            raise Unbounded
        if name in _ESCAPING:
            options = {pair.key: pair.value.value for pair in kwargs if isinstance(pair.value, nodes.Const)}
            if args or {pair.key for pair in kwargs} - {"ensure_ascii", "sort_keys", "separators", *options}:
                raise Unbounded
            width = options.get("indent") or 0
            separators = sum(sum(v.terms.values()) for v in values)
            factor = _ESCAPING[name] + 32 * (len(width) if isinstance(width, str) else width) + separators
            return total([base.text().times(factor), constant(NUMBER_LENGTH)])
        if plain == "replace" and len(texts) == len(args) >= 2 and not kwargs:
            return total([base.times(1 + longest), constant(longest)])
        if name == "join" and len(texts) == len(args) and not kwargs:
            return base.times(1 + longest)
        if name == ".join" and isinstance(node, nodes.Const) and len(args) == 1:
            return values[0].times(1 + len(str(node.value)))
        if name == "indent" and all(isinstance(text, int) for text in texts) and len(texts) == len(args) and not kwargs:
            return total([base.times(5 + sum(map(int, texts))), constant(sum(map(int, texts)))])
        if name == ".format" and isinstance(node, nodes.Const) and _PLAIN_FORMAT.fullmatch(str(node.value)):
            return total([base, *(value.text().times(str(node.value).count("{")) for value in values)])
        raise Unbounded


def _sum_of(left: Size, right: Size) -> Size:
    if left.of(WILD) and right.of(WILD):
        raise Unbounded  # a number that doubles gets long
    return number_of(left, right)
