"""The trainer's batch as rows that the ranks share evenly, and the ranks' outputs as columns of the batch."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from verl.protocol import DataProto, pad_dataproto_to_divisor, unpad_dataproto
from verl.protocol.sampling_mask import SAMPLING_MASK
from verl.trainer.ppo.batching import fill_groups
from verl.trainer.ppo.turn_rows import TURNS, from_rows, to_rows
from verl.utils.metric import reduce_metrics


@dataclass(frozen=True)
class RankRows:
    """Sends batches of groups of `n` samples to the methods of worker groups with so many ranks.

    With `whole_groups` the rows of a group stay on one rank.
    """

    n: int
    ranks: int
    whole_groups: bool

    def forward(self, method: Callable[[DataProto], DataProto], batch: DataProto) -> DataProto:
        """The method's columns [B, R] for the samples [B]; they need not divide by the ranks."""
        even = self.ranks * (self.n if self.whole_groups else 1)  # one of DAPO's generations may not divide
        if self._are_rows(batch) and len(batch) % even == 0:
            return method(batch.select(non_tensor_batch_keys=[]))
        filled, own = fill_groups(batch, self.n)
        padded, pad = pad_dataproto_to_divisor(filled, even)
        return unpad_dataproto(from_rows(method(to_rows(padded)), padded), pad_size=pad).select_idxs(own)

    def update(self, method: Callable[[DataProto], DataProto], batch: DataProto) -> dict[str, Any]:
        """The metrics of an update on the samples [B], whose groups the ranks share evenly."""
        if self._are_rows(batch):
            rows = batch.select(non_tensor_batch_keys=[])
        else:
            rows = to_rows(fill_groups(batch, self.n)[0])
        return reduce_metrics(method(rows).meta_info["metrics"])

    def _are_rows(self, batch: DataProto) -> bool:
        """Whether each sample is a row as it is: in a full group, of one turn, without a list of kept tokens."""
        columns = batch.non_tensor_batch
        full = len(batch) == self.n * len(set(columns["uid"].tolist()))
        return full and TURNS not in columns and SAMPLING_MASK not in columns
