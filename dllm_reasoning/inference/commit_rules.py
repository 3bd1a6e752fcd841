"""How a window's predictions become text: what a row feeds after its last committed token, and what it commits.

By causality a prediction equals token-by-token decoding as soon as everything fed before it does: rules that commit
only such tokens are lossless.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field


@dataclass
class Row:
    """One answer in progress.

    tokens: prompt and committed tokens. guesses: fed after the last token. cached: leading tokens whose keys and values
    are final. rounds: refinement rounds of the current block. limit: most new tokens. log_probs: of the committed
    tokens, where the caller computes them.
    """

    number: int
    tokens: list[int]
    prompt_length: int
    limit: int
    guesses: list[int] = field(default_factory=list)
    cached: int = 0
    rounds: int = 0
    forwards: int = 0
    rounds_of_blocks: list[int] = field(default_factory=list)
    done: bool = False
    log_probs: list[float] = field(default_factory=list)

    @property
    def remaining(self) -> int:
        return self.limit - (len(self.tokens) - self.prompt_length)

    def commit(
        self, predicted: list[int], fed: list[int], ends: frozenset[int], log_probs: list[float] | None = None
    ) -> int:
        """Add tokens up to the first end token and the limit, either of which completes the row; returns their number.
        `fed`: the guesses of the forward that predicted them; `log_probs`: of at least these tokens."""
        predicted = predicted[: self.remaining]
        end = next((i for i, token in enumerate(predicted) if token in ends), None)
        self.cached = len(self.tokens) + min(count_confirmed(fed, predicted), len(predicted))
        kept = predicted if end is None else predicted[: end + 1]
        self.tokens += kept
        if log_probs is not None:
            self.log_probs += log_probs[: len(kept)]
        self.done = end is not None or self.remaining == 0
        return len(kept)


class CommitRule:
    """What rows feed after their last committed token, and what they commit."""

    branch: Sequence[int] = ()
    """What is fed after the last committed token and after each guess (ModelRunner.logits)."""
    width: int
    """Most tokens that a row feeds in one forward; sizes the cache."""

    def first_guesses(self) -> list[int]:
        """The guesses of a row before its first forward."""
        return []

    def prepare(self, rows: Sequence[Row]) -> None:
        """Called before each forward; `step` has set the guesses."""

    def step(self, row: Row, predicted: list[int], confidence: list[float] | None) -> list[int]:
        """The tokens to commit; sets the row's next guesses. `predicted`: what follows the committed token, each guess
        and the tokens of their branches, as ModelRunner.logits has them; `confidence`: the probabilities of those after
        the committed token and each guess."""
        raise NotImplementedError

    def committed(self, count: int) -> None:
        """Called after each row's `step` with the number of tokens that the row kept up to its end token or limit."""


@dataclass
class Refine(CommitRule):
    """A block of `width` tokens is decoded `times` more after its first forward (None: until a round changes nothing),
    then committed. Guesses are `noise` tokens at first."""

    width: int
    noise: int
    times: int | None

    def first_guesses(self) -> list[int]:
        """The guesses of a block before its first forward."""
        return [self.noise] * (self.width - 1)

    def step(self, row: Row, predicted: list[int], confidence: list[float] | None) -> list[int]:
        if predicted[:-1] == row.guesses or row.rounds == self.times:
            row.guesses = self.first_guesses()
            row.rounds_of_blocks.append(row.rounds)
            row.rounds = 0
            return predicted
        row.rounds += 1
        row.guesses = predicted[:-1]
        return []


@dataclass
class Branches(CommitRule):
    """Verifies up to `length` guesses, and drafts as many tokens after the last committed token and after each guess,
    in one forward.

    Commits the confirmed guesses and the token after them. The drafts of the branch that begins there read nothing but
    committed tokens and noise, whichever guesses were wrong: they are the next guesses.
    """

    length: int
    noise: int

    @property
    def branch(self) -> list[int]:
        return [self.noise] * self.length

    @property
    def width(self) -> int:
        return (1 + self.length) ** 2

    def step(self, row: Row, predicted: list[int], confidence: list[float] | None) -> list[int]:
        size = 1 + self.length
        straight = predicted[::size]
        count = count_confirmed(row.guesses, straight)
        row.guesses = predicted[count * size + 1 : (count + 1) * size]
        return straight[: count + 1]


def count_confirmed(guesses: list[int], predicted: list[int]) -> int:
    """Number of leading guesses that equal the model's predictions."""
    return next((i for i, (a, b) in enumerate(zip(guesses, predicted, strict=False)) if a != b), len(guesses))
