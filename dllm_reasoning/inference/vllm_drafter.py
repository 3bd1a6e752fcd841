"""A refined model drafts for itself in vLLM: `slide` and `verify` as a proposer, lossless, without extra forwards.

vLLM verifies a row's guesses in one forward of the target. What that forward predicts after the rejected guess are the
next guesses, as in AdaptiveWindows; noise tokens fill the window. `redraft` drops predictions that follow a
wrong guess: it pays one forward without guesses, and the next ones are drafted from nothing but committed tokens.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from dllm_reasoning.inference.settings import NOISE_KEY, SelfDraftSettings, trained_window
from verl.rollout.vllm_rollout.platform_worker import PlatformWorker


class SelfDrafter:
    """Proposer of vLLM's method `custom_class`."""

    def __init__(self, vllm_config: Any) -> None:
        config = vllm_config.model_config.hf_config
        self.settings = SelfDraftSettings(**vllm_config.additional_config.get("self_draft", {}))
        self.noise = config.to_dict().get(NOISE_KEY, config.eos_token_id)
        self.guesses = trained_window(config) - 1
        self.predicted: list[list[int]] = []  # of each request in the batch: the argmax of its rows

    def load_model(self, model: torch.nn.Module) -> None:
        """Called by vLLM: the target is the draft model."""

    def observe(self, logits: torch.Tensor, drafted: list[int]) -> None:
        """Keep what the step predicts: logits [sum of (drafted + 1), V], drafted tokens of each request."""
        tokens = logits.argmax(-1).tolist()
        ends = np.cumsum(np.array(drafted) + 1)
        self.predicted = [tokens[end - count - 1 : end] for end, count in zip(ends, drafted, strict=True)]

    def propose(
        self, sampled_token_ids: list[list[int]], num_tokens_no_spec: Any, token_ids_cpu: Any, **_: Any
    ) -> list[list[int]]:
        """The next drafts of each request: guesses that its window already holds, then noise tokens."""
        guessed, noise = self.settings.window(self.guesses, len(sampled_token_ids))
        drafts = []
        for sampled, predicted in zip(sampled_token_ids, self.predicted, strict=True):
            known = predicted[len(sampled) :]  # after the accepted guesses and the token that follows them
            if self.settings.mode != "redraft":
                known += [self.noise] * guessed
            elif len(known) > noise:  # predictions after a wrong guess
                known = []
            window = known[:guessed] + [self.noise] * noise
            drafts.append(window if sampled else [])  # none while the prompt is still read
        return drafts


class SelfDraftWorker(PlatformWorker):
    """Shows the target's logits to the proposer; named by `--worker-cls`."""

    def sample_tokens(self, grammar_output: Any) -> Any:
        state = self.model_runner.execute_model_state
        if state is not None:
            metadata = state.spec_decode_metadata
            drafted = [0] * len(state.logits) if metadata is None else metadata.num_draft_tokens
            self.model_runner.drafter.observe(state.logits, drafted)
        return super().sample_tokens(grammar_output)
