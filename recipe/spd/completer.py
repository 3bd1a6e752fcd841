"""Completions of contexts, from the store where they are, else from the servers and into the store."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from recipe.spd.client import VllmEngineServer
from recipe.spd.store import Completion, CompletionStore


@dataclass
class CompletionCounts:
    """Distinct completions of one batch: requested = stored + asked; failed ones were asked and never came."""

    requested: int = 0
    stored: int = 0
    asked: int = 0
    failed: int = 0


class Completer:
    """Asks for each distinct context once; every completion is committed before it is used.

    `before_asking` waits for a server that may still be loading; what is stored needs none.
    """

    def __init__(
        self, store: CompletionStore, client: VllmEngineServer, before_asking: Callable[[], object] | None = None
    ) -> None:
        self.store = store
        self.client = client
        self._before_asking = before_asking

    def complete(
        self, contexts: Sequence[tuple[int, ...]]
    ) -> tuple[dict[tuple[int, ...], Completion], CompletionCounts]:
        """Context -> completion for all that could be had, and what was done for it."""
        distinct = list(dict.fromkeys(contexts))
        done = {distinct[i]: held for i, held in self.store.get_many(distinct).items()}
        missing = [ids for ids in distinct if ids not in done]
        counts = CompletionCounts(len(distinct), len(done), len(missing), 0)

        def commit(positions: list[int], completions: list[Completion]) -> None:
            for i, completion in zip(positions, completions, strict=True):
                (done[missing[i]],) = self.store.put_many([missing[i]], [completion])  # a transaction each

        if missing:
            if self._before_asking is not None:
                self._before_asking()
            self.client.complete(missing, on_chunk=commit)
        counts.failed = len(distinct) - len(done)
        return done, counts
