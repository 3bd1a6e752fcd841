"""The scorer in vLLM's V2 model runner."""

from typing import Any

import torch
from vllm.v1.worker.gpu.model_runner import ExecuteModelState
from vllm.v1.worker.gpu.sample.logits_processor.interface import LogitsContext, LogitsProcessor
from vllm.v1.worker.gpu.sample.output import SamplerOutput
from vllm.v1.worker.gpu.spec_decode.rejection_sampler import RejectionSampler

from recipe.spd.vllm_plugin.judge import ServedJudge

#: what the plugin overrides or reads -> its parameters or fields
INTERFACE = {
    LogitsProcessor.apply: ("self", "logits", "ctx"),
    RejectionSampler.__call__: ("self", "logits", "input_batch", "draft_logits", "invalid_drafts"),
}
STATE = (ExecuteModelState, ("input_batch", "hidden_states", "aux_hidden_states"))


class JudgeProcessor(LogitsProcessor):
    """Runs after vLLM's own processors, before temperature and top-k. A large step comes in several chunks of rows."""

    def __init__(self, judge: ServedJudge) -> None:
        self.judge = judge
        self._rows = self._requests = 0  # of this step, in the chunks so far

    def apply(self, logits: torch.Tensor, ctx: LogitsContext) -> torch.Tensor:
        step = self.judge.step
        if step is None or not len(logits):  # no drafts in this step
            return logits
        if not step.decisions:
            self._rows = self._requests = 0
        local = ctx.expanded_local_pos
        # Row i predicts what follows input i: its draft is the next row's input, if that row has the same request.
        draft = torch.where(local[1:] > 0, ctx.input_ids[1:], -1)
        draft = torch.cat([draft, draft.new_full((1,), -1)])
        request = (local == 0).cumsum(0) - 1 + self._requests
        rows = torch.arange(self._rows, self._rows + len(logits), device=logits.device)
        self.judge.accept_by_raising_logits(logits, rows, draft, request, local)
        self._rows += len(logits)
        self._requests += len(ctx.idx_mapping_np)
        return logits


class JudgedRejectionSampler(RejectionSampler):
    """vLLM's rejection sampler; counts the decisions of a step."""

    def __init__(self, judge: ServedJudge, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.judge = judge

    def __call__(self, *args: Any, **kwargs: Any) -> SamplerOutput:
        output = super().__call__(*args, **kwargs)
        self.judge.finish(output.num_sampled - 1)
        return output


def install(runner: Any, judge: ServedJudge) -> None:
    """Add the judge to the runner's sampler; only the last pipeline rank has one."""
    if (plain := runner.rejection_sampler) is None:
        return
    runner.sampler.logits_processors.append(JudgeProcessor(judge))
    runner.rejection_sampler = JudgedRejectionSampler(
        judge, runner.sampler, runner.speculative_config, runner.device, watermark_key=plain.watermark_key
    )


def begin(runner: Any, judge: ServedJudge) -> None:
    """Announce the step that the runner has forwarded, if it has drafts to verify."""
    state = runner.execute_model_state
    if state is not None and state.input_batch.num_draft_tokens and runner.rejection_sampler is not None:
        batch = state.input_batch
        states = [state.hidden_states, *(state.aux_hidden_states or ())]
        judge.begin(batch.req_ids, *(x[batch.logits_indices] for x in states))
