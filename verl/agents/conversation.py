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
        kept_tokens: [T], the ids that top-k and top-p left at each generated token, [] elsewhere; None without any.
        versions: (weights version, start, end) of each generated turn.
    """

    prompt_ids: list[int]
    response_ids: list[int] = field(default_factory=list)
    response_mask: list[int] = field(default_factory=list)
    response_logprobs: list[float] | None = None
    kept_tokens: list[list[int]] | None = None
    versions: list[tuple[int | None, int, int]] = field(default_factory=list)

    @property
    def ids(self) -> list[int]:
        """All ids so far: the prompt of the next generation."""
        return self.prompt_ids + self.response_ids

    def add_generated(
        self, ids: list[int], log_probs: list[float] | None = None, version: int | None = None,
        kept: list[list[int]] | None = None,
    ) -> None:  # fmt: skip
        """Append what the model wrote; `kept`: the ids that top-k and top-p left at each position, None if not known.

        Raises ValueError unless log-probs are given for every token of every turn.
        """
        for what, given in (("log-probs", log_probs), ("sets of kept tokens", kept)):
            if given is not None and len(given) != len(ids):
                raise ValueError(f"{len(given)} {what} for {len(ids)} generated tokens")
        if any(self.response_mask) and ids and (log_probs is None) != (self.response_logprobs is None):
            raise ValueError("either all generated turns have log-probs, or none")
        if log_probs is not None and self.response_logprobs is None:
            self.response_logprobs = [0.0] * len(self.response_ids)
        if kept is not None and self.kept_tokens is None:
            self.kept_tokens = [[]] * len(self.response_ids)
        start = len(self.response_ids)
        self._append(ids, 1, log_probs, kept)
        self.versions.append((version, start, len(self.response_ids)))

    def add_given(self, ids: list[int]) -> None:
        """Append what tools or users wrote."""
        self._append(ids, 0, None, None)

    def _append(
        self, ids: list[int], mask: int, log_probs: list[float] | None, kept: list[list[int]] | None
    ) -> None:  # fmt: skip
        self.response_ids += ids
        self.response_mask += [mask] * len(ids)
        if self.response_logprobs is not None:
            self.response_logprobs += [0.0] * len(ids) if log_probs is None else log_probs
        if self.kept_tokens is not None:
            self.kept_tokens += [[]] * len(ids) if kept is None else kept
