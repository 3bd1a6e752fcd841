"""Compatibility with verl: functions on tensors, for log-probs and entropies of logits, padding, truncation, ranks."""

from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from tensordict import TensorDict

from verl.algos.aggregation import masked_mean, masked_sum, masked_var, masked_whiten  # noqa: F401
from verl.training.lr_schedules import *  # noqa: F403

_ROWS = 1024  # rows of the vocabulary held in float32 at a time


def gather_from_labels(data: torch.Tensor, label: torch.Tensor) -> torch.Tensor:
    """data [..., V], label [...] -> data at the label, [...]."""
    return torch.gather(data, -1, label.unsqueeze(-1)).squeeze(-1)


class _LabelLogProbs(torch.autograd.Function):
    """log softmax(logits)[label] without ever holding a second [N, V] tensor in the forward."""

    @staticmethod
    def forward(ctx, logits: torch.Tensor, labels: torch.Tensor, inplace: bool) -> torch.Tensor:
        wide = torch.float64 if logits.dtype == torch.float64 else torch.float32
        norm = torch.cat([rows.to(wide).logsumexp(-1) for rows in logits.split(_ROWS)])
        ctx.save_for_backward(logits, labels, norm)
        ctx.inplace = inplace
        return gather_from_labels(logits, labels).to(wide) - norm

    @staticmethod
    def backward(ctx, grad: torch.Tensor):
        logits, labels, norm = ctx.saved_tensors
        out = logits if ctx.inplace else torch.empty_like(logits)
        for i in range(0, len(logits), _ROWS):
            rows = slice(i, i + _ROWS)
            part = torch.exp(logits[rows].to(norm.dtype) - norm[rows, None]).mul_(-grad[rows, None])
            part.scatter_add_(-1, labels[rows, None], grad[rows, None])
            out[rows] = part.to(out.dtype)
        return out, None, None


def logprobs_from_logits(logits: torch.Tensor, labels: torch.Tensor, inplace_backward: bool = True) -> torch.Tensor:
    """logits [..., V], labels [...] -> log-probability of each label, [...], in float32 or wider.

    With `inplace_backward` the backward pass overwrites the logits, which nothing else may need then.
    """
    if logits.shape[:-1] != labels.shape:
        raise ValueError(f"logits {tuple(logits.shape)} and labels {tuple(labels.shape)} do not belong together")
    inplace = inplace_backward and not logits.is_leaf  # a leaf's values are the caller's
    flat = logits.reshape(-1, logits.shape[-1])
    return _LabelLogProbs.apply(flat, labels.reshape(-1), inplace).view(labels.shape)


def logprobs_from_logits_naive(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """The plain form, for tests: log_softmax, then gather; logits [..., V], labels [...] -> [...]."""
    return gather_from_labels(F.log_softmax(logits, dim=-1), labels)


def logprobs_from_logits_v2(logits: torch.FloatTensor, labels: torch.Tensor) -> torch.Tensor:
    """`logprobs_from_logits` that leaves the logits alone; logits [..., V], labels [...] -> [...]."""
    return logprobs_from_logits(logits, labels, inplace_backward=False)


def clip_by_value(x: torch.Tensor, tensor_min: torch.Tensor, tensor_max: torch.Tensor) -> torch.Tensor:
    """x clipped between two tensors of a shape that broadcasts to its own."""
    return torch.max(torch.min(x, tensor_max), tensor_min)


def entropy_from_logits(logits: torch.Tensor) -> torch.Tensor:
    """logits [..., V] -> entropy of their softmax in nats, [...]."""
    return torch.logsumexp(logits, dim=-1) - (logits.softmax(dim=-1) * logits).sum(dim=-1)


def entropy_from_logits_with_chunking(logits: torch.Tensor, chunk_size: int = 2048) -> torch.Tensor:
    """`entropy_from_logits` in float32, `chunk_size` rows at a time; logits [..., V] -> [...]."""
    flat = logits.reshape(-1, logits.shape[-1])
    parts = [entropy_from_logits(rows.float()) for rows in flat.split(chunk_size)]
    return torch.cat(parts).view(logits.shape[:-1])


def get_response_mask(
    response_id: torch.Tensor, eos_token: int | list[int] = 2, dtype: torch.dtype = torch.int64
) -> torch.Tensor:
    """response_id [B, R] -> [B, R], 1 up to and including the first end token."""
    ends = torch.isin(response_id, torch.as_tensor(eos_token, device=response_id.device)).int()
    return (ends.cumsum(dim=1) - ends == 0).to(dtype)


def pad_2d_list_to_length(response: list[list[int]], pad_token_id: int, max_length: int | None = None) -> torch.Tensor:
    """Ragged lists -> [B, L] padded on the right; L is the longest row, or `max_length` when that is more."""
    length = max([len(row) for row in response] + [max_length or 0])
    return torch.tensor([list(row) + [pad_token_id] * (length - len(row)) for row in response])


def pad_sequence_to_length(tensors: torch.Tensor, max_seq_len: int, pad_token_id: Any, left_pad: bool = False):
    """[..., L] -> [..., max_seq_len]; comes back as it is when L is not less."""
    missing = max_seq_len - tensors.shape[-1]
    return tensors if missing <= 0 else F.pad(tensors, (missing, 0) if left_pad else (0, missing), value=pad_token_id)


def postprocess_data(
    input_ids: torch.Tensor, attention_mask: torch.Tensor, max_length: int, pad_token_id: int, left_pad: bool = True,
    truncation: str = "error",
) -> tuple[torch.Tensor, torch.Tensor]:
    """ids and mask [B, L] -> [B, max_length], padded or truncated: the side named by `truncation` is cut off."""
    length = input_ids.shape[-1]
    if length > max_length and truncation == "error":
        what = f"a sequence of {length} tokens exceeds max_length={max_length}"
        raise ValueError(f"{what}; raise it, filter overlong rows, or set truncation to left, right or middle")
    from verl.data.rl_dataset import truncate_ids  # imports transformers

    keep = truncate_ids(list(range(length)), max_length, truncation)
    ids = pad_sequence_to_length(input_ids[..., keep], max_length, pad_token_id, left_pad)
    return ids, pad_sequence_to_length(attention_mask[..., keep], max_length, 0, left_pad)


def tokenize_and_postprocess_data(
    prompt: str, tokenizer: Any, max_length: int, pad_token_id: int, left_pad: bool = True,
    truncation: str = "error",
) -> tuple[torch.Tensor, torch.Tensor]:
    """A prompt -> ids and mask of shape [1, max_length], without special tokens added."""
    encoded = tokenizer(prompt, return_tensors="pt", add_special_tokens=False)
    ids, mask = encoded["input_ids"], encoded["attention_mask"]
    return postprocess_data(ids, mask, max_length, pad_token_id, left_pad, truncation)


def log_probs_from_logits_response(input_ids: torch.Tensor, logits: torch.Tensor, response_length: int) -> torch.Tensor:
    """Log-probs [B, R] of the last R = `response_length` tokens: input_ids [B, T], logits [B, T, V]."""
    return logprobs_from_logits(logits[:, -response_length - 1 : -1], input_ids[:, -response_length:])


def broadcast_dict_tensor(tensors: dict[str, torch.Tensor] | TensorDict, src: int, group: Any) -> None:
    """Overwrite every tensor, in place, with rank `src`'s; keys and shapes agree on all ranks."""
    for key in sorted(tensors.keys()):
        dist.broadcast(tensors[key], src=src, group=group)


def gather_tensors(tensor: torch.Tensor, size: int, group: Any) -> list[torch.Tensor]:
    """The tensors, of one shape, of the `size` ranks of `group` in rank order; not differentiable."""
    parts = [torch.empty_like(tensor, memory_format=torch.contiguous_format) for _ in range(size)]
    dist.all_gather(parts, tensor.contiguous(), group=group)
    return parts


def allgather_dict_tensors(
    tensors: dict[str, torch.Tensor] | TensorDict, size: int, group: Any, dim: int = 0
) -> dict[str, torch.Tensor] | TensorDict:
    """Every tensor joined along `dim` over the ranks of `group` in rank order; shapes agree on all ranks."""
    gathered = {}
    for key in sorted(tensors.keys()):
        gathered[key] = torch.cat(gather_tensors(tensors[key], size, group), dim)
    if isinstance(tensors, dict):
        return gathered
    return type(tensors)(gathered, batch_size=[tensors.batch_size[0] * size], device=tensors.device)
