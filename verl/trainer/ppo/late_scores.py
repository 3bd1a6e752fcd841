"""Scores that are computed while the ranks compute log-probs and values (reward_model.launch_reward_fn_async)."""

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import torch

from verl.protocol import DataProto
from verl.reward.rows import EXTRAS
from verl.trainer.ppo.batching import DropCounts

ROW = "sample_row"  # column with a sample's number in the step [B], while its score is computed

Scored = tuple[DataProto, DropCounts, dict[str, Any]]


class LateScores:
    """Runs `score(samples, counts)` in a thread, from `begin` to `take`."""

    def __init__(self, score: Callable[[DataProto, DropCounts], Scored]) -> None:
        self.score, self.thread = score, ThreadPoolExecutor(1)
        self.pending: Future[Scored] | None = None

    def begin(self, samples: DataProto, counts: DropCounts) -> None:
        """Begin to score the samples [B], which get the column ROW; they may be reordered meanwhile."""
        samples.batch[ROW] = torch.arange(len(samples))
        own = DataProto(samples.batch.clone(recurse=False), dict(samples.non_tensor_batch), {})
        self.pending = self.thread.submit(self.score, own, counts)

    def take(self, batch: DataProto) -> tuple[DataProto, dict[str, Any]]:
        """The rows of `batch` that got a score, in their order, with token_level_scores [B', R] and the reward's
        extras, and the metrics of scoring. ValueError if no sample has a score.
        """
        scored, counts, metrics = self.pending.result()
        self.pending = None
        counts.check_any_scored()
        place = {row: i for i, row in enumerate(scored.batch[ROW].tolist())}
        rows = batch.batch.pop(ROW).tolist()
        kept = batch.select_idxs([i for i, row in enumerate(rows) if row in place])
        own = [place[row] for row in rows if row in place]
        kept.batch["token_level_scores"] = scored.batch["token_level_scores"][own]
        kept.non_tensor_batch[EXTRAS] = scored.non_tensor_batch[EXTRAS][own]
        return kept, metrics | counts.metrics()
