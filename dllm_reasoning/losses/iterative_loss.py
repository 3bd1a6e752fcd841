"""Losses of iterative refinement: predict, compare with the clean text, feed the prediction back.

The prediction that is fed back carries no gradient, so each round's backward pass runs immediately: peak memory does
not grow with the number of rounds, and the gradient is that of the summed loss.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial

import torch
import torch.nn.functional as F
from tensordict import TensorDict
from torch import nn
from transformers.cache_utils import Cache, DynamicLayer

from dllm_reasoning.losses.layouts import IGNORED, Layout, Tokens
from dllm_reasoning.utils.attention import mask_problem, warn_once, window_of
from dllm_reasoning.utils.noise_utils import greedy_decode_response
from verl.config.model import LOGITS_CHUNK
from verl.training.parallel.sequence_parallel import get_ulysses_sequence_parallel_group
from verl.training.policy.attention import FLASH, NAME_OF_FLASH, make_packable
from verl.training.policy.causal_lm import call_as_forward, causal_model, decoder_of
from verl.training.policy.chunked_log_probs import FinalLogits, chunked_log_probs
from verl.training.policy.layout_probe import layout_difference
from verl.training.policy.packing import Packing
from verl.utils.problems import one_line

Backward = Callable[[torch.Tensor, bool], None]
"""Takes a scalar loss and whether it is the last before ranks exchange gradients (BaseEngine.backward)."""


@dataclass
class RoundLosses:
    """Summed cross-entropy, detached scalars: one per round and `ar` of the clean text; `counted` labels per round."""

    rounds: list[torch.Tensor]
    ar: torch.Tensor
    counted: int


@dataclass
class IterativeLoss:
    """A loss with one weight per round and `ar_weight` for the clean text's own next-token loss.

    `share`: the rounds share the prefix's keys and values if the layout has a prefix.
    """

    round_weights: list[float]
    ar_weight: float
    share: bool

    def run(
        self, model: nn.Module, layout: Layout, backward: Backward | None, *, scale: float, ar_scale: float,
        is_last: bool = True, warm_up: int = 0, rounds: int | None = None, cached_prefix: CachedPrefix | None = None,
    ) -> RoundLosses:  # fmt: skip
        """Every round of one micro-batch, or the first `rounds` of them; without `backward` only their losses.

        Before the backward pass sums are multiplied by `scale` (rounds) and `ar_scale` (clean text): the number of
        ranks over the global count. `warm_up` rounds without gradient come first (trajectory). With `cached_prefix`,
        the layout is a flat row without a prefix. Raises ValueError if the layout has a prefix and the model's
        attention cannot be described by one mask.
        """
        if layout.prefix is not None and (problem := mask_problem(model)):
            raise ValueError(f"{type(causal_model(model)).__name__} {problem}: rounds cannot share a prefix.")
        forward = _TailForward(model, layout, self.share and layout.prefix is not None, cached_prefix)
        ids = layout.tail.ids
        with torch.no_grad():
            for _ in range(warm_up):
                ids = greedy_decode_response(ids, forward(ids, decode=True)[2], layout.region)
        weights = [weight * scale for weight in self.round_weights[:rounds]]
        count, ar_weight = len(weights), self.ar_weight * ar_scale
        if self.ar_weight and not layout.whole_prefix:  # after the rounds, a pass over the clean text
            weights.append(ar_weight)
        losses, prefix_losses = [], []
        for k, weight in enumerate(weights):
            decode = k + 1 < count
            loss, prefix_loss, greedy = forward(ids, decode=decode, with_prefix_loss=k == 0)
            losses.append(loss.detach())
            prefix_losses.append(prefix_loss.detach())
            if backward is not None:
                last = is_last and forward.cache is None and k + 1 == len(weights)
                backward(weight * loss + ar_weight * prefix_loss, last)
            ids = greedy_decode_response(ids, greedy, layout.region) if decode else layout.clean
        if forward.cache is not None and cached_prefix is None and backward is not None:
            backward(forward.prefix_loss * ar_weight + forward.cache.prefix_gradient_term(), is_last)
        if layout.whole_prefix:
            ar = prefix_losses[0] if forward.cache is None else forward.prefix_loss.detach()
        else:
            ar = sum(losses[count:], torch.zeros(()))
        return RoundLosses(losses[:count], ar, layout.tail.count())


class _TailForward:
    """Forwards over a layout's tail. Its prefix, if any, is computed once here and shared by all of them (`cache`), or
    repeated in front of the tail in each. Ranks of a Ulysses group have the same layout, and share each forward."""

    def __init__(self, model: nn.Module, layout: Layout, share: bool, cached_prefix: CachedPrefix | None) -> None:
        self.model, self.layout = model, layout
        self.cache: SharedPrefix | None = cached_prefix and cached_prefix.cache
        self.group = get_ulysses_sequence_parallel_group()
        causal = causal_model(model)
        # Flash attention takes no mask made here, but a packing. Without a prefix none is made.
        flash = layout.prefix is not None and causal.config._attn_implementation in (FLASH, NAME_OF_FLASH)
        self.packs = make_packable(causal, self.group is not None, flash)
        dtype = next(model.parameters()).dtype
        if share:
            # Right-padded, so causal attention suffices; the tail's mask hides the padding.
            self.cache = SharedPrefix(causal.config.num_hidden_layers)
            alone = self._packing(*layout.prefix.ids.shape) if self.packs else None
            losses, _ = self._predict(layout.prefix, alone, None)
            self.prefix_loss = _sum(losses, layout.prefix)
            self.cache.detach_for_sharing()
            dtype = self.cache.layers[0].keys.dtype
        self.mask = self._mask(dtype) if cached_prefix is None else cached_prefix.packing

    def __call__(
        self, ids: torch.Tensor, *, decode: bool, with_prefix_loss: bool = False
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """ids [B, Q] of the tail -> (its summed loss, the prefix's summed loss, its greedy tokens [B, Q]).

        The prefix's loss is 0 unless requested, or if it is shared or has no labels. Greedy tokens are 0 unless
        `decode`d, and where they are not fed to the next position.
        """
        layout = self.layout
        tail, decoded = replace(layout.tail, ids=ids), None
        if decode:  # the positions whose prediction is fed to the next one
            decoded = torch.cat([layout.region[:, 1:], torch.zeros_like(layout.region[:, :1])], 1)
        if layout.prefix is None or self.cache is not None:
            losses, greedy = self._predict(tail, self.mask, decoded)
            return _sum(losses, tail), losses.new_zeros(()), greedy
        prefix, width = layout.prefix, layout.prefix.ids.shape[1]
        if not (with_prefix_loss and layout.whole_prefix):
            prefix = replace(prefix, labels=torch.full_like(prefix.labels, IGNORED))
        if decode:
            decoded = torch.cat([torch.zeros_like(prefix.valid), decoded], 1)
        losses, greedy = self._predict(prefix.then(tail), self.mask, decoded)
        return losses[:, width:].sum(), losses[:, :width].sum(), greedy[:, width:]

    def _predict(
        self, tokens: Tokens, mask: torch.Tensor | Packing | None, decoded: torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        return call_as_forward(self.model, predict_tokens, tokens, mask, self.cache, decoded)

    def _mask(self, dtype: torch.dtype) -> torch.Tensor | Packing:
        """[B, Q] (1 = token) without a prefix; else additive: [B, 1, Q, P + Q] if shared, [B, 1, P + Q, P + Q].

        The same as a packing if the forward takes one.
        """
        layout, (rows, width) = self.layout, self.layout.tail.ids.shape
        if layout.prefix is None:
            return self._packing(rows, width) if self.packs else layout.tail.valid.long()
        attention_mask, before = layout.attention_mask, layout.prefix.ids.shape[1]  # [B, Q, P + Q]
        if self.cache is None:  # rows of the prefix, causal, above those of the tail
            causal = torch.ones(before, before, dtype=torch.bool, device=attention_mask.device).tril()
            attention_mask = torch.cat([F.pad(causal, (0, width)).expand(rows, -1, -1), attention_mask], 1)
        window = window_of(causal_model(self.model).config)
        if window is not None:
            keys = torch.cat([layout.prefix.positions, layout.tail.positions], 1)
            queries = keys[:, -attention_mask.shape[1] :]
            attention_mask = attention_mask & (queries.unsqueeze(2) - keys.unsqueeze(1) < window)
        if self.packs:
            return self._packing(*attention_mask.shape[:2], attention_mask, before if self.cache is not None else 0)
        hidden = torch.zeros(attention_mask.shape, dtype=dtype, device=attention_mask.device)
        return hidden.masked_fill_(~attention_mask, torch.finfo(dtype).min).unsqueeze(1)  # finite: -inf could give NaN

    def _packing(
        self, rows: int, width: int, attention_mask: torch.Tensor | None = None, prefix_width: int = 0
    ) -> Packing:
        """B rows of N tokens, padding included, as a flat row, which the group shares.

        attention_mask: bool [B, N, prefix_width + N], None = causal. prefix_width: columns of the prefix in the cache.
        """
        own = torch.arange(rows * width)
        keys = torch.arange(rows * prefix_width).view(rows, -1), rows * prefix_width + own.view(rows, -1)
        sizes = torch.tensor([[width, prefix_width + width]]).expand(rows, -1)
        return Packing(
            own, own, own, sizes, torch.cat(keys, 1).flatten() if prefix_width else None,
            None if attention_mask is None else attention_mask.unsqueeze(1), single_part=True, group=self.group,
            prefix_len=rows * prefix_width, device=self.layout.tail.ids.device,
        )  # fmt: skip


class _PrefixLayer(DynamicLayer):
    """Keys and values of one layer, [B, heads, P, head_dim]: with their graph, and detached copies that rounds read."""

    is_compileable = False

    def update(self, key_states: torch.Tensor, value_states: torch.Tensor, *args, **kwargs):
        """Keys and values that this forward attends to: the detached copies, if any, then its own."""
        if not self.is_initialized:
            self.keys, self.values, self.is_initialized = key_states, value_states, True
            return key_states, value_states
        return torch.cat([self.detached[0], key_states], 2), torch.cat([self.detached[1], value_states], 2)


class SharedPrefix(Cache):
    """Keys and values of a prefix that is computed once and attended to by several rounds.

    Forward the prefix with it as `past_key_values`, call `detach_for_sharing()`, then forward and backward each round
    with it: they use detached copies, where their gradients accumulate. `prefix_gradient_term()` is the scalar whose
    backward pass takes these through the prefix.
    """

    def __init__(self, layers: int) -> None:
        super().__init__(layers=[_PrefixLayer() for _ in range(layers)])

    def detach_for_sharing(self) -> None:
        """Make the detached copies in which the rounds' gradients accumulate."""
        for layer in self.layers:
            pair = (layer.keys, layer.values)
            layer.detached = tuple(t.detach().requires_grad_(t.requires_grad) for t in pair)

    def return_gradients(self) -> None:
        """Let a backward pass that goes through the prefix for another loss take the rounds' gradients along."""
        for layer in self.layers:
            for own, detached in zip((layer.keys, layer.values), layer.detached, strict=True):
                if detached.grad is not None:
                    own.register_hook(lambda gradient, added=detached.grad: gradient + added)

    def prefix_gradient_term(self) -> torch.Tensor:
        """Sum of each key and value times its accumulated gradient; layers that no round attended to add nothing."""
        pairs = [pair for layer in self.layers for pair in zip((layer.keys, layer.values), layer.detached, strict=True)]
        return sum((own * detached.grad).sum() for own, detached in pairs if detached.grad is not None)


@dataclass
class CachedPrefix:
    """Keys and values of a prefix, computed by another forward pass; gradients flow back through `SharedPrefix`.

    packing: how the tail, a flat row [1, N], attends to the prefix, which is in the flat row of another Packing, and to
    itself.
    """

    cache: SharedPrefix
    packing: Packing


def predict_tokens(
    model: nn.Module, tokens: Tokens, mask: torch.Tensor | Packing | None, cache: SharedPrefix | None,
    decoded: torch.Tensor | None,
) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
    """(cross-entropy [B, N] float32, greedy tokens [B, N] int64) of tokens [B, N], position i predicting i + 1.

    The cross-entropy is 0 where the label is IGNORED. Greedy tokens are computed where `decoded` (bool [B, N]) is True,
    0 elsewhere. mask: as the decoder takes it, None = causal; or a packing of the B * N tokens, each of which it
    answers.
    """
    causal, labels = causal_model(model), tokens.labels
    needed = labels != IGNORED if decoded is None else (labels != IGNORED) | decoded  # M positions
    if isinstance(mask, Packing):
        hidden = decoder_of(causal)(**mask.model_inputs(tokens.ids, tokens.positions, cache)).last_hidden_state[0]
        labels, needed = labels.flatten()[mask.response_index], needed.flatten()[mask.response_index]
        states = hidden[mask.predicted_from[needed]]
    else:
        inputs = {"input_ids": tokens.ids, "attention_mask": mask, "position_ids": tokens.positions,
                  "past_key_values": cache, "use_cache": cache is not None}  # fmt: skip
        states = decoder_of(causal)(**inputs).last_hidden_state[needed]
    chosen = labels[needed]  # [M], of states [M, H]
    output = chunked_log_probs(
        causal.get_output_embeddings(), FinalLogits.of(causal.config), states, chosen.clamp(min=0),
        with_argmax=decoded is not None, chunk_tokens=LOGITS_CHUNK,
    )  # fmt: skip
    losses = torch.where(chosen == IGNORED, 0.0, -output.log_probs)
    losses = torch.zeros(needed.shape, dtype=losses.dtype, device=needed.device).masked_scatter(needed, losses)
    greedy = torch.zeros_like(labels).masked_scatter(needed, output.argmax)
    if isinstance(mask, Packing):
        return mask.scatter_to_responses(losses, tokens.ids.shape), mask.scatter_to_responses(greedy, tokens.ids.shape)
    return losses, greedy


def _sum(losses: torch.Tensor, tokens: Tokens) -> torch.Tensor:
    """losses [B, N] -> their sum, in the SFT trainer's order (no last column), so that both agree to the last bit."""
    if not bool((tokens.labels[:, -1] != IGNORED).any()):
        losses = losses[:, :-1].contiguous()
    return losses.sum()


def prefix_problem(model: nn.Module) -> str | None:
    """Why rows cannot be cut into a prefix and a tail (a clause), by what is known of the model and by two short rows
    whose log-probs it computes in both forms; None if they can. Called on all ranks."""
    if problem := mask_problem(model):
        return problem

    def compute(rows: TensorDict, cut: bool, wide: bool) -> torch.Tensor:
        columns = ("input_ids", "position_ids", "attention_mask")
        ids, positions, valid = (rows[name][:, int(cut) :] for name in columns)  # a prefix without padding before it
        width = ids.shape[1] - rows["responses"].shape[1]
        whole = Tokens(ids, positions, valid.bool(), F.pad(ids[:, 1:], (0, 1), value=IGNORED))
        predict = partial(call_as_forward, model, predict_tokens, wide=wide)
        if cut:
            layout = _cut_layout(whole, width)
            mask = _TailForward(model, layout, False, None).mask
            losses = predict(layout.prefix.then(layout.tail), mask, None, None)[0]
            return -torch.cat([losses[:, width - 1 : width], losses[:, width + 1 : -1]], 1)
        return -predict(whole, valid, None, None)[0][:, width - 1 : -1]

    try:
        difference, limit = layout_difference(causal_model(model), compute, True, next(model.parameters()).device)
    except (RuntimeError, IndexError) as error:
        return f"does not take masks made here ({one_line(error)})"
    if difference <= limit:
        return None
    return f"gives other log-probs, by {difference:.2g} (limit {limit}), if rows are cut into a prefix and a tail"


def _cut_layout(whole: Tokens, width: int) -> Layout:
    """Rows [B, N] cut after `width` tokens. The prefix ends in a token that only other mixing than attention sees."""
    parts = [F.pad(column[:, :width], (0, 1)) for column in whole.columns]
    parts[-1][:, -1] = IGNORED
    tail = Tokens(*(column[:, width:] for column in whole.columns))
    rows, length = whole.ids.shape
    causal = torch.ones(rows, length, length, dtype=torch.bool, device=whole.ids.device).tril()[:, width:]
    attention_mask = torch.cat([F.pad(causal[..., :width], (0, 1)), causal[..., width:]], -1)
    return Layout(Tokens(*parts), tail, torch.zeros_like(tail.valid), tail.ids, attention_mask, 0)


def sharing(model: nn.Module, mode: str, rounds: int, packed: bool) -> bool:
    """Whether rounds share the prefix under iterative.share_instruction=`mode`; warns once if that is not possible.

    Called on all ranks. Auto shares with several rounds or packed windows. Neither gradient checkpointing (it drops
    caches) nor attention that one mask cannot describe allows it; ValueError for packed windows with such attention.
    """
    if not packed and (mode == "off" or (mode == "auto" and rounds == 1)):
        return False
    problem = prefix_problem(model)
    if packed and problem:
        raise ValueError(packed_refusal(problem))
    if mode == "off":
        return False
    if problem:
        warn_once(f"the model {problem}: every round recomputes the instruction (to silence this warning, set "
                  "iterative.share_instruction=off)")  # fmt: skip
        return False
    if causal_model(model).is_gradient_checkpointing:
        warn_once("model.enable_gradient_checkpointing=true drops the cache that rounds would share: every round "
                  "recomputes the instruction (set it to false, or iterative.share_instruction=off to silence this "
                  "warning)")  # fmt: skip
        return False
    return True


def packed_refusal(problem: str) -> str:
    """The error for a model that cannot train packed windows; `problem` is a clause of `mask_problem`."""
    return (f"iterative.noise_pattern=packed does not work with the model of model.partial_pretrain, which {problem}; "
            "use another pattern or another model.")  # fmt: skip
