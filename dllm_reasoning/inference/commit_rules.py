"""How a window's predictions become text: what a row feeds after its last committed token, and what it commits.

By causality a prediction equals token-by-token decoding as soon as everything fed before it does: rules that commit
only such tokens are lossless. AdaptiveWindows fits the window to the number of unfinished rows: wide for few rows,
single tokens where arithmetic is the bottleneck.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np

from dllm_reasoning.inference.settings import GenerationSettings
from verl.utils.registry import nearest

MOST_BRANCHED = 1024  # tokens of a row in one forward


@dataclass
class Row:
    """One answer in progress."""

    number: int
    tokens: list[int]  # prompt and committed tokens
    prompt_length: int
    limit: int  # most new tokens
    guesses: list[int] = field(default_factory=list)  # fed after the last token, with the noise at which to draft
    cached: int = 0  # leading tokens whose keys and values are final
    rounds: int = 0  # refinement rounds of the current block
    forwards: int = 0
    rounds_of_blocks: list[int] = field(default_factory=list)  # of those that are committed
    done: bool = False
    log_probs: list[float] = field(default_factory=list)  # of the committed tokens, where the caller computes them

    @property
    def remaining(self) -> int:
        """Most tokens that may still be committed."""
        return self.limit - (len(self.tokens) - self.prompt_length)

    def commit(
        self, predicted: list[int], fed: list[int], ends: frozenset[int], log_probs: list[float] | None = None
    ) -> int:
        """Add tokens up to the first end token and the limit, either of which completes the row; returns their number.
        `fed`: the guesses of the forward that predicted them; `log_probs`: of at least these tokens."""
        predicted = predicted[: self.remaining]
        end = next((i for i, token in enumerate(predicted) if token in ends), None)
        self.cached = len(self.tokens) + count_confirmed(fed, predicted)
        kept = predicted if end is None else predicted[: end + 1]
        self.tokens += kept
        if log_probs is not None:
            self.log_probs += log_probs[: len(kept)]
        self.done = end is not None or self.remaining == 0
        return len(kept)


class CommitRule:
    """What rows feed after their last committed token, and what they commit."""

    branch: Sequence[int] = ()
    """A copy of it is fed after the last committed token and after each guess (Branches)."""
    noise: int
    """The token of positions at which guesses are drafted."""
    width: int
    """Most tokens that a row feeds in one forward; sizes the cache."""

    def first_guesses(self) -> list[int]:
        """The guesses of a row before its first forward: noise, as many as fit."""
        return [self.noise] * (self.width - 1)

    def prepare(self, rows: Sequence[Row]) -> None:
        """Called before each forward; `step` has set the guesses."""

    def step(self, row: Row, predicted: list[int], log_probs: list[float] | None) -> list[int]:
        """The tokens to commit; sets the row's next guesses. `predicted`: the next token after the last committed one,
        then after each guess; each of these is followed by those after the tokens of its branch, if there is one.
        `log_probs`: those of the tokens outside branches, or None."""
        raise NotImplementedError

    def committed(self, count: int) -> None:
        """Called after each row's `step`: the row kept `count` of its tokens, up to its end token or limit."""


@dataclass
class Refine(CommitRule):
    """A block of `width` tokens is decoded `times` more after its first forward (None: until a round changes nothing),
    then committed. Guesses are `noise` tokens at first."""

    width: int
    noise: int
    times: int | None

    def step(self, row: Row, predicted: list[int], log_probs: list[float] | None) -> list[int]:
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

    def first_guesses(self) -> list[int]:
        return []

    def step(self, row: Row, predicted: list[int], log_probs: list[float] | None) -> list[int]:
        stride = 1 + self.length  # what follows a token, and then its branch
        verified = predicted[::stride]
        count = count_confirmed(row.guesses, verified)
        row.guesses = predicted[count * stride + 1 : (count + 1) * stride]  # drafted after the last confirmed token
        return verified[: count + 1]


def count_confirmed(guesses: list[int], predicted: list[int]) -> int:
    """Number of leading guesses that equal the predictions; a guess without a prediction equals none."""
    pairs = zip(guesses, predicted, strict=False)
    return next((i for i, (a, b) in enumerate(pairs) if a != b), min(len(guesses), len(predicted)))


@dataclass(frozen=True)
class Window:
    """What a row feeds after its last committed token: `guesses`, which the forward verifies, then `drafts` noise
    tokens, at which it drafts further guesses. (0, 0) is token-by-token decoding, drafts=0 slide, drafts=guesses
    verify."""

    guesses: int
    drafts: int = 0

    @property
    def width(self) -> int:
        """Tokens that a row feeds per forward."""
        return 1 + self.guesses + self.drafts


def windows_of(mode: str, trained: int) -> list[Window]:
    """The windows that `mode` may use, for a model trained on windows of `trained` tokens.

    plain, slide and verify have one each; auto has those of the trained and of half the trained width.
    """
    full, half = trained - 1, (trained - 1) // 2
    if mode == "auto":  # in narrow windows, some of these are equal
        windows = [Window(0), Window(half), Window(half, half), Window(full), Window(full, full)]
        return list(dict.fromkeys(windows))
    return [{"plain": Window(0), "slide": Window(full), "verify": Window(full, full)}[mode]]


@dataclass
class ForwardCosts:
    """Seconds of a forward: `seconds[width][i]` for `rows[i]` rows, linear in between; infinite if never allowed."""

    rows: list[int]  # rising
    seconds: dict[int, list[float]]

    def of(self, width: int, rows: int) -> float:
        """Seconds of a forward in which each of `rows` rows feeds `width` tokens."""
        return float(np.interp(rows, self.rows, self.seconds[width]))

    @classmethod
    def measure(
        cls, forward: Callable[[list[Row]], object], widths: Sequence[int], rows: int, length: int, most: int
    ) -> ForwardCosts:
        """The least of three repetitions, since other work on the machine only adds to it, for 1, 4, 16, ... and `rows`
        rows of `length` tokens that are all cached but the last.

        `forward` computes the rows' next tokens and waits for them; it is given at most `most` tokens.
        """
        grid = sorted({min(rows, 4**i) for i in range(12)})
        seconds: dict[int, list[float]] = {width: [] for width in widths}
        for count in grid:
            for width in seconds:
                if count > 1 and count * width > most:
                    seconds[width].append(math.inf)
                    continue
                guesses = [0] * (width - 1)
                batch = [Row(i, [0] * length, length, width, guesses, cached=length - 1) for i in range(count)]
                times = []
                for _ in range(4):  # the first one warms up
                    started = time.perf_counter()
                    forward(batch)
                    times.append(time.perf_counter() - started)
                seconds[width].append(min(times[1:]))
        return cls(grid, seconds)


class AdaptiveWindows(CommitRule):
    """Commits the confirmed leading guesses of a window and the token after them; the rest are the next guesses.

    Each forward uses the window with the most expected tokens per second; without `costs` the first one. Expected
    tokens are means over earlier forwards. After `forget`, windows are tried before they are compared. Which window is
    used changes the speed, never the tokens.
    With `threshold`, following tokens of at least this probability are committed unverified (not lossless).
    """

    def __init__(
        self, windows: list[Window], noise: int, costs: ForwardCosts | None = None, threshold: float | None = None
    ) -> None:
        self.windows, self.noise, self.costs, self.threshold = windows, noise, costs, threshold
        self.window = self.previous = windows[0]  # of this forward, and of the one that drafted its guesses
        # tokens and forwards of a row; a window that was never used is expected to have all its guesses confirmed
        self.counts = {window: (1.0 + window.guesses, 1.0) for window in windows}
        self.untried: list[Window] = []
        self.forget()

    def forget(self) -> None:
        """Call it after a weight update: earlier means count as one forward, so that new ones soon dominate."""
        self.counts = {window: (tokens / forwards, 1.0) for window, (tokens, forwards) in self.counts.items()}
        self.untried = [window for window in self.windows if window.guesses and self.costs is not None]

    @property
    def width(self) -> int:
        return max(window.width for window in self.windows)

    def tokens_per_forward(self, window: Window) -> float:
        """Mean number of tokens that a row commits in a forward of the window."""
        tokens, forwards = self.counts[window]
        return tokens / forwards

    def prepare(self, rows: Sequence[Row]) -> None:
        """Choose the next forward's window and set the rows' guesses: earlier drafts, then noise."""
        self.previous = self.window
        if self.costs is not None:
            seconds = {window: self.costs.of(window.width, len(rows)) for window in self.windows}
            to_try = [window for window in self.untried if seconds[window] < math.inf]
            if to_try:
                self.window = to_try[-1]
            else:
                self.window = max(self.windows, key=lambda window: self.tokens_per_forward(window) / seconds[window])
        if self.window == self.previous and self.window in self.untried:
            self.untried.remove(self.window)  # its first forward had no drafts of its own to verify, this one has
        guesses, drafts = self.window.guesses, [self.noise] * self.window.drafts
        for row in rows:
            row.guesses = (row.guesses + [self.noise] * guesses)[:guesses] + drafts

    def step(self, row: Row, predicted: list[int], log_probs: list[float] | None) -> list[int]:
        """The confirmed guesses and the token after them; what is predicted after those are the next guesses."""
        count = count_confirmed(row.guesses[: self.window.guesses], predicted) + 1
        while self.threshold is not None and count < len(predicted) and math.exp(log_probs[count]) >= self.threshold:
            count += 1
        row.guesses = predicted[count:]
        return predicted[:count]

    def committed(self, count: int) -> None:
        if self.window == self.previous:  # guesses of another window say nothing about this one
            tokens, forwards = self.counts[self.window]
            self.counts[self.window] = tokens + count, forwards + 1


def commit_rule(settings: GenerationSettings) -> CommitRule:
    """The rule of `refine_iter`, for settings with a length and a noise token; ValueError for an unknown one."""
    length, noise, threshold = settings.add_eos_length, settings.noise_token_id, settings.confidence_threshold
    name, known = str(settings.refine_iter), ["converge", "slide", "verify", "branch"]
    if threshold is not None and name != "slide":
        raise ValueError(f"confidence_threshold={threshold} needs refine_iter=slide, not {name}; leave it out.")
    if not name.isdigit() and name not in known:
        near = nearest(name, known) or "."
        raise ValueError(
            f"refine_iter={settings.refine_iter!r} is unknown{near} Known: a number of at least 0, {', '.join(known)}."
        )
    if name == "branch":
        if (tokens := (1 + length) ** 2) > MOST_BRANCHED:
            raise ValueError(f"refine_iter=branch feeds (add_eos_length + 1)^2 = {tokens} tokens of a row per forward; "
                             "set add_eos_length, for example to 5.")  # fmt: skip
        return Branches(length, noise)
    if name in ("slide", "verify"):
        return AdaptiveWindows(windows_of(name, length + 1), noise, threshold=threshold)
    return Refine(length + 1, noise, int(name) if name.isdigit() else None)
