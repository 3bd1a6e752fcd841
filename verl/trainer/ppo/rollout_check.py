"""Whether the rollout's engine computes the log-probs of the trained model."""

from typing import Any

import torch
from loguru import logger

from verl.config.ppo import PPOConfig
from verl.config.rollout import ROLLOUTS_OF_THE_ACTOR
from verl.protocol import DataProto

PROBE_TOKENS = 16  # of a sample
LIMIT, LIMIT_OF_HALF = 1e-3, 0.05  # largest difference in float32; mean difference in half precision
PATIENCE = 3  # steps
NAME = "actor_rollout_ref.rollout.name"
REASONS = (
    "Likely reasons: the engine did not take all weights (look for its warnings about layers that it did not load); "
    "actor_rollout_ref.model.override_config, rope scaling or a tied output matrix that only one of the two has; "
    "actor_rollout_ref.rollout.quantization or engine_kwargs; an architecture that one of the two computes differently "
    "(compare with rollout.name=hf, and with model.use_remove_padding=false actor.share_prompt_forward=false)."
)


class RolloutCheck:
    """Compares the two models before the first step and at every `rollout.verify_weights_every`-th weight update, and
    watches the steps whose samples have log-probs.

    In float32 no log-prob may differ by more than LIMIT. Where one of the two computes in half precision, the mean of
    the differences may be LIMIT_OF_HALF.
    """

    def __init__(self, config: PPOConfig) -> None:
        roles = config.actor_rollout_ref
        self.rollout, types = roles.rollout, (roles.rollout.dtype, roles.actor.fsdp_config.dtype)
        self.exact = all(dtype in ("fp32", "float32") for dtype in types)
        self.types = f"rollout {types[0]}, trainer {types[1]}"
        own = self.rollout.engine_kwargs.get(self.rollout.name) or {}  # the engine's options by its own names
        self.quantized = self.rollout.quantization is not None or own.get("quantization") is not None
        self.disagreed = 0  # steps in a row

    @property
    def applies(self) -> bool:
        """Whether an engine has weights of its own and returns log-probs that can be compared."""
        checks = self.rollout.verify_weights_every > 0
        return checks and self.rollout.name not in ROLLOUTS_OF_THE_ACTOR and self._comparable

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
            what = f'returns no log-probs for meta_info["probe_tokens"]={PROBE_TOKENS}: they are not compared'
            return logger.info(f"{NAME}={self.rollout.name} {what}")
        mean, largest, tokens = self._differences(samples)
        shown = f"mean {mean:.2g}, largest {largest:.2g} ({tokens} tokens; {self.types})"
        if (largest if self.exact else mean) <= (LIMIT if self.exact else LIMIT_OF_HALF):
            return logger.info(f"log-probs of rollout and trainer agree: {shown}")
        limit = f"at most {LIMIT}" if self.exact else f"a mean of at most {LIMIT_OF_HALF}"
        what = (
            f"{NAME}={self.rollout.name}: the weights that it received last do not give the trainer's log-probs. They "
            f"differ by {shown}; {limit} is expected. {REASONS}"
        )
        if not self.quantized:
            raise RuntimeError(what)
        logger.warning(what)

    def watch(self, samples: DataProto) -> None:
        """Warn where the samples of PATIENCE steps in a row have other log-probs than the trainer's."""
        if not self._comparable or not samples.batch["response_mask"].any():
            return
        mean, _, _ = self._differences(samples)
        self.disagreed = self.disagreed + 1 if mean > (LIMIT if self.exact else LIMIT_OF_HALF) else 0
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
