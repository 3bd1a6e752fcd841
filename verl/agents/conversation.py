"""The tokens of conversations: what the model wrote and what it was given in between."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace


@dataclass
class Conversation:
    """An append-only record of a conversation's token ids; nothing that was generated is encoded again.

    Attributes:
        prompt_ids: the ids of the prompt.
        response_ids: all later ids [T]: generated tokens, and tokens of tools and users between them.
        response_mask: [T], 1 for a generated token.
        response_logprobs: [T], the log-prob of each generated token, 0 elsewhere; None if no turn has any.
        kept_tokens: [T], the ids that top-k and top-p left at each generated token, [] elsewhere and where they are not
            known; None if no turn has any.
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

        Raises ValueError unless log-probs are given for every token of every turn, or for none.
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

    def _append(self, ids: list[int], mask: int, log_probs: list[float] | None, kept: list[list[int]] | None) -> None:
        self.response_ids += ids
        self.response_mask += [mask] * len(ids)
        if self.response_logprobs is not None:
            self.response_logprobs += [0.0] * len(ids) if log_probs is None else log_probs
        if self.kept_tokens is not None:
            self.kept_tokens += [[]] * len(ids) if kept is None else kept


@dataclass
class Node:
    """Consecutive token ids after those of its parent, either all generated in one turn or all given.

    Attributes:
        ids: token ids [T].
        generated: whether the model generated them.
        log_probs: [T] of generated ids, or None.
        version: the weights version that generated them.
        kept: [T], the ids that top-k and top-p left where each generated id was sampled, or None.
        children: what follows, in the order in which it was added.
    """

    ids: list[int]
    generated: bool = False
    log_probs: list[float] | None = None
    version: int | None = None
    children: list[Node] = field(default_factory=list)
    kept: list[list[int]] | None = None


@dataclass
class Match:
    """The longest beginning of some ids that is in a tree: the nodes from the root, and the number of ids.

    The ids may end within the last node, whose last `excess` tokens they do not have.
    """

    path: list[Node]
    tokens: int

    @property
    def excess(self) -> int:
        return sum(len(node.ids) for node in self.path) - self.tokens


class ConversationTree:
    """A record of all requests of a program to a model: what each was given, and what was generated.

    A prompt that starts with known tokens, given or generated, continues them: a conversation that only grows is one
    path, and one whose history is edited, or several at once, are branches. Every generated turn is a node of its own,
    also where the same ids were generated twice.
    """

    def __init__(self) -> None:
        self.root = Node([])
        self.has_log_probs: bool | None = None  # None before the first turn
        self.has_kept = False  # whether a turn has the ids that top-k and top-p left
        self.turns = 0

    def add(
        self, prompt_ids: Sequence[int], ids: Sequence[int], log_probs: Sequence[float] | None = None,
        version: int | None = None, kept: Sequence[list[int]] | None = None,
    ) -> None:  # fmt: skip
        """Record a turn: the prompt that the engine got, and what it generated. An empty turn is not recorded.

        Raises ValueError unless log-probs are given for every token of every turn, or for none.
        """
        if not ids:
            return
        if log_probs is not None and len(log_probs) != len(ids):
            raise ValueError(f"{len(log_probs)} log-probs for {len(ids)} generated tokens")
        if self.has_log_probs not in (None, log_probs is not None):
            raise ValueError("either all generated turns have log-probs, or none")
        self.has_log_probs = log_probs is not None
        known = self._match(prompt_ids)
        node = known.path[-1]
        if known.excess:
            _split(node, len(node.ids) - known.excess)
        if known.tokens < len(prompt_ids):
            given = Node(list(prompt_ids[known.tokens :]))
            node.children.append(given)
            node = given
        node.children.append(Node(list(ids), True, log_probs and list(log_probs), version, kept=kept and list(kept)))
        self.has_kept |= kept is not None
        self.turns += 1

    def _match(self, ids: Sequence[int]) -> Match:
        """The longest match; of two that match as far, the one that ends with a node, which needs no split."""
        longest_whole = longest_cut = Match([self.root], 0)
        waiting = [longest_whole]  # matches that end with a node, whose children are to be compared
        while waiting:
            match = waiting.pop()
            if match.tokens > longest_whole.tokens:
                longest_whole = match
            for child in reversed(match.path[-1].children):
                same = common_length(child.ids, ids[match.tokens : match.tokens + len(child.ids)])
                longer = Match([*match.path, child], match.tokens + same)
                if same == len(child.ids):
                    waiting.append(longer)
                elif longer.tokens > longest_cut.tokens:
                    longest_cut = longer
        return longest_cut if longest_cut.tokens > longest_whole.tokens else longest_whole

    def appended(self, prompt_ids: Sequence[int]) -> int:
        """Tokens that a turn after this prompt adds to `response_length` besides its own: what was given after a leaf,
        which becomes a part of that row's response. After anything else a new row begins, with them in its prompt."""
        known = self._match(prompt_ids)
        leaf = known.path[-1]
        continues_row = leaf.generated and not leaf.children and not known.excess
        return len(prompt_ids) - known.tokens if continues_row else 0

    @property
    def response_length(self) -> int:
        """Tokens in the responses of all rows."""
        return sum(len(node.ids) for _, response in self._leaves() for node in response)

    def rows(self) -> list[Conversation]:
        """The tokens from the root to each leaf, depth first.

        A prompt ends before the first token that is trained in its row: each generated token is trained in one row.
        Either all rows have log-probs or none has; the same holds for kept tokens.
        """
        rows = []
        for prompt, response in self._leaves():
            row = Conversation([token for node in prompt for token in node.ids])
            row.response_logprobs = [] if self.has_log_probs else None
            row.kept_tokens = [] if self.has_kept else None
            for node in response:
                if node.generated:
                    row.add_generated(node.ids, node.log_probs, node.version, node.kept)
                else:
                    row.add_given(node.ids)
            rows.append(row)
        return rows

    def _leaves(self) -> Iterator[tuple[list[Node], list[Node]]]:
        """(nodes of the prompt, nodes of the response) on the path to each leaf, depth first."""
        waiting: list[tuple[list[Node], Node]] = [([], child) for child in reversed(self.root.children)]
        while waiting:
            before, node = waiting.pop()  # nodes whose tokens an earlier row trains, and the first of this row's own
            own = [node]
            while node.children:
                # Depth first: the deepest branch is popped next, and of its siblings the one that was added first.
                waiting += [([*before, *own], child) for child in reversed(node.children[1:])]
                node = node.children[0]
                own.append(node)
            given = next((i for i, n in enumerate(own) if n.generated), len(own))
            yield [*before, *own[:given]], own[given:]


def common_length(one: Sequence[int], other: Sequence[int]) -> int:
    """The number of tokens with which both begin."""
    if one == other:  # faster than the loop
        return len(one)
    for position, (a, b) in enumerate(zip(one, other, strict=False)):
        if a != b:
            return position
    return min(len(one), len(other))


def _split(node: Node, at: int) -> None:
    """Move the tokens from `at` on into a child, which takes the node's children."""
    log_probs, kept = node.log_probs, node.kept
    rest = replace(node, ids=node.ids[at:], log_probs=log_probs and log_probs[at:], kept=kept and kept[at:])
    node.ids, node.children = node.ids[:at], [rest]
    node.log_probs, node.kept = log_probs and log_probs[:at], kept and kept[:at]
