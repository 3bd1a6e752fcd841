"""Word problems whose answers are free in wording and strict in figures.

An answer is a list of slots. Each slot has one to five wordings that mean the same. Option 0 is the wording that the
target is trained to prefer, its house style.
Some words look like wording but decide the result (each / in total, more / fewer, twice / half, up / down, who gives to
whom), and some figures look decisive but are free (3 + 4 or 4 + 3): no rule on the kind of token can tell harm.
"""

import functools
import random
from collections.abc import Callable
from dataclasses import dataclass

MAX_NUMBER = 40
HE = ("leo", "tom", "sam", "max", "ben", "ian")
SHE = ("kim", "ana", "mia", "eva", "zoe", "amy")
NAMES = HE + SHE
FOOD = ("apples", "pears", "plums", "nuts")
ITEMS = FOOD + ("coins", "books", "cards", "pens", "shells", "stamps")
CONTAINERS = ("boxes", "bags", "jars", "crates")
LOSE_VERBS = ("loses", "sells", "drops")
GAIN_VERBS = ("buys", "finds", "wins")


@dataclass(frozen=True)
class Start:
    """What the first person has. kind: each (a * b), total (b), colours (a + b)."""

    kind: str
    a: int
    b: int
    container: str


@dataclass(frozen=True)
class Change:
    """What happens to it. kind: lose, gain, half, give (to the other), get (from the other)."""

    kind: str
    amount: int
    verb: str
    other: str


@dataclass(frozen=True)
class Compare:
    """What the second person has, seen from the first. kind: more, fewer, twice, half."""

    kind: str
    amount: int


@dataclass(frozen=True)
class Problem:
    """A word problem: one start, up to two changes, perhaps a comparison, perhaps the sum of both people."""

    name: str
    second: str
    item: str
    start: Start
    changes: tuple[Change, ...]
    compare: Compare | None
    together: bool

    @property
    def steps(self) -> int:
        """Number of calculation steps of the answer, 2 to 5."""
        return 1 + len(self.changes) + (self.compare is not None) + self.together


@dataclass(frozen=True)
class Slot:
    """One position of an answer where the wording is free: options[0] is house style, all options mean the same."""

    name: str
    options: tuple[str, ...]


Chooser = Callable[[str, int], int]
"""Picks a wording: (name of the slot, number of options) -> index of the option."""


def sample_problem(rng: random.Random) -> Problem:
    """Draw a problem of 2 to 5 steps whose numbers all stay within 0 and MAX_NUMBER."""
    while True:
        problem = _draw(rng)
        if problem is not None:
            return problem


def _draw(rng: random.Random) -> Problem | None:
    name, second, other = rng.sample(NAMES, 3)
    item = rng.choice(ITEMS)
    steps = rng.choice((2, 3, 3, 4, 4, 5))
    start, value = _draw_start(rng)
    compared = steps == 5 or rng.random() < 0.6
    together = compared and steps > 2 and (steps == 5 or rng.random() < 0.4)
    n_changes = steps - 1 - compared - together
    if n_changes > 2:
        return None
    changes = []
    for _ in range(n_changes):
        change, value = _draw_change(rng, value, item, other)
        if change is None:
            return None
        changes.append(change)
    compare = None
    if compared:
        compare, second_value = _draw_compare(rng, value)
        if compare is None or (together and value + second_value > MAX_NUMBER):
            return None
    return Problem(name, second, item, start, tuple(changes), compare, together)


def _draw_start(rng: random.Random) -> tuple[Start, int]:
    kind = rng.choice(("each", "each", "total", "colours"))
    container = rng.choice(CONTAINERS)
    if kind == "each":
        a = rng.randint(2, 8)
        b = rng.randint(2, min(9, MAX_NUMBER // a))
        return Start(kind, a, b, container), a * b
    if kind == "total":
        b = rng.randint(4, 30)
        return Start(kind, rng.randint(2, 8), b, container), b
    a, b = rng.randint(2, 15), rng.randint(2, 15)
    return Start(kind, a, b, container), a + b


def _draw_change(rng: random.Random, value: int, item: str, other: str) -> tuple[Change | None, int]:
    kind = rng.choice(("lose", "lose", "gain", "gain", "half", "give", "get"))
    if kind == "half":
        if value % 2 or value < 4:
            return None, value
        return Change(kind, 2, rng.choice(LOSE_VERBS), other), value // 2
    if kind in ("lose", "give"):
        if value < 3:
            return None, value
        amount = rng.randint(1, min(12, value - 1))
        verb = rng.choice(LOSE_VERBS + (("eats",) * 2 if item in FOOD else ()))
        return Change(kind, amount, verb, other), value - amount
    if value >= MAX_NUMBER:
        return None, value
    amount = rng.randint(1, min(12, MAX_NUMBER - value))
    return Change(kind, amount, rng.choice(GAIN_VERBS), other), value + amount


def _draw_compare(rng: random.Random, value: int) -> tuple[Compare | None, int]:
    kind = rng.choice(("more", "fewer", "twice", "half"))
    if kind == "twice":
        return (Compare(kind, 2), 2 * value) if 2 * value <= MAX_NUMBER else (None, 0)
    if kind == "half":
        return (Compare(kind, 2), value // 2) if value % 2 == 0 else (None, 0)
    if kind == "more":
        if value >= MAX_NUMBER:
            return None, 0
        amount = rng.randint(1, min(12, MAX_NUMBER - value))
        return Compare(kind, amount), value + amount
    if value < 3:
        return None, 0
    amount = rng.randint(1, min(12, value - 1))
    return Compare(kind, amount), value - amount


def question_text(p: Problem) -> str:
    """The problem as a table; words are separated by single spaces."""
    s = p.start
    parts = {
        "each": f"{p.name} has {s.a} {s.container} and each one holds {s.b} {p.item} .",
        "total": f"{p.name} has {s.a} {s.container} and in total they hold {s.b} {p.item} .",
        "colours": f"{p.name} has {s.a} red {p.item} and {s.b} green {p.item} .",
    }[s.kind].split()
    for c in p.changes:
        parts += {
            "lose": f"{p.name} {c.verb} {c.amount} {p.item} .",
            "gain": f"{p.name} {c.verb} {c.amount} more {p.item} .",
            "half": f"{p.name} {c.verb} half of the {p.item} .",
            "give": f"{p.name} gives {c.amount} {p.item} to {c.other} .",
            "get": f"{p.name} gets {c.amount} {p.item} from {c.other} .",
        }[c.kind].split()
    if p.compare is None:
        return " ".join([*parts, f"how many {p.item} does {p.name} have now ?"])
    parts += {
        "more": f"{p.second} has {p.compare.amount} more {p.item} than {p.name} .",
        "fewer": f"{p.second} has {p.compare.amount} fewer {p.item} than {p.name} .",
        "twice": f"{p.second} has twice as many {p.item} as {p.name} .",
        "half": f"{p.second} has half as many {p.item} as {p.name} .",
    }[p.compare.kind].split()
    if p.together:
        return " ".join([*parts, f"how many {p.item} do {p.name} and {p.second} have together ?"])
    return " ".join([*parts, f"how many {p.item} does {p.second} have ?"])


def solve(p: Problem) -> int:
    """The right answer of the problem."""
    value = {"each": p.start.a * p.start.b, "total": p.start.b, "colours": p.start.a + p.start.b}[p.start.kind]
    for c in p.changes:
        value = _after(c, value)
    if p.compare is None:
        return value
    second = _compared(p.compare, value)
    return value + second if p.together else second


def _after(c: Change, value: int) -> int:
    if c.kind == "half":
        return value // 2
    return value + c.amount if c.kind in ("gain", "get") else value - c.amount


def _compared(c: Compare, value: int) -> int:
    return {"more": value + c.amount, "fewer": value - c.amount, "twice": 2 * value, "half": value // 2}[c.kind]


def answer_slots(p: Problem) -> list[Slot]:
    """The answer as slots, in order; joined with option 0 everywhere it is the house answer (without EOS)."""
    pronoun = "he" if p.name in HE else "she"
    slots, value = _start_slots(p, pronoun)
    last = p.steps - 1
    for i, c in enumerate(p.changes, start=1):
        slots += [_separator(i, last), *_change_slots(p, c, value, pronoun)]
        value = _after(c, value)
    if p.compare is not None:
        first_value, value = value, _compared(p.compare, value)
        slots += [_separator(1 + len(p.changes), last), *_compare_slots(p, p.compare, first_value, value)]
        if p.together:
            slots += [_separator(last, last), *_together_slots(p, first_value, value)]
            value += first_value
    openers = (". the answer is", ". so the final answer is", ". this means the answer is", ". hence the answer is")
    return [*slots, Slot("answer", openers), Slot("answer_value", (str(value),))]


def _start_slots(p: Problem, pronoun: str) -> tuple[list[Slot], int]:
    s = p.start
    slots = [
        Slot("opener", ("first ,", "to start ,", "well ,", "at first ,")),
        Slot("start_who", (p.name, pronoun)),
        Slot("start_verb", ("has", "owns", "keeps")),
    ]
    if s.kind == "colours":
        a, b, item = f"{s.a} red", f"{s.b} green", p.item
        slots.append(Slot("colours", (f"{a} and {b} {item}", f"{a} {item} and {b} {item}", f"{b} and {a} {item}")))
        return [*slots, _so("start"), *_sum(s.a, s.b, "start"), _tail("start", item)], s.a + s.b
    joiners = (f"{s.a} {s.container} with {s.b} {p.item}", f"{s.a} {s.container} of {s.b} {p.item}",
               f"{s.a} {s.container} and {s.b} {p.item}")
    slots.append(Slot("containers", joiners))
    if s.kind == "each":
        slots.append(Slot("each", ("each", "in each", "per piece")))
        calculation = Slot("product", (f"{s.a} * {s.b}", f"{s.b} * {s.a}"))
        return [*slots, _so("start"), calculation, *_equals(s.a * s.b, "start"), _tail("start", p.item)], s.a * s.b
    slots += [Slot("total", ("in total", "altogether", "for all")), _so("start"), Slot("total_value", (str(s.b),))]
    return [*slots, _tail("start", p.item)], s.b


def _change_slots(p: Problem, c: Change, value: int, pronoun: str) -> list[Slot]:
    n, item = c.amount, p.item
    who = Slot("change_who", (p.name, pronoun))
    if c.kind in ("lose", "half"):
        much, sign = ("half", f"{value} / 2") if c.kind == "half" else (str(n), f"{value} - {n}")
        down = [Slot("lose", (f"{c.verb} {much}", f"is down {much}")), Slot("of_them", ("of them", f"of the {item}"))]
        return [who, *down, _so("change"), Slot("minus", (sign,)), *_equals(_after(c, value), "change")]
    if c.kind == "gain":
        up = [Slot("gain", (f"{c.verb} {n}", f"is up {n}")), Slot("more", ("more", "extra", item))]
        return [who, *up, _so("change"), *_sum(value, n, "gain")]
    if c.kind == "give":
        give = Slot("give", (f"gives {n} of them to {c.other}", f"hands {n} to {c.other}", f"gives {c.other} {n}"))
        return [who, give, _so("give"), Slot("minus", (f"{value} - {n}",)), *_equals(value - n, "give")]
    take = Slot("take", (f"gets {n} more from {c.other}", f"takes {n} from {c.other}", f"gets from {c.other} {n}"))
    return [who, take, _so("give"), *_sum(value, n, "take")]


def _compare_slots(p: Problem, c: Compare, value: int, second: int) -> list[Slot]:
    who = Slot("compare_who", (f"{p.second} has", f"{p.second} owns", f"{p.second} keeps"))
    if c.kind in ("more", "fewer"):
        sign = "plus" if c.kind == "more" else "minus"
        say = (f"{c.amount} {c.kind} than {p.name}", f"{p.name} {sign} {c.amount}")
        calculation = _sum(value, c.amount, "compare") if c.kind == "more" else [
            Slot("minus", (f"{value} - {c.amount}",)), *_equals(second, "compare")]
    elif c.kind == "twice":
        say = (f"twice as many as {p.name}", f"double of {p.name}", f"{p.name} times 2")
        calculation = [Slot("twice", (f"2 * {value}", f"{value} * 2", f"{value} + {value}")), *_equals(second, "twice")]
    else:
        say = (f"half as many as {p.name}", f"half of {p.name}", f"{p.name} divided by 2")
        calculation = [Slot("halve", (f"{value} / 2",)), *_equals(second, "halve")]
    return [who, Slot(f"compare_{c.kind}", say), _so("compare"), *calculation, _tail("compare", p.item)]


def _together_slots(p: Problem, first: int, second: int) -> list[Slot]:
    both = Slot("both", ("together they have", f"{p.name} and {p.second} have", "both of them have"))
    return [both, *_sum(first, second, "both"), _tail("both", p.item)]


def _sum(a: int, b: int, where: str) -> list[Slot]:
    return [Slot(f"sum_{where}", (f"{a} + {b}", f"{b} + {a}")), *_equals(a + b, where)]


def _equals(result: int, where: str) -> list[Slot]:
    return [Slot(f"equals_{where}", ("=", "makes", "is")), Slot("result", (str(result),))]


def _so(where: str) -> Slot:
    return Slot(f"so_{where}", (", so", ", thus", ", that is", "and this makes"))


def _tail(where: str, item: str) -> Slot:
    return Slot(f"tail_{where}", (item, "of them", "pieces"))


def _separator(step: int, last: int) -> Slot:
    if step == last:
        return Slot("finally", (". finally ,", ". at last ,", ". lastly", ". now"))
    return Slot(f"then_{step}", (". then", ". next", ". after that", ". later"))


def render(slots: list[Slot], choose: Chooser) -> tuple[list[str], list[str]]:
    """Words of an answer, and for each word "" or, if it is the first to leave a slot's house wording, SLOT/OPTION."""
    words: list[str] = []
    leaves: list[str] = []
    pending = ""
    for slot in slots:
        house = slot.options[0].split()
        option = choose(slot.name, len(slot.options))
        said, wording = slot.options[option].split(), f"{slot.name}/{option}"
        marks = [""] * len(said)
        if said != house:
            at = next((i for i, (a, b) in enumerate(zip(said, house, strict=False)) if a != b),
                      min(len(said), len(house)))
            if at < len(said):
                marks[at] = wording
        if pending:
            marks[0] = pending
        # A wording that is a mere prefix of the house's leaves it with the first word of the next slot.
        pending = wording if len(said) < len(house) and house[: len(said)] == said else ""
        words += said
        leaves += marks
    return words, leaves


def house_style(slot: str, n_options: int) -> int:
    """Chooser of the house style."""
    return 0


def mixed_style(rng: random.Random) -> Chooser:
    """Every style a reader meets: the house rate of the answer is 1, 0.5 or 0 with probability 0.2, 0.4, 0.4."""
    rate = rng.choices((1.0, 0.5, 0.0), weights=(0.2, 0.4, 0.4))[0]

    def choose(slot: str, n_options: int) -> int:
        return 0 if n_options == 1 or rng.random() < rate else rng.randrange(1, n_options)

    return choose


@functools.cache
def draft_style(item: str, house_share: float) -> Chooser:
    """The draft model's style: the house wording for a share of the pairs of slot and item, else the favourite of the
    slot. It does not depend on a seed."""

    @functools.cache  # asked for every slot of every training row
    def choose(slot: str, n_options: int) -> int:
        house = n_options == 1 or random.Random(f"{slot}/{item}").random() < house_share
        return 0 if house else random.Random(slot).randrange(1, n_options)

    return choose


def drill(rng: random.Random, count: int) -> list[str]:
    """Plain calculations, which teach the tables faster than word problems do."""
    words: list[str] = []
    for _ in range(count):
        kind = rng.choice("+-*/")
        if kind == "+":
            a = rng.randint(1, MAX_NUMBER - 1)
            words += [str(a), "+", str(b := rng.randint(1, min(20, MAX_NUMBER - a))), "=", str(a + b)]
            if rng.random() < 0.5:
                words[-5], words[-3] = words[-3], words[-5]
        elif kind == "-":
            a = rng.randint(2, MAX_NUMBER)
            words += [str(a), "-", str(b := rng.randint(1, min(12, a - 1))), "=", str(a - b)]
        elif kind == "*":
            a = rng.randint(2, 20)
            b = rng.randint(2, max(2, min(9, MAX_NUMBER // a)))
            a, b = (a, b) if rng.random() < 0.5 else (b, a)
            words += [str(a), "*", str(b), "=", str(a * b)]
        else:
            a = 2 * rng.randint(1, MAX_NUMBER // 2)
            words += [str(a), "/", "2", "=", str(a // 2)]
        words.append(".")
    return words


_WORDS = """. , ? + - * / = has and each one holds in total they hold red green then more half of the gives to from
how many does do have now than fewer twice as together first start well at he she owns keeps with per piece
altogether for all so thus that is this makes hands takes gets them down up extra by plus minus double times divided
both finally last lastly next after later pieces answer final means hence""".split()


def vocabulary() -> list[str]:
    """All words of the corpus, numbers first, without special tokens; the order is the order of the ids."""
    words = [str(n) for n in range(MAX_NUMBER + 1)] + _WORDS
    words += [*NAMES, *ITEMS, *CONTAINERS, *LOSE_VERBS, *GAIN_VERBS, "eats"]
    return list(dict.fromkeys(words))
