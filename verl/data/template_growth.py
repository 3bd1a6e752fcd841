"""Static analysis of chat templates: a bound on the length of the rendered text as a function of the input's size.

The output of a loop is the sum over its iterations: the elements together are as large as the iterated collection, and
other values count once per element. Macros are analysed at each call. Syntax, filters and functions that the analysis
does not support have no bound.
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
    CONSTANT,
    INPUT,
    NUMBER_LENGTH,
    UNLIMITED,
    Growth,
    Size,
    constant,
    number_of,
    total,
    upper_bound,
)

Names = dict[str, Size]

_STEPS, _PASSES = 20_000, 4  # limits of an analysis: nested macro calls can grow exponentially
# Filters and methods whose result is not larger than their input.
_PRESERVING = set(
    "trim lower upper capitalize title list items dictsort first last sort unique reverse min max select reject "
    "selectattr rejectattr default d strip lstrip rstrip removeprefix removesuffix keys values get".split()
)
_COUNTING = set(
    "length count startswith endswith find rfind index isdigit isnumeric isalpha isalnum isspace isupper "
    "islower".split()
)
_NUMBERS = {"int", "float", "abs", "round"}
_SPLITTING = {"split", "rsplit", "splitlines", "partition", "rpartition"}  # an empty string becomes a list of one
_ESCAPING = {"tojson": 6, "string": 10}  # largest number of characters per input character
_ENTRY = 16  # memory of a list entry, in characters
_INFINITE = 1e300
_MARKUP = 5  # largest number of characters per character that is concatenated with a "safe" string
_LOOP_NUMBERS = {"index", "index0", "revindex", "revindex0", "length", "depth", "depth0", "first", "last"}
_PLAIN_FORMAT = re.compile(r"(?:[^{}]|\{\w*\})*")  # without a width


class _Generation(Extension):
    tags = {"generation"}  # defined by transformers

    def parse(self, parser: Any) -> nodes.Node:
        line = next(parser.stream).lineno
        return nodes.Scope(parser.parse_statements(("name:endgeneration",), drop_needle=True)).set_lineno(line)


class Unbounded(Exception):
    """The template can create strings of any length, or uses a feature that the analysis does not support."""


@functools.lru_cache(maxsize=64)
def growth(template: str) -> Growth | None:
    """A bound on the characters that a rendering holds in memory; None if the analysis does not find one.

    (a, b, c) stands for a + b S + c S**2 characters, where S is the size of the template's input: the characters of its
    strings, 1 for each entry of lists and objects, and 20 for each number.
    """
    environment = Environment(extensions=[_Generation, "jinja2.ext.loopcontrols"], trim_blocks=True, lstrip_blocks=True)
    try:
        tree = environment.parse(template)
        texts: set[Any] = set()  # namespace attributes that are not always numbers
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
        self.loops: list[Size] = []  # the collection of each loop, bounded independently of other loops
        self.output = Size()  # printed so far in one iteration of the current loop
        self.increments: dict[Any, Size] = {}  # appended to namespace attributes in one iteration of the current loop
        self.assignments: dict[Any, list[Size]] = defaultdict(list)  # values that replace namespace attributes
        self.temporaries: list[Size] = []  # results of expressions: only one exists at a time
        self.variables: list[Size] = []  # values of variables
        self.macros = {macro.name: macro for macro in tree.find_all(nodes.Macro)}
        self.calls: list[str] = []
        self.top: dict[str, Size] = {}
        self.spaces = {a.target.name for a in tree.find_all(nodes.Assign) if isinstance(a.target, nodes.Name)
                       and isinstance(a.node, nodes.Call) and isinstance(a.node.node, nodes.Name)
                       and a.node.node.name == "namespace"}  # fmt: skip
        self.known_texts, self.texts = texts, set(texts)

    def run(self, tree: nodes.Template) -> Growth:
        self.block(tree.body, self.top)
        attributes: dict[Any, Growth] = {}
        for owner in {*self.increments, *self.assignments}:
            self.resolve(owner, attributes, ())
        largest = sizes.largest(*(sizes.polynomial(value, attributes) for value in self.temporaries))
        retained = (sizes.polynomial(value, attributes) for value in (self.output, *self.variables))
        return sizes.sum_of(largest, *retained, *attributes.values())

    def resolve(self, owner: Any, attributes: dict[Any, Growth], pending: tuple[Any, ...]) -> None:
        """Set the bound of a namespace attribute, after those of the attributes from which it is computed."""
        if owner in pending:
            raise Unbounded
        if owner not in attributes:
            values = [*self.assignments[owner], self.increments.get(owner, Size())]
            for other in {one for value in values for one, _ in value.terms if isinstance(one, tuple)}:
                self.resolve(other, attributes, (*pending, owner))
            attributes[owner] = sizes.sum_of(*(sizes.polynomial(value, attributes) for value in values))

    def step(self) -> None:
        self.steps += 1
        if self.steps > _STEPS:
            raise Unbounded

    def loop_independent(self, value: Size) -> Size:
        """A bound that holds in every iteration of the enclosing loops."""
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
        self.output = total([self.output, constant(len(parts)), *parts])  # each part is an entry of Jinja's output list

    def do_if(self, node: nodes.If, names: Names) -> None:
        self.value(node.test, names)
        branches, top = [], self.top
        for body in (node.body, *([e] for e in node.elif_), node.else_):
            own = dict(names)
            if names is top:  # macros can read variables that are set at the top level
                self.top = own
            self.block(body, own)
            branches.append(own)
        self.top = top
        for name in {name for own in branches for name in own}:
            values = [self.lookup(name, own) for own in branches]
            names[name] = values[0] if all(value is values[0] for value in values) else upper_bound(values)

    def do_for(self, node: nodes.For, names: Names) -> None:
        if node.recursive:
            raise Unbounded
        elements, before = self.value(node.iter, names), (self.output, self.increments)
        if elements.has(UNLIMITED):
            raise Unbounded
        loop, own = len(self.loops), dict(names)
        self.loops.append(self.loop_independent(elements))
        each = self.loops[loop] if elements.number else Size({(loop, 0): 1.0}, markup=elements.markup)  # range()
        self.assign(node.target, each, own)
        own["loop"] = elements  # for loop.index and similar numbers
        if node.test is not None:
            self.value(node.test, own)
        self.output, self.increments = Size(), {}
        self.block(node.body, own)
        self.output = total([before[0], self.all_iterations(self.output, loop, elements)])
        added = {owner: self.all_iterations(value, loop, elements) for owner, value in self.increments.items()}
        self.increments = before[1] | {owner: total([before[1].get(owner, Size()), v]) for owner, v in added.items()}
        self.block(node.else_, dict(names))

    def all_iterations(self, value: Size, loop: int, elements: Size) -> Size:
        """The sum over all iterations of a loop, of a bound for one iteration."""
        parts = []
        for (owner, n), k in value.terms.items():
            if owner in (loop, CONSTANT):  # the sum is proportional to the collection
                parts += [Size({(whole, n + m): k * times}) for (whole, m), times in elements.terms.items()]
                continue
            for (root, m), times in self.loops[loop].terms.items():  # repeated once per element
                if isinstance(root, tuple):
                    raise Unbounded
                parts.append(Size({(owner, n + m + (root == INPUT)): k * times}))
        return total(parts)

    def do_assign(self, node: nodes.Assign, names: Names) -> None:
        if isinstance(node.target, nodes.Name) and node.target.name in self.spaces:
            call = node.node
            if not isinstance(call, nodes.Call) or call.args or call.dyn_args or call.dyn_kwargs:
                raise Unbounded
            for pair in call.kwargs:
                self.assign_attribute((node.target.name, pair.key), self.value(pair.value, names))
        else:
            self.assign(node.target, self.value(node.node, names), names)

    def do_assignblock(self, node: nodes.AssignBlock, names: Names) -> None:
        if node.filter is not None:
            raise Unbounded
        self.assign(node.target, self.printed(node.body, dict(names)), names)

    def do_macro(self, node: nodes.Macro, names: Names) -> None:
        if self.macros[node.name] is not node:
            raise Unbounded  # a second macro of this name

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
        """The output of statements."""
        outer, self.output = self.output, Size()
        self.block(body, names)
        output, self.output = self.output, outer
        self.temporaries.append(self.loop_independent(output))
        return output

    def assign(self, target: nodes.Node, value: Size, names: Names) -> None:
        if isinstance(target, nodes.NSRef):
            if target.name not in self.spaces:
                raise Unbounded  # a second name for a namespace
            self.assign_attribute((target.name, target.attr), value)
        elif isinstance(target, nodes.Name):
            if target.name in self.macros or target.name in self.spaces or target.name == "loop":
                raise Unbounded
            names[target.name] = value
            if any(k != 1 or n for (_, n), k in value.terms.items()):  # else it is part of an existing value
                self.variables.append(self.loop_independent(value.text()))
        elif isinstance(target, nodes.Tuple | nodes.List):
            for part in target.items:
                self.assign(part, value, names)
        else:
            raise Unbounded

    def assign_attribute(self, owner: tuple[str, str], value: Size) -> None:
        """Assign a namespace attribute: the value is new, or the old value with something appended."""
        if not value.number:
            self.texts.add(owner)
        value = value.text()
        whole = self.loop_independent(value)
        own = sum(k if n == 0 else math.inf for (one, n), k in whole.terms.items() if one == owner)
        if value.markup or own > 1:
            raise Unbounded
        if own:
            addition = Size({key: k for key, k in value.terms.items() if key[0] != owner})
            self.increments[owner] = total([self.increments.get(owner, Size()), addition])
        else:
            self.assignments[owner].append(whole)

    # expressions

    def value(self, node: nodes.Node, names: Names) -> Size:
        self.step()
        handle = getattr(self, f"of_{type(node).__name__.lower()}", None)
        if handle is None:
            raise Unbounded
        value = handle(node, names)
        if any(k != 1 or n for (_, n), k in value.terms.items()):
            self.temporaries.append(self.loop_independent(value.text()))
        return value

    def of_templatedata(self, node: nodes.TemplateData, names: Names) -> Size:
        return constant(len(node.data))

    def of_const(self, node: nodes.Const, names: Names) -> Size:
        if isinstance(node.value, int | float):
            return Size({(CONSTANT, 0): min(abs(node.value), _INFINITE)}, number=True)
        return constant(len(str(node.value)))

    def of_name(self, node: nodes.Name, names: Names) -> Size:
        if node.name in self.macros:
            raise Unbounded
        return self.lookup(node.name, names)

    def lookup(self, name: str, names: Names) -> Size:
        if name in self.spaces:
            raise Unbounded  # the namespace itself, not an attribute
        return names[name] if name in names else self.top.get(name, Size({(INPUT, 0): 1.0}))

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
            return Size({(UNLIMITED, 0): 1.0}, number=True)
        base = self.value(node.node, names)
        if isinstance(node.node, nodes.Name) and node.node.name == "loop" and node.attr in _LOOP_NUMBERS:
            return Size(self.loop_independent(base).terms, number=True)
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
                if other.has(UNLIMITED):
                    raise Unbounded
                product = other.times(max(1.0, sum(one.terms.values())))
                return Size(product.terms, one.number and other.number, product.markup)
        raise Unbounded

    def of_mod(self, node: nodes.Mod, names: Names) -> Size:
        left, right = self.value(node.left, names), self.value(node.right, names)
        if not left.number:  # a format string can have widths: "%99999d"
            raise Unbounded
        return number_of(left, right)

    def of_div(self, node: nodes.BinExpr, names: Names) -> Size:
        left = self.value(node.left, names)
        if not (isinstance(node.right, nodes.Const) and isinstance(node.right.value, int) and node.right.value):
            raise Unbounded  # a divisor below 1 increases the number
        return number_of(left, left)

    of_floordiv = of_div

    def of_concat(self, node: nodes.Concat, names: Names) -> Size:
        whole = total([self.value(part, names).text() for part in node.nodes])
        return whole.times(_MARKUP) if whole.markup else whole

    def of_condexpr(self, node: nodes.CondExpr, names: Names) -> Size:
        self.value(node.test, names)
        return upper_bound(self.value(e, names) for e in (node.expr1, node.expr2) if e is not None)

    def of_and(self, node: nodes.BinExpr, names: Names) -> Size:
        return upper_bound([self.value(node.left, names), self.value(node.right, names)])

    of_or = of_and

    def of_not(self, node: nodes.Not, names: Names) -> Size:
        self.value(node.node, names)
        return Size({(CONSTANT, 0): 1.0}, number=True)

    def of_neg(self, node: nodes.UnaryExpr, names: Names) -> Size:
        return self.value(node.node, names)

    def of_compare(self, node: nodes.Compare, names: Names) -> Size:
        for part in (node.expr, *(operand.expr for operand in node.ops)):
            self.value(part, names)
        return Size({(CONSTANT, 0): 1.0}, number=True)

    def of_test(self, node: nodes.Test, names: Names) -> Size:
        for part in (node.node, *(node.args or ())):
            if not (isinstance(part, nodes.Name) and part.name in self.macros):  # `is defined`
                self.value(part, names)
        return Size({(CONSTANT, 0): 1.0}, number=True)

    def of_filter(self, node: nodes.Filter, names: Names) -> Size:
        if node.node is None or node.dyn_args or node.dyn_kwargs:
            raise Unbounded
        return self.filtered(node.name, node.node, self.value(node.node, names), node.args, node.kwargs, names)

    def of_call(self, node: nodes.Call, names: Names) -> Size:
        if node.dyn_args or node.dyn_kwargs:
            raise Unbounded
        called = node.node
        if isinstance(called, nodes.Getattr):
            if isinstance(called.node, nodes.Name) and called.node.name == "loop":
                raise Unbounded
            base = self.value(called.node, names)
            return self.filtered(f".{called.attr}", called.node, base, node.args, node.kwargs, names)
        if not isinstance(called, nodes.Name):
            raise Unbounded
        if called.name in self.macros and called.name not in names:
            return self.of_macro(self.macros[called.name], node, names)
        values = [self.value(arg, names) for arg in (*node.args, *(pair.value for pair in node.kwargs))]
        if called.name in names or called.name in self.top:
            raise Unbounded
        if called.name == "range" and all(v.number and not v.has(UNLIMITED) for v in values):
            return total(values, number=True)
        if called.name == "raise_exception":
            return constant(0)
        if called.name == "strftime_now" and all(isinstance(arg, nodes.Const) for arg in node.args):
            return total(values).times(256)  # largest length of a strftime directive
        raise Unbounded

    def of_macro(self, macro: nodes.Macro, call: nodes.Call, names: Names) -> Size:
        parameters = [arg.name for arg in macro.args]
        if macro.name in self.calls or len(call.args) > len(parameters) or self.spaces & set(parameters):
            raise Unbounded
        arguments = [self.value(arg, names) for arg in call.args]
        own = dict(self.top)
        for name, default in zip(parameters[len(parameters) - len(macro.defaults) :], macro.defaults, strict=True):
            own[name] = self.value(default, own)
        own |= dict(zip(parameters, arguments, strict=False))
        own |= {pair.key: self.value(pair.value, names) for pair in call.kwargs}
        self.calls.append(macro.name)
        output = self.printed(macro.body, own)
        self.calls.pop()
        return output

    def filtered(
        self, name: str, node: nodes.Node, base: Size, args: list[nodes.Expr], kwargs: list[nodes.Keyword],
        names: Names,
    ) -> Size:  # fmt: skip
        """The result of a filter, or of a method if the name starts with a dot."""
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
            self.temporaries.append(self.loop_independent(base.times(_ENTRY)))
            by_name = len(args) == len(texts) == 1 and not kwargs and texts[0] in {*_PRESERVING, *_COUNTING, *_ESCAPING}
            if not by_name and (args or [pair.key for pair in kwargs] != ["attribute"]):
                raise Unbounded
            return base.times(_ESCAPING.get(texts[0], NUMBER_LENGTH) if texts else 1)
        if plain in _SPLITTING | {"list", "sort", "unique"}:
            self.temporaries.append(self.loop_independent(base.times(_ENTRY)))
        if plain in _SPLITTING:
            return total([base, constant(1)])
        if plain in _PRESERVING:
            base = Size(base.terms, base.number and not name.startswith("."), base.markup)
            return upper_bound([base, *values]) if plain in ("default", "d", "get") else base
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
    if left.has(UNLIMITED) and right.has(UNLIMITED):
        raise Unbounded  # repeated doubling makes a number long
    return number_of(left, right)
