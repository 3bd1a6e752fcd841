"""vLLM's own worker class of this machine, to derive a `--worker-cls` from."""

import os
from collections.abc import Iterable
from typing import Any

import torch
from torch import nn
from vllm.config import set_current_vllm_config
from vllm.model_executor.layers.vocab_parallel_embedding import (
    ParallelLMHead,
    UnquantizedEmbeddingMethod,
    VocabParallelEmbedding,
)
from vllm.model_executor.model_loader.reload import finalize_layerwise_reload, initialize_layerwise_reload
from vllm.platforms import current_platform

if current_platform.is_cpu():
    from vllm.v1.worker.cpu_worker import CPUWorker as VllmWorker
else:
    from vllm.v1.worker.gpu_worker import Worker as VllmWorker

EXPAND_KERNEL = "vllm.v1.sample.rejection_sampler.expand_kernel"


class PlatformWorker(VllmWorker):
    """vLLM's worker, with repairs for CPUs.

    There, tied output heads and experts compute with the new weights after every reload, embeddings are not kept twice,
    drafts are verified at the requests' own temperatures, and runs on one machine do not share memory.
    """

    def __init__(self, vllm_config: Any, *args: Any, **kwargs: Any) -> None:
        # A CPU worker names the shared memory of a tensor parallel group after the port in its init method. With
        # `external_launcher` that is `env://` for every run on a machine: two runs would share memory, and a killed
        # run's segment would stop the next one (`create shm ... errno: 17`). So each run gives a name (VLLMRollout).
        if name := vllm_config.additional_config.get("shared_memory_name"):
            kwargs["distributed_init_method"] += f":{name}"  # only the name is read: the process group exists already
        if current_platform.is_cpu() and vllm_config.speculative_config is not None:
            # Drafting by n-grams starts numba's threads. If they are more than OpenMP's, attention kernels, which
            # divide their work in advance, give wrong values in the step in which the threads start.
            os.environ.setdefault("NUMBA_NUM_THREADS", str(torch.get_num_threads()))
            repair_expand_kernel()  # before numba is loaded, on whose modules vLLM's registration of kernels fails
        super().__init__(vllm_config, *args, **kwargs)

    def load_model(self, *args: Any, **kwargs: Any) -> None:
        """vLLM's `load_model`, without the packed copies of embeddings that no output needs."""
        super().load_model(*args, **kwargs)
        self._unpack_embeddings(self.model_runner.get_model())

    def reload_weights(self, *args: Any, **kwargs: Any) -> None:
        """vLLM's `reload_weights`; tied heads and experts compute with the new weights too."""
        super().reload_weights(*args, **kwargs)
        self._pack_again(self.model_runner.get_model())

    def reload_draft_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        """Replace the draft model's weights in place, as `reload_weights` replaces the model's."""
        runner = self.model_runner
        model = (runner.speculator if self.use_v2_model_runner else runner.drafter).model
        with set_current_vllm_config(self.vllm_config):
            initialize_layerwise_reload(model)
            model.load_weights(weights)
            finalize_layerwise_reload(model, self.vllm_config.speculative_config.draft_model_config)
        self._pack_again(model)

    @staticmethod
    def _pack_again(model: nn.Module) -> None:
        """On a CPU, pack again the weights that a reload does not: those of tied output heads and of experts.

        vLLM multiplies by packed copies there. A reload packs linear layers that the weights name. A tied head is not
        named and would keep its first weights; experts are packed at the first load only (vLLM 0.32), and their kernel
        would read unpacked weights.
        """
        if not current_platform.is_cpu():
            return
        layers = [layer for layer in model.modules() if isinstance(layer, VocabParallelEmbedding)]
        embedding_weights = {id(layer.weight) for layer in layers if not isinstance(layer, ParallelLMHead)}
        for layer in layers:
            method = layer.quant_method
            tied = isinstance(layer, ParallelLMHead) and id(layer.weight) in embedding_weights
            if tied and isinstance(method, UnquantizedEmbeddingMethod):
                method.process_weights_after_loading(layer)
        PlatformWorker._unpack_embeddings(model)
        from vllm.model_executor.layers.fused_moe.experts.cpu_moe import CPUUnquantizedExperts

        for layer in model.modules():
            kernel = getattr(getattr(layer, "quant_method", None), "moe_kernel", None)
            experts = getattr(kernel, "fused_experts", None)
            if isinstance(experts, CPUUnquantizedExperts):
                experts.process_weights_after_loading(layer)

    @staticmethod
    def _unpack_embeddings(model: nn.Module) -> None:
        """On a CPU, free the packed copies of embeddings in a model with an output head: nothing multiplies by them.

        vLLM 0.32 packs every VocabParallelEmbedding, a copy as large as the embedding.
        """
        layers = [layer for layer in model.modules() if isinstance(layer, VocabParallelEmbedding)]
        if any(isinstance(layer, ParallelLMHead) for layer in layers):
            for layer in layers:
                if not isinstance(layer, ParallelLMHead) and hasattr(layer, "cpu_linear"):
                    layer.cpu_linear = nn.functional.linear  # which had the packed copy


def repair_expand_kernel() -> None:
    """Replace the CPU stand-in of vLLM's `expand_kernel` where it leaves its output unset (vLLM issue 55005).

    Else sampled requests with drafts are divided by uninitialised temperatures.
    """
    from vllm.triton_utils.dispatcher import register_kernels
    from vllm.v1.sample.rejection_sampler import expand_batch_to_tokens

    # Random values, which memory that an earlier call left cannot hold by chance.
    values, ends = torch.rand(2), torch.tensor([1, 3], dtype=torch.int32)
    if torch.equal(expand_batch_to_tokens(values, ends, 3), values[[0, 1, 1]]):
        return

    def expand(
        output: torch.Tensor, given: torch.Tensor, ends: torch.Tensor, replace_from: float, replace_to: float,
        *_: Any, **__: Any,
    ) -> None:
        """given [B], ends [B] (running token counts) -> output: given[i] for each token of i, replaced if equal."""
        given = torch.where(given == replace_from, torch.full_like(given, replace_to), given)
        output.copy_(given.repeat_interleave(ends.diff(prepend=ends.new_zeros(1))))

    register_kernels({EXPAND_KERNEL: expand})
