"""One queue of prompts for the engines of all ranks: an engine takes the next prompts whenever it has room."""

from __future__ import annotations

from datetime import timedelta

import torch
import torch.distributed as dist

from verl.utils.distributed import shared_store

LONGEST_WAIT = timedelta(hours=10)  # of an engine for the slowest one, as for the default process group


class RequestQueue:
    """Gives each prompt of a batch to one engine, and sends the answers to the ranks that own the prompts.

    An engine is the ranks of `tp_group`, or a single rank (None). Collective: every rank constructs it.
    """

    def __init__(self, tp_group: dist.ProcessGroup | None) -> None:
        self.group = dist.new_group(backend="gloo", timeout=LONGEST_WAIT)
        self.tp_group = tp_group
        self.leads = tp_group is None or dist.get_rank(tp_group) == 0
        self.engines = dist.get_world_size() // (1 if tp_group is None else dist.get_world_size(tp_group))
        self.store = shared_store()
        self.batch = 0
        self.count = 0

    def open(self, count: int) -> None:
        """Start a batch of `count` prompts, those of all ranks together; every rank calls it."""
        self.count, self.batch = count, self.batch + 1

    def take(self, most: int) -> range:
        """Numbers of the next prompts for this engine, at most `most`; fewer only if no more are left."""
        first = [self.store.add(f"taken/{self.batch}", most) - most if self.leads else None]
        if self.tp_group is not None:
            dist.broadcast_object_list(first, group_src=0, group=self.tp_group)
        return range(min(first[0], self.count), min(first[0] + most, self.count))

    def give_back(
        self, rows: torch.Tensor, log_probs: torch.Tensor, per_rank: int
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Exchange the samples that this engine made for those of this rank's prompts; collective, on the CPU.

        rows [N, C] int32 with the sample's number in column 0, log_probs [N, L] float32; rank r owns the `per_rank`
        samples from number r * per_rank on. Returns rows [per_rank, C] in the order of their numbers, and log_probs.
        """
        columns = rows.shape[1]
        packed = torch.cat([rows, log_probs.view(torch.int32)], dim=1)
        packed = packed[packed[:, 0].argsort()] if self.leads else packed[:0]
        sent = torch.bincount(packed[:, 0].long() // per_rank, minlength=dist.get_world_size(self.group))
        counts = torch.empty_like(sent)
        dist.all_to_all_single(counts, sent, group=self.group)
        received = packed.new_empty(per_rank, packed.shape[1])
        dist.all_to_all_single(received, packed.contiguous(), counts.tolist(), sent.tolist(), group=self.group)
        if dist.get_rank(self.group) == 0:
            self.store.delete_key(f"taken/{self.batch}")  # every engine has seen the end of the queue
        received = received[received[:, 0].argsort()]
        return received[:, :columns], received[:, columns:].contiguous().view(torch.float32)

    def total(self, *counts: float) -> list[float]:
        """Sums of the counts over all engines; collective."""
        sums = torch.tensor(counts, dtype=torch.float64) * self.leads
        dist.all_reduce(sums, group=self.group)
        return sums.tolist()
