"""Windows that follow the number of unfinished rows: wide ones for few rows, single tokens where arithmetic binds."""

from __future__ import annotations

import time
from bisect import bisect_left
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from dllm_reasoning.inference.commit_rules import Branches, CommitRule, Refine, Row, count_confirmed
from dllm_reasoning.inference.settings import GenerationSettings
from verl.utils.registry import nearest

MOST_BRANCHED = 1024  # tokens of a row in one forward


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
    known = {"plain": [Window(0)], "slide": [Window(full)], "verify": [Window(full, full)]}
    known["auto"] = list(dict.fromkeys([Window(0), Window(half), Window(half, half), Window(full), Window(full, full)]))
    return known[mode]


@dataclass
class ForwardCosts:
    """Seconds of a forward: `seconds[width][i]` for `rows[i]` rows, linear in between; infinite if never allowed."""

    rows: list[int]
    seconds: dict[int, list[float]]

    def of(self, width: int, rows: int) -> float:
        after = min(bisect_left(self.rows, rows), len(self.rows) - 1)
        low, high = self.rows[max(0, after - 1)], self.rows[after]
        first, last = self.seconds[width][max(0, after - 1)], self.seconds[width][after]
        return last if low == high or rows >= high else first + (last - first) * (rows - low) / (high - low)

    @classmethod
    def measure(
        cls, forward: Callable[[list[Row]], object], widths: Sequence[int], rows: int, length: int, most: int,
        repetitions: int = 3,
    ) -> ForwardCosts:  # fmt: skip
        """The least of `repetitions`, since other work on the machine only adds to it, for 1, 4, 16, ... and `rows`
        rows of `length` tokens that are all cached but the last.

        `forward` computes the rows' next tokens and waits for them; it is given at most `most` tokens.
        """
        grid = sorted({min(rows, 4**i) for i in range(12)})
        seconds: dict[int, list[float]] = {width: [] for width in widths}
        for count in grid:
            for width in widths:
                if count > 1 and count * width > most:
                    seconds[width].append(float("inf"))
                    continue
                guesses = [0] * (width - 1)
                batch = [Row(i, [0] * length, length, width, guesses, cached=length - 1) for i in range(count)]
                times = []
                for _ in range(repetitions + 1):  # the first one warms up
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
        self.window = self.previous = windows[0]
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

    def first_guesses(self) -> list[int]:
        """Noise of the widest window."""
        return [self.noise] * (self.width - 1)

    def tokens_per_forward(self, window: Window) -> float:
        """Mean number of tokens that a row commits in a forward of the window."""
        tokens, forwards = self.counts[window]
        return tokens / forwards

    def prepare(self, rows: Sequence[Row]) -> None:
        """Choose the next forward's window and set the rows' guesses: earlier drafts, then noise."""
        self.previous = self.window
        if self.costs is not None:
            seconds = {window: self.costs.of(window.width, len(rows)) for window in self.windows}
            tried = [window for window in self.untried if seconds[window] < float("inf")]
            fastest = max(self.windows, key=lambda window: self.tokens_per_forward(window) / seconds[window])
            self.window = tried[-1] if tried else fastest
        if self.window == self.previous and self.window in self.untried:
            self.untried.remove(self.window)  # its first forward had no drafts of its own to verify, this one has
        guesses, drafts = self.window.guesses, [self.noise] * self.window.drafts
        for row in rows:
            row.guesses = (row.guesses + [self.noise] * guesses)[:guesses] + drafts

    def step(self, row: Row, predicted: list[int], confidence: list[float] | None) -> list[int]:
        """The confirmed guesses and the token after them; what is predicted after those are the next guesses."""
        count = count_confirmed(row.guesses[: self.window.guesses], predicted) + 1
        while self.threshold is not None and count < len(predicted) and confidence[count] >= self.threshold:
            count += 1
        row.guesses = predicted[count:]
        return predicted[:count]

    def committed(self, count: int) -> None:
        if self.window == self.previous:
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
