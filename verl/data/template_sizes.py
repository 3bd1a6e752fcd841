"""Bounds on the sizes of values in a chat template.

The size of a string is its number of characters, that of a collection its number of entries plus their sizes. A value
is bounded by a sum of terms `factor * size(owner) * S**n`, where S is the size of the template's input, and an owner is
a constant, the input, the element of an enclosing loop, or an attribute of a namespace.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

Growth = tuple[float, ...]  # (a, b, c, ...): at most a + b S + c S**2 + ... characters

# Owners. Others are loops, by number, and namespace attributes, as (name, attribute). UNLIMITED marks a number whose
# magnitude has no bound.
INPUT, UNLIMITED, CONSTANT = "input", "unlimited", None
NUMBER_LENGTH = 20  # characters of a number without a known bound


@dataclass
class Size:
    """A bound on the size of a value or on the magnitude of a number, as terms {(owner, n): factor}."""

    terms: dict[tuple[Any, int], float] = field(default_factory=dict)
    number: bool = False
    markup: bool = False  # a "safe" string: other strings are escaped when they are concatenated with it

    def times(self, factor: float) -> Size:
        return Size({key: k * factor for key, k in self.terms.items()}, self.number, self.markup)

    def text(self) -> Size:
        """The size of the value as a string."""
        if not self.number:
            return self
        digits = {key: k for key, k in self.terms.items() if key[0] != UNLIMITED} if self.has(UNLIMITED) else {}
        return total([constant(NUMBER_LENGTH), Size(digits)])

    def has(self, owner: Any) -> bool:
        """Whether a term belongs to this owner."""
        return any(one == owner for one, _ in self.terms)


def constant(size: float) -> Size:
    """A size that does not depend on the template's input."""
    return Size({(CONSTANT, 0): size})


def total(values: Iterable[Size], number: bool = False) -> Size:
    """The sum of sizes."""
    values, terms = list(values), defaultdict(float)
    for value in values:
        for key, k in value.terms.items():
            terms[key] += k
    return Size(dict(terms), number, any(value.markup for value in values))


def number_of(left: Size, right: Size) -> Size:
    """A number of at most the sum of both magnitudes; UNLIMITED unless both are numbers."""
    unlimited = [] if left.number and right.number else [Size({(UNLIMITED, 0): 1.0})]
    return Size(total([left, right, *unlimited]).terms, number=True)


def upper_bound(values: Iterable[Size]) -> Size:
    """A bound that holds for each value; a number only if all values are numbers."""
    values, terms = list(values), defaultdict(float)
    number = all(value.number for value in values)
    for value in values if number else [value.text() for value in values]:
        for key, k in value.terms.items():
            terms[key] = max(terms[key], k)
    return Size(dict(terms), number, any(value.markup for value in values))


def polynomial(value: Size, attributes: dict[Any, Growth]) -> Growth:
    """The bound of a value outside loops as a polynomial in S, given the bounds of namespace attributes."""
    result: Growth = ()
    for (owner, n), k in value.terms.items():
        base = (
            {CONSTANT: (1.0,), INPUT: (0.0, 1.0), UNLIMITED: ()}[owner]
            if not isinstance(owner, tuple)
            else attributes[owner]
        )
        result = sum_of(result, (0.0,) * n + tuple(k * factor for factor in base))
    return result


def sum_of(*growths: Growth) -> Growth:
    """The sum of polynomials."""
    length = max(map(len, growths), default=0)
    return tuple(sum(g[i] for g in growths if i < len(g)) for i in range(length))


def largest(*growths: Growth) -> Growth:
    """A polynomial that is at least as large as each of the given ones."""
    length = max(map(len, growths), default=0)
    return tuple(max(g[i] for g in growths if i < len(g)) for i in range(length))
