"""The rounds of iterative refinement: predict, compare with the clean text, feed the prediction back.

Step 3 of the method carries no gradient, so each round's backward pass runs at once: peak memory does not grow with the
number of rounds, and the gradient is that of the summed loss.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed.fsdp import FSDPModule, register_fsdp_forward_method
from torch.utils.checkpoint import checkpoint

from dllm_reasoning.losses.layouts import IGNORED, Layout, Tokens
from dllm_reasoning.losses.shared_prefix import SharedPrefix
from dllm_reasoning.utils.attention import mask_problem, window_of
from dllm_reasoning.utils.logging_utils import warn_once
from dllm_reasoning.utils.noise_utils import greedy_decode_response
from verl.workers.policy.causal_lm import CausalLMPolicy, causal_model, final_logits
from verl.workers.policy.chunked_log_probs import FinalLogits, chunked_log_probs, is_plain

FORWARD_METHOD = "predict_tokens"
CHUNK_TOKENS = CausalLMPolicy().chunk_tokens  # the SFT trainer's: one round without noise is its loss to the last bit
Backward = Callable[[torch.Tensor, bool], None]
"""Takes a scalar loss and whether it is the last before ranks exchange gradients (BaseEngine.backward)."""


@dataclass
class RoundLosses:
    """Sums of the cross-entropy, detached: `rounds` one a round, `ar` of the clean text, and what each sum counts."""

    rounds: list[torch.Tensor]
    ar: torch.Tensor
    counted: int
    ar_counted: int


class IterativeLoss:
    """Weights of the rounds (K of them) and of the clean text's own next-token loss.

    `share`: rounds share the prefix's keys and values where the layout has a prefix.
    """

    def __init__(self, round_weights: Sequence[float], ar_weight: float, *, share: bool) -> None:
        self.round_weights = list(round_weights)
        self.ar_weight = ar_weight
        self.share = share

    def run(
        self, model: nn.Module, layout: Layout, backward: Backward | None, *, scale: float, ar_scale: float,
        is_last: bool = True, warm_up: int = 0, rounds: int | None = None,
    ) -> RoundLosses:  # fmt: skip
        """Every round of one micro-batch, or the first `rounds` of them; `backward` None only measures.

        Sums are multiplied by `scale` (rounds) and `ar_scale` (clean text) before the backward pass: one over the
        global counts, times the number of ranks. `warm_up` rounds without gradient come first (trajectory). ValueError
        where the layout has a prefix and the model's attention cannot be told by one mask.
        """
        weights = self.round_weights[:rounds]
        bind(model)
        if layout.prefix is not None and (problem := mask_problem(model)):
            raise ValueError(f"{type(causal_model(model)).__name__} {problem}: rounds cannot look at a common prefix.")
        clean = layout.prefix if layout.whole_prefix else None
        jobs = [(weight * scale, layout.tail) for weight in weights]
        if clean is None and self.ar_weight:
            tail = layout.tail
            jobs.append((self.ar_weight * ar_scale, Tokens(layout.clean, tail.positions, tail.valid, tail.labels)))
        prefix = _open_prefix(model, layout, backward is not None) if self.share and layout.prefix is not None else None
        view = _View(prefix, _mask(model, layout, prefix))
        ids = self._warmed(model, layout, view, warm_up)
        sums = []
        for k, (weight, tokens) in enumerate(jobs):
            is_round = k < len(weights)
            used = Tokens(ids if is_round else tokens.ids, tokens.positions, tokens.valid, tokens.labels)
            decode = is_round and k + 1 < len(weights)
            last = is_last and prefix is None and k + 1 == len(jobs)
            loss, told = self._round(model, layout, used, view, decode, clean if k == 0 else None)
            sums.append([part.detach() for part in loss])
            if backward is not None:
                backward(weight * loss[0] + self.ar_weight * ar_scale * loss[1], last)
            if decode:
                ids = greedy_decode_response(ids, told, layout.region)
        if prefix is not None and backward is not None:
            ar = prefix.loss * (self.ar_weight * ar_scale)
            backward(ar + prefix.cache.surrogate() + 0.0 * prefix.touch, is_last)
        return _told(layout, sums, len(weights), prefix)

    def _warmed(self, model: nn.Module, layout: Layout, view: _View, rounds: int) -> torch.Tensor:
        """The tail's ids after `rounds` guesses of the model, without gradient."""
        ids = layout.tail.ids
        with torch.no_grad():
            for _ in range(rounds):
                tail = Tokens(ids, layout.tail.positions, layout.tail.valid, layout.tail.labels)
                _, told = self._round(model, layout, tail, view, True, None)
                ids = greedy_decode_response(ids, told, layout.region)
        return ids

    def _round(
        self, model: nn.Module, layout: Layout, tail: Tokens, view: _View, decode: bool, clean: Tokens | None,
    ) -> tuple[tuple[torch.Tensor, torch.Tensor], torch.Tensor | None]:  # fmt: skip
        """((sum over the tail's labels, sum over `clean`'s), what the model says at each tail place [B, Q])."""
        wanted = _before(layout.region) if decode else None
        if layout.prefix is None or view.prefix is not None:
            loss, told = _call(model, tail, view.mask, None if view.prefix is None else view.prefix.cache, wanted)
            return (loss, torch.zeros_like(loss)), told
        both = _beside(layout.prefix, tail, clean is not None)
        width = layout.prefix.ids.shape[1]
        if wanted is not None:
            wanted = torch.cat([torch.zeros_like(layout.prefix.valid), wanted], 1)
        loss, told = _call(model, both, view.mask, None, wanted, first=width)
        return (loss[1], loss[0]), None if told is None else told[:, width:]


@dataclass
class _OpenPrefix:
    """A forwarded prefix: its cache, the sum of its own cross-entropy, and a scalar of its last states."""

    cache: SharedPrefix
    loss: torch.Tensor
    touch: torch.Tensor
    dtype: torch.dtype


@dataclass
class _View:
    """What each round looks at: a prefix forwarded before it, and its own mask."""

    prefix: _OpenPrefix | None
    mask: torch.Tensor


def _told(layout: Layout, sums: list, count: int, prefix: _OpenPrefix | None) -> RoundLosses:
    """What `count` rounds, the clean text's forward and the prefix added up to."""
    rounds = [tail for tail, _ in sums[:count]]
    if not layout.whole_prefix:
        ar = sums[count][0] if len(sums) > count else torch.zeros(())
        return RoundLosses(rounds, ar, layout.tail.count(), layout.tail.count())
    ar = sums[0][1] if prefix is None else prefix.loss.detach()
    return RoundLosses(rounds, ar, layout.tail.count(), layout.prefix.count())


def _open_prefix(model: nn.Module, layout: Layout, trains: bool) -> _OpenPrefix:
    """Right-padded, so that plain causal attention serves; padding is hidden from the tail by its own mask."""
    cache = SharedPrefix(causal_model(model).config.num_hidden_layers)
    with torch.set_grad_enabled(trains):
        loss, touch = _call(model, layout.prefix, None, cache, None, touch=True)
    cache.lend()
    return _OpenPrefix(cache, loss, touch, cache.layers[0].keys.dtype)


def _before(region: torch.Tensor) -> torch.Tensor:
    """Places whose prediction is fed to the next place. bool [B, Q] -> bool [B, Q]."""
    return torch.cat([region[:, 1:], torch.zeros_like(region[:, :1])], 1)


def _beside(prefix: Tokens, tail: Tokens, with_labels: bool) -> Tokens:
    labels = prefix.labels if with_labels else torch.full_like(prefix.labels, IGNORED)
    pairs = ((prefix.ids, tail.ids), (prefix.positions, tail.positions), (prefix.valid, tail.valid),
             (labels, tail.labels))  # fmt: skip
    return Tokens(*(torch.cat(pair, 1) for pair in pairs))


def _mask(model: nn.Module, layout: Layout, prefix: _OpenPrefix | None) -> torch.Tensor:
    """[B, Q] (1 = token) without a prefix; else additive: [B, 1, Q, P + Q] behind an open one, [B, 1, P + Q, P + Q]."""
    if layout.prefix is None:
        return layout.tail.valid.long()
    seen = layout.seen if prefix is not None else _whole_mask(layout)
    window = window_of(causal_model(model).config)
    if window is not None:
        keys = torch.cat([layout.prefix.positions, layout.tail.positions], 1)
        queries = keys[:, -seen.shape[1] :]
        seen = seen & (queries.unsqueeze(2) - keys.unsqueeze(1) < window)
    return additive(seen, next(model.parameters()).dtype if prefix is None else prefix.dtype)


def _whole_mask(layout: Layout) -> torch.Tensor:
    """Prefix causal over itself, tail as it sees. -> bool [B, P + Q, P + Q]."""
    rows, width, tail = *layout.prefix.ids.shape, layout.tail.ids.shape[1]
    lower = torch.ones(width, width, dtype=torch.bool, device=layout.seen.device).tril()
    top = F.pad(lower, (0, tail)).expand(rows, -1, -1)
    return torch.cat([top, layout.seen], 1)


def additive(seen: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """bool [B, Q, K] -> [B, 1, Q, K]: 0 where seen, the dtype's lowest number elsewhere (never NaN)."""
    hidden = torch.zeros(seen.shape, dtype=dtype, device=seen.device)
    return hidden.masked_fill_(~seen, torch.finfo(dtype).min).unsqueeze(1)


def bind(model: nn.Module) -> None:
    """Attach the forward to a sharded model, whose parameters are whole only inside its own forward."""
    if isinstance(model, FSDPModule) and FORWARD_METHOD not in vars(model):
        setattr(model, FORWARD_METHOD, _predict.__get__(model))
        register_fsdp_forward_method(model, FORWARD_METHOD)


def _call(model: nn.Module, tokens: Tokens, mask: torch.Tensor | None, cache: SharedPrefix | None,
          wanted: torch.Tensor | None, *, first: int | None = None, touch: bool = False):  # fmt: skip
    forward = model.predict_tokens if isinstance(model, FSDPModule) else _predict.__get__(model)
    return forward(tokens, mask=mask, cache=cache, wanted=wanted, first=first, touch=touch)


def _predict(
    model: nn.Module, tokens: Tokens, *, mask: torch.Tensor | None, cache: SharedPrefix | None,
    wanted: torch.Tensor | None, first: int | None, touch: bool,
) -> tuple[torch.Tensor | tuple[torch.Tensor, torch.Tensor], torch.Tensor]:  # fmt: skip
    """Cross-entropy summed over the labels, and the greedy tokens [B, N] at `wanted` (0 elsewhere).

    With `first` the sum comes in two parts: columns before it, and from it on. With `touch` the second value is the
    sum of the last states: FSDP's hooks ask for a graph that reaches the forward's end.
    """
    causal = causal_model(model)
    hidden = causal.get_decoder()(
        input_ids=tokens.ids, attention_mask=mask, position_ids=tokens.positions, past_key_values=cache,
        use_cache=cache is not None,
    ).last_hidden_state  # fmt: skip
    counts = tokens.labels != IGNORED
    at = counts if wanted is None else counts | wanted
    each, told = _cross_entropy(causal, hidden[at], tokens.labels[at], wanted is not None)
    if touch:
        return _sum_like_sft(each, at), hidden.sum()
    greedy = None
    if wanted is not None:
        greedy = torch.zeros_like(tokens.ids).masked_scatter(at, told)
    if first is None:
        return _sum_like_sft(each, at), greedy
    behind = (torch.arange(tokens.ids.shape[1], device=at.device) >= first).expand_as(at)[at]
    return (each[~behind].sum(), each[behind].sum()), greedy


def _sum_like_sft(each: torch.Tensor, at: torch.Tensor) -> torch.Tensor:
    """Added up in the order of the SFT trainer, which leaves the last column out: the sums agree to the last bit."""
    if not bool(at[:, -1].any()):
        at = at[:, :-1]
    return torch.zeros(at.shape, dtype=each.dtype, device=at.device).masked_scatter(at, each).sum()


def _cross_entropy(
    causal: nn.Module, hidden: torch.Tensor, labels: torch.Tensor, decode: bool
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """As `_chunk`, some tokens at a time, whose logits are made anew in the backward; None for tokens not asked for."""
    head = causal.get_output_embeddings()
    if not decode and is_plain(head):
        final = FinalLogits.of(causal.config)
        log_probs, _ = chunked_log_probs(head, final, hidden, labels, with_entropy=False, chunk_tokens=CHUNK_TOKENS)
        return -log_probs, None
    found = []
    for part, said in zip(hidden.split(CHUNK_TOKENS), labels.split(CHUNK_TOKENS), strict=True):
        one = (causal, part, said, decode)
        if torch.is_grad_enabled():
            found.append(checkpoint(_chunk, *one, use_reentrant=False, preserve_rng_state=False))
        else:
            found.append(_chunk(*one))
    losses, told = (torch.cat(column) for column in zip(*found, strict=True))
    return losses, told if decode else None


def _chunk(
    causal: nn.Module, hidden: torch.Tensor, labels: torch.Tensor, decode: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    """hidden [N, H], labels [N] -> cross-entropy [N] float32 (0 at IGNORED), greedy tokens [N] (empty unless asked)."""
    logits = final_logits(causal.get_output_embeddings()(hidden).float(), causal.config)
    chosen = logits.gather(-1, labels.clamp(min=0)[:, None]).squeeze(-1)
    losses = torch.where(labels == IGNORED, 0.0, torch.logsumexp(logits, -1) - chosen)
    return losses, logits.detach().argmax(-1) if decode else labels[:0]


def sharing(model: nn.Module, mode: str, rounds: int, packed: bool) -> bool:
    """Whether rounds share the prefix: where it pays (auto), and where neither gradient checkpointing drops caches nor
    the model's attention forbids it. ValueError for packed where the latter does."""
    problem = mask_problem(model)
    if packed and problem:
        raise ValueError(packed_refusal(problem))
    pays = packed or rounds > 1
    if mode == "off" or (mode == "auto" and not pays):
        return False
    if problem:
        warn_once(
            f"the model {problem}: every round computes the instruction anew (iterative.share_instruction=off silences "
            "this)"
        )
        return False
    if causal_model(model).is_gradient_checkpointing:
        warn_once(
            "model.enable_gradient_checkpointing=true drops the cache that rounds would share their instruction by: "
            "every round computes it anew (set it to false, or iterative.share_instruction=off to silence this)"
        )
        return False
    return True


def packed_refusal(problem: str) -> str:
    """The sentence for a model that windows beside the text are not right for; `problem` as mask_problem tells it."""
    return (
        f"iterative.noise_pattern=packed is not for the model of model.partial_pretrain, which {problem}; take another "
        "pattern, or another model."
    )
