"""The layout of a batch without padding, optionally with shared prefixes computed once: one flat row of tokens.

Only attention mixes tokens, so everything else runs on the flat row [1, T] directly; attention.py runs attention on it.
Convolutions, recurrences and linear attention get the segments' boundaries, which transformers' kernels for them take.
The layout is computed on the host by a few operations on the whole batch, so that no kernel of a device is waited for.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import cached_property
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
import torch.nn.functional as F
from tensordict import TensorDict

from verl.protocol.sampling_mask import SAMPLING_MASK
from verl.training.parallel.sequence_parallel import get_ulysses_sequence_parallel_group
from verl.training.policy.prefix_tree import TREE_COLUMNS, PrefixTree, prefix_tree

ON_HOST = "columns_on_host"


class Part(NamedTuple):
    """S segments that share one attention call, right-padded; indices are flat positions, padding points to 0."""

    queries: torch.Tensor  # int64 [S, Q]
    keys: torch.Tensor  # int64 [S, K]
    mask: torch.Tensor | None  # bool [S, 1, Q, K], True = attended; None: causal within the segment
    valid: torch.Tensor  # bool [S, Q], True = not padding


class Segments(NamedTuple):
    """What a kernel for segments without padding needs to know of S segments."""

    query_ends: torch.Tensor  # int32 [S + 1], 0 and the ends of the segments' queries
    key_ends: torch.Tensor  # int32 [S + 1], of their keys
    most_queries: int  # of a segment
    most_keys: int

    @classmethod
    def of(cls, lengths: torch.Tensor, device: torch.device) -> Segments:
        """lengths: int64 [S, 2] on the host, number of queries and of keys."""
        padded = F.pad(lengths.cumsum(0).to(torch.int32), (0, 0, 1, 0))
        return cls(*padded.to(device, non_blocking=True).T.contiguous(), *lengths.amax(0).tolist())


class Packing:
    """A batch [B, L] as one flat row of T tokens in S segments, and the positions that predict its N response tokens.

    A segment's queries follow one another in the flat row; each attends to the segment's keys up to its own, the last
    query to all of them. With a `group` of ranks that share the row, `tokens`, `predicted_from`, `response_index` and
    `repeats` are those of this rank's part of it, and positions count from its start; the rest is of the full row.

    tokens: int64 [T], index of each flat token in the flattened batch [B * L].
    predicted_from: int64 [N], flat position before each counted response token, row by row.
    response_index: int64 [N], index of that response token in the flattened responses [B * R].
    lengths: int64 [S, 2] on the host, number of queries and of keys.
    keys: int64 [K] on the host, flat positions of the segments' keys; None: those of its queries.
    attention_mask: bool [S, 1, Q, K] in place of causal attention, rows padded to the longest.
    single_part: all segments share one attention call, whatever their lengths.
    prefix_len: tokens of a cached row, split among the same ranks; `keys` below it are in that row.
    parents: int64 [S] on the host, which segment a segment continues, -1 for none: its keys are those of its ancestors
        and its own; None where no prefix is shared.
    device: of the batch; None: of `tokens`.
    places: int64 [B, L] on the host, flat position of each token, -1 at padding.
    repeats: where rows share predicted tokens, else None: the index of each of M counted tokens in the flattened
        responses and its number among the N, int64 [M] each.
    """

    # Not a dataclass: FSDP2 rebuilds those among the inputs of every layer, and what is cached below would be lost.
    def __init__(
        self, tokens: torch.Tensor, predicted_from: torch.Tensor, response_index: torch.Tensor, lengths: torch.Tensor,
        keys: torch.Tensor | None, attention_mask: torch.Tensor | None = None, single_part: bool = False,
        group: dist.ProcessGroup | None = None, prefix_len: int = 0, parents: torch.Tensor | None = None,
        device: torch.device | str | None = None, places: torch.Tensor | None = None,
        repeats: tuple[torch.Tensor, torch.Tensor] | None = None,
    ) -> None:  # fmt: skip
        self.lengths, self.keys, self.parents, self.places, self.group = lengths, keys, parents, places, group
        self.attention_mask, self.single_part = attention_mask, single_part
        self._parts: dict[int | None, tuple[Part, ...]] = {}
        device = device or tokens.device
        if group is not None:
            ranks, rank = dist.get_world_size(group), dist.get_rank(group)
            share, prefix_share = -(-len(tokens) // ranks), -(-prefix_len // ranks)  # tokens of each rank
            tokens = F.pad(tokens, (0, share * ranks - len(tokens)))[rank * share : (rank + 1) * share]
            here = predicted_from // share == rank
            if repeats is not None:
                index, predicted = repeats
                mine, number_here = here[predicted], here.cumsum(0) - 1  # numbers among those of this rank
                repeats = index[mine], number_here[predicted[mine]]
            predicted_from, response_index = predicted_from[here] - rank * share, response_index[here]
            if prefix_len:  # all ranks' keys in order of ranks: of each its part of the prefix, then of this row
                in_row, both = keys - prefix_len, prefix_share + share
                of_prefix = keys // prefix_share * both + keys % prefix_share
                of_row = in_row // share * both + prefix_share + in_row % share
                self.keys = torch.where(in_row < 0, of_prefix, of_row)
        self.tokens, self.predicted_from, self.response_index = (
            t.to(device, non_blocking=True) for t in (tokens, predicted_from, response_index)
        )
        self.repeats = None if repeats is None else tuple(t.to(device, non_blocking=True) for t in repeats)

    @cached_property
    def length(self) -> int:
        """Tokens of the full flat row."""
        return int(self.lengths[:, 0].sum())

    def parts(self, window: int | None = None) -> tuple[Part, ...]:
        """The segments by their numbers of keys, up to a power of two each: little padding in a part.

        window: how many keys a query attends to at most, its own included; ignored with an `attention_mask`.
        """
        if window not in self._parts:
            parts = []
            for part, lengths in self._parts_on_host:
                if window is not None and self.attention_mask is None:
                    part = part._replace(mask=_causal(lengths, window))
                parts.append(Part(*(None if t is None else self._on_device(t) for t in part)))
            self._parts[window] = tuple(parts)
        return self._parts[window]

    @cached_property
    def _parts_on_host(self) -> list[tuple[Part, torch.Tensor]]:
        """Each part with its segments' numbers of queries and of keys, int64 [S, 2]."""
        queries, keys = self.lengths.T  # [S]
        starts = _starts(self.lengths)  # of a segment's queries in the flat row, of its keys in `keys`
        causal = queries == keys
        # The exponent of the least power of two that is not below the number of keys.
        sizes = torch.zeros_like(keys) if self.single_part else torch.frexp((keys - 1).double()).exponent
        kinds = dict.fromkeys(zip(causal.tolist(), sizes.tolist(), strict=True))
        parts = []
        for is_causal, size in sorted(kinds, key=lambda kind: not kind[0]):  # causal ones first
            segments = ((causal == is_causal) & (sizes == size)).nonzero()[:, 0]
            lengths = self.lengths[segments]
            most_queries, most_keys = lengths.amax(0).tolist()
            first_query, first_key = starts[segments].T.unsqueeze(-1)  # [S, 1] each
            own_queries, own_keys = lengths.T.unsqueeze(-1)  # [S, 1] each
            query_column, key_column = torch.arange(most_queries), torch.arange(most_keys)
            valid, key_valid = query_column < own_queries, key_column < own_keys  # [S, Q], [S, K]
            positions = (first_key + key_column) * key_valid
            if self.keys is not None:
                positions = self.keys[positions] * key_valid
            mask = self.attention_mask
            if mask is None and not is_causal:  # of a causal part, padding comes after all that could attend to it
                mask = _causal(lengths)
            parts.append((Part((first_query + query_column) * valid, positions, mask, valid), lengths))
        return parts

    @cached_property
    def restore(self) -> torch.Tensor:
        """int64 [T]: index of each flat token's output among the S * Q rows of all parts."""
        parts = [part for part, _ in self._parts_on_host]
        order = torch.cat([part.queries[part.valid] for part in parts])
        restore = torch.empty_like(order)
        restore[order] = torch.nonzero(torch.cat([part.valid.flatten() for part in parts]))[:, 0]
        return self._on_device(restore)

    @cached_property
    def segments(self) -> Segments:
        """Each segment's queries and all its keys, one segment after another."""
        return Segments.of(self.lengths, self.tokens.device)

    @cached_property
    def own_segments(self) -> Segments:
        """Each segment's queries as its only keys: segments without what they continue."""
        return Segments.of(self.lengths[:, [0, 0]], self.tokens.device)

    @cached_property
    def segment_index(self) -> torch.Tensor:
        """int32 [1, T]: the segment of each token of a flat row that ranks do not share."""
        index = torch.repeat_interleave(torch.arange(len(self.lengths), dtype=torch.int32), self.lengths[:, 0])
        return self._on_device(index.unsqueeze(0))

    @cached_property
    def ancestors(self) -> list[tuple[Segments, torch.Tensor, torch.Tensor]]:
        """For each depth of the tree, its segments that others continue: all descendants as queries, itself as keys;
        then the flat positions of these queries, int64 [Q], and of these keys, int64 [K].
        """
        count = self.lengths[:, 0]
        starts, generations = _starts(count), [torch.arange(len(count))]
        while (generations[-1] >= 0).any():
            generations.append(torch.where(generations[-1] >= 0, self.parents[generations[-1]], -1))
        chain = torch.stack(generations)  # [depths + 1, S]: a segment, its parent, the parent of that one, ...
        depth = (chain >= 0).sum(0) - 1
        levels = []
        for level in range(int(depth.max())):
            deeper = (depth > level).nonzero()[:, 0]
            ancestor, order = chain[depth[deeper] - level, deeper].sort(stable=True)
            above, number = ancestor.unique(return_inverse=True)
            below = deeper[order]  # descendants of the first of `above`, then of the next
            queries = torch.zeros_like(above).index_add(0, number, count[below])
            segments = Segments.of(torch.stack([queries, count[above]], 1), self.tokens.device)
            query_at, key_at = (self._on_device(_ranges(starts[i], count[i])) for i in (below, above))
            levels.append((segments, query_at, key_at))
        return levels

    @cached_property
    def key_index(self) -> torch.Tensor | None:
        """`keys` on the device of the batch."""
        return None if self.keys is None else self._on_device(self.keys)

    def _on_device(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor.to(self.tokens.device, non_blocking=True)

    def flat(self, values: torch.Tensor) -> torch.Tensor:
        """[B, L] -> [1, T]."""
        return values.reshape(-1)[self.tokens].unsqueeze(0)

    def spread(self, states: torch.Tensor, rows: int, width: int) -> torch.Tensor:
        """[1, T, H] -> [rows, width, H], 0 at padding: the inverse of `flat`."""
        empty = states.new_zeros(rows * width, states.shape[-1])
        return empty.index_copy(0, self.tokens, states[0]).view(rows, width, -1)

    def scatter_to_responses(self, values: torch.Tensor, shape: torch.Size) -> torch.Tensor:
        """Values [N] of the counted response tokens -> `shape` [B, R], 0 elsewhere."""
        index = self.response_index
        if self.repeats is not None:  # an embedding, whose backward pass is faster than that of indexing
            index, values = self.repeats[0], F.embedding(self.repeats[1], values[:, None])[:, 0]
        # No view of a flat tensor: FSDP2 warns of forwards that return views.
        place = index // shape[1], index % shape[1]
        placed = values.new_zeros(shape).index_put(place, values)
        return placed if self.group is None else _SumOfParts.apply(placed, self.group)

    def model_inputs(self, input_ids: torch.Tensor, position_ids: torch.Tensor, cache: Any = None) -> dict[str, Any]:
        """Keyword arguments of a packable model's forward for input_ids and position_ids, both int64 [B, L].

        `cache`, of transformers, takes the flat row's keys and values.
        """
        # A mask with four dimensions: transformers then builds none of its own.
        mask = torch.ones(1, 1, 1, 1, dtype=torch.bool, device=input_ids.device)
        inputs = {"input_ids": self.flat(input_ids), "position_ids": self.flat(position_ids), "attention_mask": mask,
                  "packing": self, "use_cache": cache is not None}  # fmt: skip
        if self.group is None:  # a rank's part of a flat row does not begin where a segment does
            inputs |= {"seq_idx": self.segment_index, "cu_seq_lens_q": self.own_segments.query_ends}
        return inputs if cache is None else inputs | {"past_key_values": cache}


def to_device(batch: TensorDict, device: torch.device) -> TensorDict:
    """A copy of the batch on `device` that also holds its columns on the host (`on_host`)."""
    on_device = batch.to(device)
    if device.type != "cpu":
        columns = {key: value for key, value in batch.items() if isinstance(value, torch.Tensor)}
        on_device.set_non_tensor(ON_HOST, OnHost(columns))
    return on_device


class OnHost:
    """The columns of a batch whose tensors are on a device, as they are on the host."""

    # Not a dataclass: FSDP2 would move its tensors to the device where a module gets them.
    def __init__(self, columns: Mapping[str, torch.Tensor]) -> None:
        self.columns = columns


def on_host(batch: TensorDict) -> Mapping[str, torch.Tensor]:
    """The columns of a batch from `to_device` on the host, without waiting for the device; else the batch itself."""
    return batch[ON_HOST].columns if ON_HOST in batch.keys() else batch


def pack_batch(batch: TensorDict, responses: int, *, share_prompt: bool = False) -> Packing:
    """`pack`, for the default Ulysses group, of a batch from `to_device` or one on the CPU.

    With `share_prompt`, tokens that rows of a group begin with are in the flat row once (`prefix_tree`), and their
    log-probs are computed once, unless rows have sampling masks.
    """
    needed = ("attention_mask", "counted", *(TREE_COLUMNS if share_prompt else ()))
    columns = {**{key: batch[key] for key in needed if key in batch.keys()}, **on_host(batch)}
    tree = prefix_tree(columns, responses) if share_prompt else None
    counted = columns["counted"].cpu() if "counted" in columns else None
    group, merged = get_ulysses_sequence_parallel_group(), SAMPLING_MASK not in batch.keys()
    return pack(columns["attention_mask"].cpu(), responses, tree, counted, batch["input_ids"].device, group, merged)


def pack(
    attention_mask: torch.Tensor, responses: int, tree: PrefixTree | None = None, counted: torch.Tensor | None = None,
    device: torch.device | str = "cpu", group: dist.ProcessGroup | None = None, merged: bool = True,
) -> Packing:  # fmt: skip
    """The packing, on `device`, of rows [B, P+R] whose last R = `responses` columns are the responses.

    attention_mask: [B, P+R] on the host, 1 = token. Tokens that rows share in `tree` are in the flat row once; if
    `merged`, they are also predicted once. counted [B, R]: 0 leaves a response token out of what is
    predicted. `group`: ranks that have the same rows and share the flat row. Raises ValueError if a row has an empty
    prompt.
    """
    attended = attention_mask.bool()
    split = attended.shape[1] - responses
    if not attended[:, :split].any(1).all():
        raise ValueError("a row of the batch has an empty prompt: nothing predicts its first response token.")
    length = attended.sum(1)
    shared = torch.zeros_like(length) if tree is None else tree.shared
    kept = attended & (attended.cumsum(1) > shared[:, None])  # what a row adds to the flat row
    column = torch.arange(int(length.max()))
    filled = column < length[:, None]
    position = torch.zeros(filled.shape, dtype=torch.int64)  # [B, longest], flat, of a row's tokens without padding
    position[filled & (column >= shared[:, None])] = torch.arange(int(kept.sum()))
    for row in shared.nonzero()[:, 0].tolist():
        position[row, : shared[row]] = position[tree.parent[row], : shared[row]]
    places, before = torch.full((2, *attended.shape), -1).unbind()  # of each token, and of the one before it
    places[attended], before[attended] = position[filled], F.pad(position, (1, -1))[filled]
    predicted = attended[:, split:] if counted is None else attended[:, split:] & counted.bool()
    response_index = predicted.flatten().nonzero()[:, 0]
    lengths, keys, parents, repeats = torch.stack([length] * 2, 1), None, None, None
    if shared.any():
        lengths, keys, parents = _nodes(length, shared, position)
        at = places[:, split:].flatten()[response_index]
        single, number = at.unique(return_inverse=True)
        if merged and len(single) < len(at):
            repeats = response_index, number
            response_index = torch.empty_like(single).index_put((number,), response_index)
    tokens, predicted_from = kept.flatten().nonzero()[:, 0], before[:, split:].flatten()[response_index]
    return Packing(tokens, predicted_from, response_index, lengths, keys, group=group, parents=parents, device=device,
                   places=places, repeats=repeats)  # fmt: skip


def _nodes(
    length: torch.Tensor, shared: torch.Tensor, position: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """`lengths`, `keys` and `parents` of a Packing whose segments are the nodes of a tree.

    length, shared: int64 [B], tokens of a row, and those of them that an earlier row has in the flat row. position:
    int64 [B, longest], flat position of each token of a row.
    """
    added = length - shared
    begins, total = _starts(added), int(added.sum())  # of what a row adds
    adding, sharing = added.nonzero()[:, 0], shared.nonzero()[:, 0]
    # A node starts where a row begins to add tokens, and after a token from which another row goes on.
    cuts = position[sharing, shared[sharing] - 1] + 1
    start = torch.cat([begins[adding], cuts[cuts < total]]).unique()
    queries = torch.diff(start, append=torch.tensor([total]))
    row = adding[torch.searchsorted(begins[adding], start, right=True) - 1]  # that has the node
    first = shared[row] + start - begins[row]  # number of a node's first token in its row
    keys = position.flatten()[_ranges(row * position.shape[1], first + queries)]  # the row up to the node's end
    parents = torch.searchsorted(start, position[row, (first - 1).clamp(min=0)], right=True) - 1
    return torch.stack([queries, first + queries], 1), keys, parents.where(first > 0, -1)


def pack_rows(
    attention_mask: torch.Tensor, query_key_mask: torch.Tensor | None = None, device: torch.device | str = "cpu"
) -> Packing:
    """The packing, on `device`, of rows without responses: nothing is predicted.

    attention_mask: [B, P], 1 = token, contiguous in each row. query_key_mask: bool [B, P, P], True where a query (row)
    attends to a key (column); None means causal. Both are on the host.
    """
    attended, mask = attention_mask.bool(), None
    lengths = attended.sum(1)
    if query_key_mask is not None:
        first = attended.long().argmax(1)[:, None]
        number = torch.arange(int(lengths.max()))
        valid = number < lengths[:, None]
        column = (first + number) * valid  # [B, W], of each token of a row
        row = torch.arange(len(column))[:, None, None]
        mask = query_key_mask[row, column[:, :, None], column[:, None, :]] & valid[:, None, :]
        mask |= torch.eye(mask.shape[1], dtype=torch.bool)  # a padding query without any key would give NaN
        mask = mask.unsqueeze(1)
    none, tokens = torch.empty(0, dtype=torch.int64), attended.flatten().nonzero()[:, 0]
    sizes = torch.stack([lengths, lengths], 1)
    return Packing(tokens, none, none, sizes, None, mask, single_part=True, device=device)


class _SumOfParts(torch.autograd.Function):
    """The sum of what ranks computed of one tensor; each gets its gradient as often as there are ranks.

    Every rank computes the loss of the full rows, and gradients are averaged over ranks later.
    """

    @staticmethod
    def forward(ctx: Any, part: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
        ctx.ranks = dist.get_world_size(group)
        total = part.clone()
        dist.all_reduce(total, group=group)
        return total

    @staticmethod
    def backward(ctx: Any, *gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        return gradient[0] * ctx.ranks, None


def _causal(lengths: torch.Tensor, window: int | None = None) -> torch.Tensor:
    """bool [S, 1, Q, K], True where a query (row) attends to a key: the last of `lengths` [S, 2] queries to the last
    key, each to at most `window` keys. Padding queries attend to some key too, else they would give NaN.
    """
    (most_queries, most_keys), (queries, keys) = lengths.amax(0).tolist(), lengths.T[..., None]
    own_key = torch.minimum(keys - queries + torch.arange(most_queries), keys - 1)[..., None]  # [S, Q, 1]
    key = torch.arange(most_keys)
    attended = key <= own_key
    return (attended if window is None else attended & (key > own_key - window)).unsqueeze(1)


def _starts(lengths: torch.Tensor) -> torch.Tensor:
    """Where each of consecutive ranges of these lengths [S, ...] begins."""
    return lengths.cumsum(0) - lengths


def _ranges(starts: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
    """start, start + 1, ... of each range, one range after another: int64 [S], [S] -> [sum of lengths]."""
    return torch.repeat_interleave(starts - _starts(lengths), lengths) + torch.arange(int(lengths.sum()))
