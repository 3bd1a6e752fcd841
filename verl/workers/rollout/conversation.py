"""The tokens of one conversation: what the model wrote and what it was given in between."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass
class Conversation:
    """An append-only record of a conversation's token ids; nothing that was generated is encoded again.

    Attributes:
        prompt_ids: the ids of the prompt.
        response_ids: all later ids [T]: generated tokens, and tokens of tools and users between them.
        response_mask: [T], 1 for a generated token.
        response_logprobs: [T], the log-prob of each generated token, 0 elsewhere; None if no turn has any.
        turns: (start, end) of each addition to `response_ids`.
        versions: (weights version, start, end) of each generated turn.
    """

    prompt_ids: list[int]
    response_ids: list[int] = field(default_factory=list)
    response_mask: list[int] = field(default_factory=list)
    response_logprobs: list[float] | None = None
    turns: list[tuple[int, int]] = field(default_factory=list)
    versions: list[tuple[int | None, int, int]] = field(default_factory=list)

    @property
    def ids(self) -> list[int]:
        """All ids so far: the prompt of the next generation."""
        return self.prompt_ids + self.response_ids

    def add_generated(self, ids: list[int], log_probs: list[float] | None = None, version: int | None = None) -> None:
        """Append what the model wrote. Raises ValueError unless log-probs are given for every token of every turn."""
        if log_probs is not None and len(log_probs) != len(ids):
            raise ValueError(f"{len(log_probs)} log-probs for {len(ids)} generated tokens")
        if any(self.response_mask) and ids and (log_probs is None) != (self.response_logprobs is None):
            raise ValueError("either all generated turns have log-probs, or none")
        if log_probs is not None and self.response_logprobs is None:
            self.response_logprobs = [0.0] * len(self.response_ids)
        self._append(ids, 1, log_probs)
        self.versions.append((version, *self.turns[-1]))

    def add_given(self, ids: list[int]) -> None:
        """Append what tools or users wrote."""
        self._append(ids, 0, None)

    def _append(self, ids: list[int], mask: int, log_probs: list[float] | None) -> None:
        start = len(self.response_ids)
        self.response_ids += ids
        self.response_mask += [mask] * len(ids)
        if self.response_logprobs is not None:
            self.response_logprobs += [0.0] * len(ids) if log_probs is None else log_probs
        self.turns.append((start, len(self.response_ids)))
