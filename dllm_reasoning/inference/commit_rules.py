"""How a window's predictions become text: what a row feeds next to its last committed token, what it commits.

By causality a prediction is what token-by-token decoding would say as soon as everything fed before it is: rules that
commit only such tokens are lossless.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from verl.utils.registry import nearest

LOSSLESS = ("converge", "slide", "verify")


@dataclass
class Row:
    """One answer in the making. `tokens`: prompt and what is committed; `guesses`: fed behind its last token; `known`:
    leading tokens that a forward has read as they stand; `rounds`: refinement rounds of the block so far."""

    number: int
    tokens: list[int]
    prompt_length: int
    limit: int
    guesses: list[int] = field(default_factory=list)
    known: int = 0
    rounds: int = 0
    forwards: int = 0
    rounds_of_blocks: list[int] = field(default_factory=list)
    done: bool = False

    @property
    def remaining(self) -> int:
        return self.limit - (len(self.tokens) - self.prompt_length)

    def commit(self, said: list[int], fed: list[int], ends: frozenset[int]) -> None:
        """Add tokens up to the first end token and to the limit; the row is done when either is met. `fed`: the
        guesses of the forward that said so."""
        said = said[: self.remaining]
        end = next((i for i, token in enumerate(said) if token in ends), None)
        self.known = len(self.tokens) + min(settled(fed, said), len(said))
        self.tokens += said if end is None else said[: end + 1]
        self.done = end is not None or self.remaining == 0


class Refine:
    """A block is decoded `times` more after its first forward (None: until a round changes nothing), then committed."""

    needs_confidence = False

    def __init__(self, width: int, noise: int, times: int | None) -> None:
        self.width, self.noise, self.times = width, noise, times

    def fresh(self) -> list[int]:
        return [self.noise] * (self.width - 1)

    def step(self, row: Row, said: list[int], confidence: list[float] | None) -> list[int]:
        """Tokens to commit, given what the model said behind the committed token and each guess; sets the guesses."""
        settled = said[:-1] == row.guesses
        if settled or row.rounds == self.times:
            row.guesses = self.fresh()
            row.rounds_of_blocks.append(row.rounds)
            row.rounds = 0
            return said
        row.rounds += 1
        row.guesses = said[:-1]
        return []


class Slide:
    """Commits the leading tokens that are settled, with the one behind them, and slides the window on by as many.

    With `threshold` tokens that the model says with at least this probability follow unverified (not lossless).
    """

    def __init__(self, width: int, noise: int, threshold: float | None) -> None:
        self.width, self.noise, self.threshold = width, noise, threshold
        self.needs_confidence = threshold is not None

    def fresh(self) -> list[int]:
        return [self.noise] * (self.width - 1)

    def step(self, row: Row, said: list[int], confidence: list[float] | None) -> list[int]:
        count = settled(row.guesses, said) + 1
        while confidence is not None and count < len(said) and confidence[count] >= self.threshold:
            count += 1
        row.guesses = (said[count:] + self.fresh())[: self.width - 1]
        return said[:count]


class Verify:
    """[last token, N guesses, N noise tokens]: one forward verifies the guesses and drafts the next N behind them."""

    needs_confidence = False

    def __init__(self, width: int, noise: int) -> None:
        self.guessed, self.noise = width - 1, noise

    def fresh(self) -> list[int]:
        return [self.noise] * (2 * self.guessed)

    def step(self, row: Row, said: list[int], confidence: list[float] | None) -> list[int]:
        count = settled(row.guesses[: self.guessed], said) + 1
        drafted = (said[count:] + self.fresh())[: self.guessed]
        row.guesses = drafted + [self.noise] * self.guessed
        return said[:count]


CommitRule = Refine | Slide | Verify


def settled(guesses: list[int], said: list[int]) -> int:
    """Number of leading guesses that the model says too."""
    return next((i for i, (a, b) in enumerate(zip(guesses, said, strict=False)) if a != b), len(guesses))


def commit_rule(refine_iter: int | str, width: int, noise: int, threshold: float | None) -> CommitRule:
    """The rule behind `refine_iter`: a number of rounds, converge, slide or verify."""
    text = str(refine_iter)
    if text.isdigit():
        rule: CommitRule = Refine(width, noise, int(text))
    elif text in LOSSLESS:
        rule = {"converge": lambda: Refine(width, noise, None), "slide": lambda: Slide(width, noise, threshold),
                "verify": lambda: Verify(width, noise)}[text]()  # fmt: skip
    else:
        near = nearest(text, list(LOSSLESS)) or "."
        raise ValueError(f"refine_iter={refine_iter!r} is unknown{near} Known: a number from 0 on, converge, slide, "
                         "verify.")  # fmt: skip
    if threshold is not None and not isinstance(rule, Slide):
        raise ValueError(f"confidence_threshold={threshold} is for refine_iter=slide, not {text}; leave it out.")
    return rule
