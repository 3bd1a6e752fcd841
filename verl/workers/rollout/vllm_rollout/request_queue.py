"""One queue of prompts for the engines of all ranks: an engine takes the next ones whenever it has room."""

from __future__ import annotations

import torch
import torch.distributed as dist

from verl.utils.distributed import shared_store


class RequestQueue:
    """Numbers of the prompts of all ranks, each taken by one engine, and the way of the answers back to their ranks.

    An engine is `tp_group`, its ranks, or a rank alone (None). Every rank makes its queue at the same time.
    """

    def __init__(self, tp_group: dist.ProcessGroup | None) -> None:
        self.group = dist.new_group(backend="gloo")
        self.tp_group = tp_group
        self.leads = tp_group is None or dist.get_rank(tp_group) == 0
        self.engines = dist.get_world_size() // (1 if tp_group is None else dist.get_world_size(tp_group))
        self.store, self.batch = shared_store(), 0

    def open(self, count: int) -> None:
        """Start a batch of `count` prompts in all; every rank calls it."""
        self.count, self.batch = count, self.batch + 1

    def take(self, most: int) -> range:
        """The next at most `most` numbers for this engine; fewer only if no more are left."""
        first = [self.store.add(f"taken/{self.batch}", most) - most if self.leads else None]
        if self.tp_group is not None:
            dist.broadcast_object_list(first, group_src=0, group=self.tp_group)
        return range(min(first[0], self.count), min(first[0] + most, self.count))

    def give_back(self, rows: torch.Tensor, per_rank: int) -> torch.Tensor:
        """rows [N, C] int32 of this engine, each with its number in column 0, to the ranks that asked: rank r gets
        those from r * per_rank on. Returns this rank's rows [per_rank, C] in order.
        """
        rows = rows[rows[:, 0].argsort()] if self.leads else rows[:0]
        ranks = dist.get_world_size(self.group)
        sent = torch.bincount(rows[:, 0].long() // per_rank, minlength=ranks)
        counts = torch.empty_like(sent)
        dist.all_to_all_single(counts, sent, group=self.group)
        received = rows.new_empty(per_rank, rows.shape[1])
        dist.all_to_all_single(received, rows.contiguous(), counts.tolist(), sent.tolist(), group=self.group)
        if dist.get_rank(self.group) == 0:
            self.store.delete_key(f"taken/{self.batch}")  # every engine has seen the end of the queue
        return received[received[:, 0].argsort()]
