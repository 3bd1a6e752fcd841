"""The token policy: log-probs of response tokens under a causal language model."""

from __future__ import annotations

from weakref import WeakSet

import torch
from tensordict import TensorDict
from torch import nn
from torch.distributed.fsdp import FSDPModule, register_fsdp_forward_method
from torch.utils.checkpoint import checkpoint
from transformers import PretrainedConfig, PreTrainedModel

from verl.planning.memory_estimate import LOGITS_CHUNK
from verl.utils.peft_weights import without_adapters
from verl.workers.policy.base import Policy, check_temperature, register_policy
from verl.workers.policy.chunked_log_probs import FinalLogits, chunked_log_probs, is_plain
from verl.workers.policy.packing import Packing, make_packable, pack, whole_mask

#: name under which the chunked forward is attached to a sharded model
FORWARD_METHOD = "response_log_probs"


@register_policy("causal_lm")
class CausalLMPolicy(Policy):
    """Hidden states of the decoder, then vocabulary logits for `chunk_tokens` response tokens at a time.

    Where padding is removed or prompts are shared, the decoder sees one flat row of tokens (packing.py).

    A chunk's logits are thrown away and computed again in the backward pass, so that no more than
    [chunk_tokens, vocab] of them exist at any time (chunked_log_probs.py).
    """

    required_keys = ("responses", "input_ids", "attention_mask", "position_ids")

    def __init__(self, chunk_tokens: int = LOGITS_CHUNK):
        if chunk_tokens < 1:
            raise ValueError(f"policy.kwargs.chunk_tokens={chunk_tokens} must be at least 1")
        self.chunk_tokens = chunk_tokens
        self.remove_padding = self.share_prompt = False
        self._bound: WeakSet[nn.Module] = WeakSet()

    def set_forward(self, *, remove_padding: bool, share_prompt: bool) -> None:
        self._bound.clear()  # a model's attention is exchanged where it is bound
        self.remove_padding, self.share_prompt = remove_padding, share_prompt
        if share_prompt:
            self.required_keys = (*type(self).required_keys, "group_index")

    def bind(self, model: nn.Module) -> None:
        """Attaches the chunked forward to a sharded model, whose parameters are whole only inside its own forward."""
        if model in self._bound:
            return
        if (self.remove_padding or self.share_prompt) and not make_packable(causal_model(model)):
            self.remove_padding = self.share_prompt = False
        if isinstance(model, FSDPModule):
            setattr(model, FORWARD_METHOD, _response_log_probs.__get__(model))
            register_fsdp_forward_method(model, FORWARD_METHOD)
        self._bound.add(model)

    def log_probs(
        self, model: nn.Module, micro_batch: TensorDict, *, temperature: float, with_entropy: bool
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """input_ids, attention_mask, position_ids [B, P+R], responses [B, R] -> log-probs and entropy [B, R] float32.

        Padded response positions hold 0; so do those where `counted` [B, R] is 0, if the batch has that column: logits
        are computed for the others only.
        """
        self.bind(model)
        inputs = {k: micro_batch[k] for k in type(self).required_keys}
        if self.remove_padding or self.share_prompt:
            groups = micro_batch["group_index"] if self.share_prompt else None
            inputs["packing"] = pack(inputs["attention_mask"], inputs["responses"].shape[1], groups)
        inputs |= {"temperature": check_temperature(temperature), "with_entropy": with_entropy}
        inputs["counted"] = micro_batch["counted"] if "counted" in micro_batch.keys() else None
        forward = model.response_log_probs if isinstance(model, FSDPModule) else _response_log_probs.__get__(model)
        log_probs, entropy = forward(**inputs, chunk_tokens=self.chunk_tokens)
        return log_probs, (entropy if with_entropy else None)


def _response_log_probs(
    model: nn.Module,
    *,
    input_ids: torch.Tensor,
    attention_mask: torch.Tensor,
    position_ids: torch.Tensor,
    responses: torch.Tensor,
    temperature: float,
    with_entropy: bool,
    chunk_tokens: int,
    packing: Packing | None = None,
    counted: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Log-probs [B, R] and entropy [B, R] (zeros when not asked) of the response tokens; padding gives 0.

    counted [B, R]: 0 leaves a token out as if it were padding.
    """
    causal = causal_model(model)
    length = responses.shape[1]
    attended = attention_mask[:, -length:].bool()
    wanted = attended if counted is None else attended & counted.bool()
    # The state at position t predicts token t+1: response tokens are predicted one position to their left.
    if packing is None:
        inputs = {"input_ids": input_ids, "attention_mask": attention_mask, "position_ids": position_ids}
        hidden = causal.get_decoder()(**inputs, use_cache=False).last_hidden_state[:, -length - 1 : -1][wanted]
    else:
        inputs = {"input_ids": packing.flat(input_ids), "position_ids": packing.flat(position_ids)}
        inputs |= {"attention_mask": whole_mask(input_ids.device), "packing": packing, "use_cache": False}
        hidden = causal.get_decoder()(**inputs).last_hidden_state[0][packing.predicted_from[wanted[attended]]]
    labels = responses[wanted]  # hidden [N, H], labels [N]
    head, config = causal.get_output_embeddings(), causal.config
    compute = chunked_log_probs if is_plain(head) else _checkpointed_log_probs
    final = FinalLogits.of(config, temperature)
    log_probs, entropy = compute(head, final, hidden, labels, with_entropy=with_entropy, chunk_tokens=chunk_tokens)
    empty = torch.zeros(responses.shape, dtype=torch.float32, device=responses.device)
    return empty.masked_scatter(wanted, log_probs.float()), empty.masked_scatter(wanted, entropy.float())


def _checkpointed_log_probs(
    head: nn.Module,
    final: FinalLogits,
    hidden: torch.Tensor,
    labels: torch.Tensor,
    *,
    with_entropy: bool,
    chunk_tokens: int,
) -> tuple[torch.Tensor, torch.Tensor]:
    """As `chunked_log_probs`, for any head: with adapters, sharded by itself, or of a class of its own."""
    pieces = []
    for chunk, chunk_labels in zip(hidden.split(chunk_tokens), labels.split(chunk_tokens), strict=True):
        args = (head, final, chunk, chunk_labels, with_entropy)
        if torch.is_grad_enabled():
            pieces.append(checkpoint(_chunk_log_probs, *args, use_reentrant=False, preserve_rng_state=False))
        else:
            pieces.append(_chunk_log_probs(*args))
    log_probs, entropy = (torch.cat(column) for column in zip(*pieces, strict=True))
    return log_probs, entropy


def _chunk_log_probs(
    head: nn.Module, final: FinalLogits, hidden: torch.Tensor, labels: torch.Tensor, with_entropy: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    """hidden [N, H], labels [N] -> log-probs [N], entropy [N] (zeros when not asked), float32."""
    logits = final(head(hidden).float())  # [N, V]
    log_z = torch.logsumexp(logits, dim=-1)
    log_probs = logits.gather(-1, labels[:, None]).squeeze(-1) - log_z
    if not with_entropy:
        return log_probs, torch.zeros_like(log_probs)
    return log_probs, log_z - (torch.softmax(logits, dim=-1) * logits).sum(-1)


def final_logits(logits: torch.Tensor, config: PretrainedConfig) -> torch.Tensor:
    """What some model families do between the output matrix and the softmax. [N, V] -> [N, V]."""
    return FinalLogits.of(config)(logits)


def causal_model(model: nn.Module) -> PreTrainedModel:
    """The transformers model inside, with or without a peft wrapper."""
    inner = without_adapters(model)
    if not isinstance(inner, PreTrainedModel) or inner.get_output_embeddings() is None:
        raise TypeError(
            f"policy 'causal_lm' needs a transformers model with an output matrix, got {type(inner).__name__}; "
            "choose another policy by actor_rollout_ref.model.policy.name."
        )
    return inner
