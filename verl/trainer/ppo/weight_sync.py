"""The weights of the rollout: when they are sent, how often, and whether they give the trainer's log-probs."""

import math
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import numpy as np
import torch
from loguru import logger

from verl.config.ppo import PPOConfig
from verl.config.rollout import ROLLOUTS_OF_THE_ACTOR
from verl.protocol import DataProto
from verl.single_controller.ray import RayWorkerGroup
from verl.trainer.ppo import batching
from verl.trainer.ppo.rollout_phase import RolloutPhase
from verl.trainer.ppo.turn_rows import RankRows

WEIGHT_SYNCS = "rollout/weight_syncs"
PROBE_SAMPLES = 8  # at least
PROBE_TOKENS = 16  # of a sample
LIMIT, LIMIT_OF_HALF = 1e-3, 0.05  # largest difference in float32; mean difference in half precision
PATIENCE = 3  # steps in a row that disagree, until a warning
NAME = "actor_rollout_ref.rollout.name"
REASONS = (
    "Likely reasons: the engine did not take all weights (look for its warnings about layers that it did not load); "
    "actor_rollout_ref.model.override_config, rope scaling or a tied output matrix that only one of the two has; "
    "actor_rollout_ref.rollout.quantization or engine_kwargs; an architecture that one of the two computes differently "
    f"(compare with {NAME}=hf, and with actor_rollout_ref.model.use_remove_padding=false "
    "actor_rollout_ref.actor.share_prompt_forward=false)."
)


class WeightSync:
    """Wakes the rollout with the actor's newest weights, and puts it to sleep again.

    The log-probs that some of these weights give are compared with the trainer's (rollout.verify_weights_every).
    `loader` is the training data, `timed(name)` the context in which a part of the work is measured.
    """

    def __init__(
        self, check: "RolloutCheck", rollout: RolloutPhase, actor: RayWorkerGroup, rank_rows: RankRows, loader: Any,
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
        probe = None
        if sent:
            self.count += 1
            if self.check.is_due(self.count):
                with self.timed("check_rollout"):
                    probe = self.rollout.probe(self._probe_prompts(), self.rank_rows.n, PROBE_TOKENS)
        yield {WEIGHT_SYNCS: int(sent) + self.early}
        self.early = 0
        self.actor.trainer_mode()  # after an error the run ends: the rollout is left as it is
        if probe is not None:
            with self.timed("check_rollout"):
                probe.batch["group_index"] = batching.prompt_groups(probe)
                output = self.rank_rows.forward(self.actor.compute_log_prob, probe)
                probe.batch["old_log_probs"] = output.batch["old_log_probs"]
                self.check.compare(probe)

    def _probe_prompts(self) -> DataProto:
        """Prompts [B, P] to compare log-probs on, equally many for each rank.

        They are those that the rollout answered last: a prefix cache that was not emptied still has their keys and
        values. Before the first step they are the first ones of the training data.
        """
        ranks = self.rank_rows.ranks
        count = ranks * math.ceil(PROBE_SAMPLES / (ranks * self.rank_rows.n))
        if self.recent is not None:
            prompts = self.recent.select_idxs(np.arange(count) % len(self.recent))
        else:
            rows = [self.loader.dataset[i % len(self.loader.dataset)] for i in range(count)]
            prompts = DataProto.from_single_dict(self.loader.collate_fn(rows))
        prompts.non_tensor_batch["uid"] = np.array([str(i) for i in range(count)], dtype=object)
        return prompts


class RolloutCheck:
    """Compares the log-probs of rollout and trainer after weight updates, and watches those of the samples of steps.

    In float32 no log-prob may differ by more than LIMIT. Where one of the two computes in half precision, the mean of
    the differences may be LIMIT_OF_HALF.
    """

    def __init__(self, config: PPOConfig) -> None:
        self.rollout = config.actor_rollout_ref.rollout
        dtypes = self.rollout.dtype, config.actor_rollout_ref.actor.fsdp_config.dtype
        self.exact = all(dtype in ("fp32", "float32") for dtype in dtypes)
        self.limit = LIMIT if self.exact else LIMIT_OF_HALF
        self.types = "rollout {}, trainer {}".format(*dtypes)
        engine_options = self.rollout.engine_kwargs.get(self.rollout.name) or {}
        self.quantized = self.rollout.quantization is not None or engine_options.get("quantization") is not None
        self.disagreed = 0  # steps in a row

    @property
    def applies(self) -> bool:
        """Whether an engine has weights of its own and returns log-probs that can be compared."""
        requested = self.rollout.verify_weights_every > 0
        return requested and self.rollout.name not in ROLLOUTS_OF_THE_ACTOR and self._comparable

    def is_due(self, update: int) -> bool:
        """Whether to compare after weight update `update`, counted from 1: the first, then by verify_weights_every."""
        return self.applies and (update - 1) % self.rollout.verify_weights_every == 0

    @property
    def _comparable(self) -> bool:
        """Whether the samples' log-probs are log-probs of the weights that the trainer has."""
        return not self.rollout.skip_rollout and "logits" not in (self.rollout.logprobs_mode or "")

    def compare(self, samples: DataProto) -> None:
        """Raise RuntimeError if rollout_log_probs and old_log_probs [B, R] of the samples disagree.

        A quantized engine only gets a warning. Nothing is compared with a rollout of the user's own that returns no
        rollout_log_probs, or more tokens than it was asked for and therefore perhaps other log-probs.
        """
        given = samples.batch.get("rollout_log_probs")
        if given is None or given.shape[1] > PROBE_TOKENS:
            no_log_probs = f'returns no log-probs for meta_info["probe_tokens"]={PROBE_TOKENS}: they are not compared'
            logger.info(f"{NAME}={self.rollout.name} {no_log_probs}")
            return
        mean, largest, tokens = self._differences(samples)
        difference = f"mean {mean:.2g}, largest {largest:.2g} ({tokens} tokens; {self.types})"
        if (largest if self.exact else mean) <= self.limit:
            logger.info(f"log-probs of rollout and trainer agree: {difference}")
            return
        limit = f"{'' if self.exact else 'a mean of '}at most {self.limit}"
        text = (
            f"{NAME}={self.rollout.name}: the weights that it received last do not give the trainer's log-probs. They "
            f"differ by {difference}; {limit} is expected. {REASONS}"
        )
        if not self.quantized:
            raise RuntimeError(text)
        logger.warning(text)

    def watch(self, samples: DataProto) -> None:
        """Warn where the samples of PATIENCE steps in a row have other log-probs than the trainer's."""
        if not self._comparable or not samples.batch["response_mask"].any():
            return
        mean, _, _ = self._differences(samples)
        self.disagreed = self.disagreed + 1 if mean > self.limit else 0
        if self.disagreed == PATIENCE:
            logger.warning(
                f"log-probs of rollout and trainer have differed for {PATIENCE} steps, now by {mean:.2g} on average "
                f"({self.types}). {REASONS} With top_k, top_p or a repetition penalty the rollout's log-probs are "
                "those of another distribution by design, with logprobs_mode=raw_logprobs those of temperature 1."
            )

    @staticmethod
    def _differences(samples: DataProto) -> tuple[float, float, int]:
        """Mean and largest |rollout_log_probs - old_log_probs| over response_mask [B, R], and its number of tokens."""
        columns: Any = samples.batch
        mask = columns["response_mask"].bool()
        gaps = (columns["rollout_log_probs"] - columns["old_log_probs"]).abs()[mask].nan_to_num(torch.inf)
        return gaps.mean().item(), gaps.max().item(), int(mask.sum())
