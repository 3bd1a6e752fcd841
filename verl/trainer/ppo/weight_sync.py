"""The weights of the rollout: when they are sent, how often, and whether they give the trainer's log-probs."""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import numpy as np

from verl.protocol import DataProto
from verl.single_controller.ray import RayWorkerGroup
from verl.trainer.ppo import batching
from verl.trainer.ppo.rank_rows import RankRows
from verl.trainer.ppo.rollout_check import PROBE_TOKENS, RolloutCheck
from verl.trainer.ppo.rollout_phase import RolloutPhase

WEIGHT_SYNCS = "rollout/weight_syncs"
PROBE_SAMPLES = 8  # at least


class WeightSync:
    """Wakes the rollout with the actor's newest weights, and puts it to sleep again.

    The log-probs that some of these weights give are compared with the trainer's (rollout.verify_weights_every).
    `loader` is the training data, `timed(name)` the context in which a part of the work is measured.
    """

    def __init__(
        self, check: RolloutCheck, rollout: RolloutPhase, actor: RayWorkerGroup, rank_rows: RankRows, loader: Any,
        timed: Callable[[str], AbstractContextManager[None]],
    ) -> None:
        self.check, self.rollout, self.actor, self.rank_rows = check, rollout, actor, rank_rows
        self.loader, self.timed = loader, timed
        self.count = 0  # of weight updates
        self.early = 0  # syncs before the first step or validation, which counts them
        self.recent: DataProto | None = None  # prompts [B, P] that the rollout answered last

    def send_first(self) -> None:
        """Send the first weights, which ends the run if they arrive wrong, before anything else is computed."""
        if self.check.applies:
            with self.awake() as metrics:
                pass
            self.early = metrics[WEIGHT_SYNCS]

    @contextmanager
    def awake(self) -> Iterator[dict[str, Any]]:
        """The rollout holds the actor's newest weights within the block and sleeps after it; yields metrics."""
        with self.timed("update_weights"):
            sent = any(self.actor.rollout_mode())
        prompts, probe = self._prompts_if_due() if sent else None, None
        if prompts is not None:
            with self.timed("check_rollout"):
                probe = self.rollout.probe(prompts, self.rank_rows.n, PROBE_TOKENS)
        yield {WEIGHT_SYNCS: int(sent) + self.early}
        self.early = 0
        self.actor.trainer_mode()  # after an error the run ends: the rollout is left as it is
        if probe is not None:
            with self.timed("check_rollout"):
                probe.batch["group_index"] = batching.prompt_groups(probe)
                output = self.rank_rows.forward(self.actor.compute_log_prob, probe)
                probe.batch["old_log_probs"] = output.batch["old_log_probs"]
                self.check.compare(probe)

    def _prompts_if_due(self) -> DataProto | None:
        """Count a weight update; prompts [B, P] to compare log-probs on, equally many for each rank, or None.

        They are those that the rollout answered last: a prefix cache that was not emptied still has their keys and
        values. Before the first step they are the first ones of the training data.
        """
        self.count += 1
        if not self.check.applies or (self.count - 1) % self.check.rollout.verify_weights_every:
            return None
        ranks = self.rank_rows.ranks
        count = ranks * -(-PROBE_SAMPLES // (ranks * self.rank_rows.n))
        if self.recent is not None:
            prompts = self.recent.select_idxs(np.arange(count) % len(self.recent))
        else:
            rows = [self.loader.dataset[i % len(self.loader.dataset)] for i in range(count)]
            prompts = DataProto.from_single_dict(self.loader.collate_fn(rows))
        prompts.non_tensor_batch["uid"] = np.array([str(i) for i in range(count)], dtype=object)
        return prompts
