"""How a window's predictions become text: what a row feeds after its last committed token, and what it commits.

By causality a prediction equals token-by-token decoding as soon as everything fed before it does: rules that commit
only such tokens are lossless.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

from dllm_reasoning.inference.settings import GenerationSettings
from verl.utils.registry import nearest


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
    ) -> None:
        """Add tokens up to the first end token and the limit; either one completes the row. `fed`: the guesses of the
        forward that predicted them; `log_probs`: of at least these tokens."""
        predicted = predicted[: self.remaining]
        end = next((i for i, token in enumerate(predicted) if token in ends), None)
        self.cached = len(self.tokens) + min(count_confirmed(fed, predicted), len(predicted))
        kept = predicted if end is None else predicted[: end + 1]
        self.tokens += kept
        if log_probs is not None:
            self.log_probs += log_probs[: len(kept)]
        self.done = end is not None or self.remaining == 0


@dataclass
class Refine:
    """A block of `width` tokens is decoded `times` more after its first forward (None: until a round changes nothing),
    then committed. Guesses are `noise` tokens at first."""

    width: int
    noise: int
    times: int | None

    def first_guesses(self) -> list[int]:
        """The guesses of a block before its first forward."""
        return [self.noise] * (self.width - 1)

    def prepare(self, rows: Sequence[Row]) -> None:
        """Called before each forward; `step` has set the guesses."""

    def step(self, row: Row, predicted: list[int], confidence: list[float] | None) -> list[int]:
        """The tokens to commit; sets the row's next guesses. `predicted`: what follows the committed token and each
        guess; `confidence`: its probabilities."""
        if predicted[:-1] == row.guesses or row.rounds == self.times:
            row.guesses = self.first_guesses()
            row.rounds_of_blocks.append(row.rounds)
            row.rounds = 0
            return predicted
        row.rounds += 1
        row.guesses = predicted[:-1]
        return []


@dataclass
class Slide:
    """Commits the confirmed leading guesses and the token after them, and slides the window by as many.

    With `threshold`, following tokens of at least this probability are committed unverified (not lossless). `drafts`
    more noise tokens follow the guesses (verify: as many): the same forward then drafts the next guesses after them.
    """

    width: int
    noise: int
    threshold: float | None = None
    drafts: int = 0

    def first_guesses(self) -> list[int]:
        return [self.noise] * (self.width - 1 + self.drafts)

    def prepare(self, rows: Sequence[Row]) -> None:
        """Called before each forward; `step` has set the guesses."""

    def step(self, row: Row, predicted: list[int], confidence: list[float] | None) -> list[int]:
        guessed = self.width - 1
        count = count_confirmed(row.guesses[:guessed], predicted) + 1
        while confidence is not None and count < len(predicted) and confidence[count] >= self.threshold:
            count += 1
        row.guesses = (predicted[count:] + [self.noise] * guessed)[:guessed] + [self.noise] * self.drafts
        return predicted[:count]


def count_confirmed(guesses: list[int], predicted: list[int]) -> int:
    """Number of leading guesses that equal the model's predictions."""
    return next((i for i, (a, b) in enumerate(zip(guesses, predicted, strict=False)) if a != b), len(guesses))


def commit_rule(settings: GenerationSettings) -> Refine | Slide:
    """The rule of `refine_iter`, for settings with a length and a noise token; ValueError for an unknown one."""
    width, noise, threshold = settings.add_eos_length + 1, settings.noise_token_id, settings.confidence_threshold
    name, known = str(settings.refine_iter), ["converge", "slide", "verify"]
    if threshold is not None and name != "slide":
        raise ValueError(f"confidence_threshold={threshold} needs refine_iter=slide, not {name}; leave it out.")
    if not name.isdigit() and name not in known:
        near = nearest(name, known) or "."
        raise ValueError(f"refine_iter={settings.refine_iter!r} is unknown{near} Known: a number of at least 0, "
                         f"{', '.join(known)}.")  # fmt: skip
    if name == "slide":
        return Slide(width, noise, threshold)
    if name == "verify":
        return Slide(width, noise, drafts=width - 1)
    return Refine(width, noise, int(name) if name.isdigit() else None)
