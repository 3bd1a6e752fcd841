"""The token policy: log-probs of response tokens under a causal language model."""

from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from typing import Any

import torch
from tensordict import TensorDict
from torch import nn
from torch.distributed.fsdp import FSDPModule, register_fsdp_forward_method
from transformers import PreTrainedModel
from transformers.cache_utils import Cache

from verl.config.model import LOGITS_CHUNK
from verl.protocol.sampling_mask import SAMPLING_MASK, KeptTokens
from verl.training.parallel.sequence_parallel import get_ulysses_sequence_parallel_world_size
from verl.training.peft_weights import without_adapters
from verl.training.policy.attention import make_packable
from verl.training.policy.base import Policy, check_temperature, register_policy
from verl.training.policy.chunked_log_probs import FinalLogits, chunked_log_probs
from verl.training.policy.float32 import in_float32
from verl.training.policy.layout_probe import agreeing_layouts
from verl.training.policy.packing import Packing, on_host, pack_batch
from verl.training.policy.prefix_tree import prefix_tree


@register_policy("causal_lm")
class CausalLMPolicy(Policy):
    """Hidden states of the decoder, then vocabulary logits for `chunk_tokens` response tokens at a time.

    With padding removed or prompts shared, the decoder runs on one flat row of tokens (packing.py). At no time do more
    than [chunk_tokens, vocab] logits exist (chunked_log_probs.py).
    """

    def __init__(self, chunk_tokens: int = LOGITS_CHUNK):
        if chunk_tokens < 1:
            raise ValueError(f"policy.kwargs.chunk_tokens={chunk_tokens} must be at least 1")
        self.chunk_tokens = chunk_tokens
        self.remove_padding = self.share_prompt = self.compared = self.wide = False
        self.bound: nn.Module | None = None

    def set_forward(self, *, remove_padding: bool, share_prompt: bool) -> None:
        self.remove_padding, self.share_prompt, self.compared = remove_padding, share_prompt, False
        if share_prompt:
            self.required_keys = (*type(self).required_keys, "group_index")

    def bind(self, model: nn.Module) -> None:
        """Switch the model to packed attention if the forward needs it; keep padding if that is not possible."""
        ranks_share = get_ulysses_sequence_parallel_world_size() > 1
        if not make_packable(causal_model(model), ranks_share, self.remove_padding or self.share_prompt):
            self.remove_padding = self.share_prompt = False
        self.bound = model

    def compare_layouts(self, model: nn.Module, device: torch.device) -> None:
        """Keep padding, or do not share prompts, where the log-probs of two short rows differ too much without.

        Raises ValueError where padding changes log-probs too, or where ranks share sequences, which needs a flat row.
        """
        self.compared = True
        separate, layouts = partial(self.probe_log_probs, model, False), {}
        if self._needs_flat_row():
            layouts["without padding"] = separate
        if self.share_prompt:
            layouts["with shared prompts"] = partial(self.probe_log_probs, model, True)
        agrees = agreeing_layouts(causal_model(model), "log-probs", separate, layouts, device)
        if not all(agrees.values()):
            self.remove_padding, self.share_prompt = agrees["without padding"], False

    def probe_log_probs(self, model: nn.Module, share: bool, rows: TensorDict, flat: bool, wide: bool) -> torch.Tensor:
        """Log-probs [B, R] with padding or in a `flat` row, where prompts are shared with `share`; `wide`: float32."""
        remove_padding, share_prompt = self.remove_padding, self.share_prompt
        self.remove_padding, self.share_prompt, self.wide = flat, flat and share, wide
        try:
            return self.log_probs(model, rows, temperature=1.0, with_entropy=False)[0]
        finally:
            self.remove_padding, self.share_prompt, self.wide = remove_padding, share_prompt, False

    def _needs_flat_row(self) -> bool:
        return self.remove_padding or self.share_prompt or get_ulysses_sequence_parallel_world_size() > 1

    def forward_tokens(self, micro_batch: TensorDict) -> int:
        mask = on_host(micro_batch)["attention_mask"]
        if not (self.remove_padding or self.share_prompt):
            return mask.numel()
        if not self.share_prompt:
            return int(mask.sum())
        tree = prefix_tree(on_host(micro_batch), micro_batch["responses"].shape[1])
        return int(mask.sum() - tree.shared.sum())

    def log_probs(
        self, model: nn.Module, micro_batch: TensorDict, *, temperature: float, with_entropy: bool,
        cache: Cache | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:  # fmt: skip
        """input_ids, attention_mask, position_ids [B, P+R], responses [B, R] -> log-probs and entropy [B, R] float32.

        Padded response positions hold 0; so do those where `counted` [B, R] is 0, if the batch has that column: logits
        are computed for the others only. With the column `sampling_mask` the distributions are renormalised over the
        tokens that were kept in sampling. A flat row's keys and values are also stored in `cache`.

        The first call for flat rows compares layouts, unless `compare_layouts` was called before.
        """
        if self.bound is not model:
            self.bind(model)
        if (self.remove_padding or self.share_prompt) and not self.compared:
            self.compare_layouts(model, micro_batch["input_ids"].device)
        inputs: dict[str, Any] = {key: micro_batch[key] for key in type(self).required_keys}
        inputs |= {key: micro_batch[key] for key in ("counted", SAMPLING_MASK) if key in micro_batch.keys()}
        if self._needs_flat_row():
            responses = inputs["responses"].shape[1]
            inputs["packing"] = pack_batch(micro_batch, responses, share_prompt=self.share_prompt)
            inputs["cache"] = cache
        inputs |= {"temperature": check_temperature(temperature), "with_entropy": with_entropy}
        inputs |= {"compiled": self.compiled, "chunk_tokens": self.chunk_tokens}
        log_probs, entropy = call_as_forward(model, response_log_probs, wide=self.wide, **inputs)
        return log_probs, (entropy if with_entropy else None)


def response_log_probs(
    model: nn.Module, *, input_ids: torch.Tensor, attention_mask: torch.Tensor, position_ids: torch.Tensor,
    responses: torch.Tensor, temperature: float, with_entropy: bool, chunk_tokens: int, packing: Packing | None = None,
    counted: torch.Tensor | None = None, sampling_mask: torch.Tensor | None = None, cache: Cache | None = None,
    compiled: bool = False,
) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
    """Log-probs [B, R] and entropy [B, R] (zeros unless requested) of the response tokens, float32; 0 at padding.

    counted [B, R]: 0 leaves a token out like padding. sampling_mask: see `verl.protocol.sampling_mask.mask_tensor`.
    """
    causal, length = causal_model(model), responses.shape[1]
    decoder, head = decoder_of(causal), causal.get_output_embeddings()
    if packing is not None:
        states = decoder(**packing.model_inputs(input_ids, position_ids, cache)).last_hidden_state[0]  # [T, H]
        states, index = states[packing.predicted_from], packing.response_index  # [N, H], [N]
    else:
        inputs = {"input_ids": input_ids, "attention_mask": attention_mask, "position_ids": position_ids}
        counts = attention_mask[:, -length:].bool()
        if counted is not None:
            counts = counts & counted.bool()
        # The state at position t predicts token t+1: response tokens are predicted one position to their left.
        states = decoder(**inputs, use_cache=False).last_hidden_state[:, -length - 1 : -1][counts]
        index = counts.flatten().nonzero()[:, 0]
    kept = None if sampling_mask is None else KeptTokens.at(sampling_mask, length, index)
    options = {"with_entropy": with_entropy, "chunk_tokens": chunk_tokens, "compiled": compiled, "kept": kept}
    final, labels = FinalLogits.of(causal.config, temperature), responses.flatten()[index]
    output = chunked_log_probs(head, final, states, labels, **options)
    log_probs, entropy = output.log_probs.float(), output.entropy.float()  # [N]
    if packing is not None:
        shape = responses.shape
        return packing.scatter_to_responses(log_probs, shape), packing.scatter_to_responses(entropy, shape)
    empty = torch.zeros(responses.shape, dtype=torch.float32, device=responses.device)
    return empty.masked_scatter(counts, log_probs), empty.masked_scatter(counts, entropy)


def call_as_forward(model: nn.Module, function: Callable, *args: Any, wide: bool = False, **kwargs: Any) -> Any:
    """function(model, ...) as the model's own forward: a sharded model gathers its parameters only inside one.

    `wide`: in float32, whatever type FSDP2 gathers the weights in.
    """

    def run(model: nn.Module, *args: Any, **kwargs: Any) -> Any:
        with in_float32(model) if wide else nullcontext():
            return function(model, *args, **kwargs)

    if not isinstance(model, FSDPModule):
        return run(model, *args, **kwargs)
    name = f"{function.__name__}_in_float32" if wide else function.__name__
    if name not in vars(model):
        setattr(model, name, run.__get__(model))
        register_fsdp_forward_method(model, name)
    return getattr(model, name)(*args, **kwargs)


def causal_model(model: nn.Module) -> PreTrainedModel:
    """The transformers model inside, with or without a peft wrapper; TypeError if it has no output matrix."""
    inner = without_adapters(model)
    if not isinstance(inner, PreTrainedModel) or inner.get_output_embeddings() is None:
        raise TypeError(
            f"policy 'causal_lm' needs a transformers model with an output matrix, got {type(inner).__name__}; "
            "choose another policy by actor_rollout_ref.model.policy.name."
        )
    return inner


def decoder_of(causal: PreTrainedModel) -> nn.Module:
    """The part that gives hidden states; get_decoder() of some, such as Llama 4's text model, is the whole model."""
    decoder = causal.get_decoder()
    inner = (child for child in causal.children() if isinstance(child, PreTrainedModel))
    return next(inner, decoder) if decoder is causal else decoder
