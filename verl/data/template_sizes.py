"""Bounds on the sizes of values in a chat template.

Sizes are characters of texts, and entries of collections. A value is described by terms `factor * size(owner) * S**n`,
where S is the size of all that the template is given, and the owner is S itself, an element of a surrounding loop, or
an attribute of a namespace.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

Growth = tuple[float, ...]  # (a, b, c, ...): at most a + b S + c S**2 + ... characters

# Owners; the others are numbers of loops, and (name, attribute) of namespaces. WILD marks a number that can be large.
GIVEN, WILD, ALONE = "given", "wild", None
NUMBER_LENGTH = 20


@dataclass
class Size:
    """Terms {(owner, n): factor} of a size, or of the magnitude of a number."""

    terms: dict[tuple[Any, int], float] = field(default_factory=dict)
    number: bool = False
    markup: bool = False  # a text that escapes what is added to it

    def times(self, factor: float) -> Size:
        return Size({key: k * factor for key, k in self.terms.items()}, self.number, self.markup)

    def text(self) -> Size:
        """As it is printed."""
        if not self.number:
            return self
        digits = {key: k for key, k in self.terms.items() if key[0] != WILD} if self.of(WILD) else {}
        return total([constant(NUMBER_LENGTH), Size(digits)])

    def of(self, owner: Any) -> bool:
        """Whether this owner has a part."""
        return any(one == owner for one, _ in self.terms)


def constant(size: float) -> Size:
    """A size that does not depend on what the template is given."""
    return Size({(ALONE, 0): size})


def total(values: Iterable[Size], number: bool = False) -> Size:
    """All values together."""
    values, terms = list(values), defaultdict(float)
    for value in values:
        for key, k in value.terms.items():
            terms[key] += k
    return Size(dict(terms), number, any(value.markup for value in values))


def number_of(left: Size, right: Size) -> Size:
    """A number that is at most as large as both together; wild unless both are numbers."""
    wild = [] if left.number and right.number else [Size({(WILD, 0): 1.0})]
    return Size(total([left, right, *wild]).terms, number=True)


def any_of(values: Iterable[Size]) -> Size:
    """A bound on each of the values; a number only if all are."""
    values, terms = list(values), defaultdict(float)
    number = all(value.number for value in values)
    for value in values if number else [value.text() for value in values]:
        for key, k in value.terms.items():
            terms[key] = max(terms[key], k)
    return Size(dict(terms), number, any(value.markup for value in values))


def polynomial(value: Size, inside: dict[Any, Growth]) -> Growth:
    """The bound for a value at the top; `inside`: those for attributes of namespaces."""
    result: Growth = ()
    for (owner, n), k in value.terms.items():
        base = {ALONE: (1.0,), GIVEN: (0.0, 1.0), WILD: ()}[owner] if not isinstance(owner, tuple) else inside[owner]
        result = added(result, (0.0,) * n + tuple(k * factor for factor in base))
    return result


def added(*growths: Growth) -> Growth:
    """The sum of bounds."""
    length = max(map(len, growths), default=0)
    return tuple(sum(g[i] for g in growths if i < len(g)) for i in range(length))


def largest(*growths: Growth) -> Growth:
    """A bound that holds for each."""
    length = max(map(len, growths), default=0)
    return tuple(max(g[i] for g in growths if i < len(g)) for i in range(length))
