"""The scorer in vLLM's V1 model runner."""

from typing import Any

import numpy as np
import torch
from vllm.v1.outputs import SamplerOutput
from vllm.v1.sample.metadata import SamplingMetadata
from vllm.v1.sample.rejection_sampler import RejectionSampler
from vllm.v1.spec_decode.metadata import SpecDecodeMetadata
from vllm.v1.worker.gpu_model_runner import ExecuteModelState

from recipe.spd.vllm_plugin.judge import ServedJudge

#: what the plugin overrides or reads -> its parameters or fields
INTERFACE = {
    RejectionSampler.forward: ("self", "metadata", "draft_probs", "logits", "sampling_metadata"),
    RejectionSampler.apply_logits_processors: ("self", "logits", "sampling_metadata", "metadata"),
}
STATE = (ExecuteModelState, ("logits", "spec_decode_metadata", "sample_hidden_states", "aux_hidden_states"))


class JudgedRejectionSampler(RejectionSampler):
    """vLLM's rejection sampler on logits in which accepted mismatches are raised."""

    def __init__(self, judge: ServedJudge, *args: Any) -> None:
        super().__init__(*args)
        self.judge = judge

    def forward(
        self, metadata: SpecDecodeMetadata, draft_probs: torch.Tensor | None, logits: torch.Tensor,
        sampling_metadata: SamplingMetadata,
    ) -> SamplerOutput:  # fmt: skip
        output = super().forward(metadata, draft_probs, logits, sampling_metadata)
        if self.judge.step is not None:
            self.judge.finish((output.sampled_token_ids >= 0).sum(1) - 1)
        return output

    def apply_logits_processors(
        self, logits: torch.Tensor, sampling_metadata: SamplingMetadata, metadata: SpecDecodeMetadata
    ) -> torch.Tensor:
        logits = super().apply_logits_processors(logits, sampling_metadata, metadata)
        if self.judge.step is not None:  # None while vLLM measures memory
            counts = np.array(metadata.num_draft_tokens)
            request = np.repeat(np.arange(len(counts)), counts)
            position = np.arange(len(request)) - (counts.cumsum() - counts)[request]
            request, position = torch.from_numpy(np.stack([request, position])).to(logits.device, non_blocking=True)
            rows = metadata.target_logits_indices.long()
            self.judge.accept_by_raising_logits(logits, rows, metadata.draft_token_ids, request, position)
        return logits


def install(runner: Any, judge: ServedJudge) -> None:
    """Replace the runner's rejection sampler; only the last pipeline rank has one."""
    if hasattr(runner, "rejection_sampler"):
        runner.rejection_sampler = JudgedRejectionSampler(
            judge, runner.sampler, runner.speculative_config, runner.device
        )


def begin(runner: Any, judge: ServedJudge) -> None:
    """Announce the step that the runner has forwarded, if it has drafts to verify."""
    state = runner.execute_model_state
    if state is not None and state.spec_decode_metadata is not None:
        layers = [x[state.spec_decode_metadata.logits_indices] for x in state.aux_hidden_states or ()]
        judge.begin(runner.input_batch.req_ids, state.sample_hidden_states, *layers)
