"""Compatibility with verl: functions on tensors, for log-probs and entropies of logits, padding, truncation, ranks."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
import torch.nn.functional as F

from verl.algos.aggregation import masked_mean, masked_sum, masked_var, masked_whiten  # noqa: F401
from verl.utils.lr_schedules import *  # noqa: F403

if TYPE_CHECKING:
    from tensordict import TensorDict  # takes seconds to import
    from transformers import PreTrainedTokenizerBase

_ROWS = 1024  # rows of the vocabulary held in float32 at a time
_TORCH_COMPILE = torch.compile
FLAH_ATTN_CROSS_ENTROPY_LOSS_AVAILABLE = False  # spelled so by verl; the loss needs no kernel of flash-attn
NPU_CROSS_ENTROPY_LOSS_AVAILABLE = False


def gather_from_labels(data: torch.Tensor, label: torch.Tensor) -> torch.Tensor:
    """data [..., V], label [...] -> data at the label, [...]."""
    return torch.gather(data, -1, label.unsqueeze(-1)).squeeze(-1)


class _LabelLogProbs(torch.autograd.Function):
    """log softmax(logits)[label] without ever holding a second [N, V] tensor in the forward."""

    @staticmethod
    def forward(ctx, logits: torch.Tensor, labels: torch.Tensor, inplace: bool) -> torch.Tensor:
        wide = torch.float64 if logits.dtype == torch.float64 else torch.float32
        norm = torch.empty(labels.shape, dtype=wide, device=logits.device)
        for i in range(0, len(logits), _ROWS):
            norm[i : i + _ROWS] = torch.logsumexp(logits[i : i + _ROWS].to(wide), dim=-1)
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
    """logits [..., V], labels [...] -> log-probability of each label, [...], float32 (float64 for float64 logits).

    With `inplace_backward` the backward pass overwrites the logits with their gradient, which saves one [N, V] tensor.
    Give False when something else (an entropy with gradients) is computed from the same logits.
    """
    if logits.shape[:-1] != labels.shape:
        raise ValueError(f"logits {tuple(logits.shape)} and labels {tuple(labels.shape)} do not belong together")
    inplace = inplace_backward and not logits.is_leaf  # a leaf's values are the caller's
    flat = logits.reshape(-1, logits.shape[-1])
    return _LabelLogProbs.apply(flat, labels.reshape(-1), inplace).view(labels.shape)


def logprobs_from_logits_flash_attn(logits: torch.Tensor, labels: torch.Tensor, inplace_backward: bool = True):
    """logits [N, V], labels [N] -> log-probs [N], by flash-attn's fused cross entropy (extra `flash-attn`)."""
    from flash_attn.ops.triton.cross_entropy import cross_entropy_loss

    return -cross_entropy_loss(logits, labels, inplace_backward=inplace_backward)[0]


def logprobs_from_logits_torch_npu(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """`logprobs_from_logits`; NPUs are not supported."""
    return logprobs_from_logits(logits, labels)


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
    probs = torch.softmax(logits, dim=-1)
    return torch.logsumexp(logits, dim=-1) - (probs * logits).sum(dim=-1)


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


def compute_grad_norm(model: torch.nn.Module) -> float:
    """Euclidean norm of all gradients of the module (this rank's shards)."""
    return float(torch.nn.utils.get_total_norm([p.grad.float() for p in model.parameters() if p.grad is not None]))


def split_dict_tensor_into_batches(tensors: TensorDict, batch_size: int) -> list[TensorDict]:
    """Consecutive parts [batch_size, ...] of tensors [B, ...]; ValueError unless `batch_size` divides B."""
    if tensors.batch_size[0] % batch_size:
        raise ValueError(f"{tensors.batch_size[0]} rows cannot be cut into batches of {batch_size}")
    return list(tensors.split(batch_size))


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
    if truncation not in ("left", "right", "middle", "error"):
        raise ValueError(f"truncation={truncation!r} is unknown; take left, right, middle or error")
    length = input_ids.shape[-1]
    if length <= max_length:
        ids = pad_sequence_to_length(input_ids, max_length, pad_token_id, left_pad)
        return ids, pad_sequence_to_length(attention_mask, max_length, 0, left_pad)
    if truncation == "error":
        raise ValueError(
            f"a sequence of {length} tokens exceeds max_length={max_length}; raise it, filter overlong rows, "
            f"or set truncation to left, right or middle"
        )
    head = {"left": 0, "right": max_length, "middle": max_length // 2}[truncation]
    keep = [*range(head), *range(length - max_length + head, length)]
    return input_ids[..., keep], attention_mask[..., keep]


def tokenize_and_postprocess_data(
    prompt: str, tokenizer: PreTrainedTokenizerBase, max_length: int, pad_token_id: int, left_pad: bool = True,
    truncation: str = "error",
) -> tuple[torch.Tensor, torch.Tensor]:
    """A prompt -> ids and mask of shape [1, max_length], without special tokens added."""
    encoded = tokenizer(prompt, return_tensors="pt", add_special_tokens=False)
    ids, mask = encoded["input_ids"], encoded["attention_mask"]
    return postprocess_data(ids, mask, max_length, pad_token_id, left_pad, truncation)


def get_unpad_data(attention_mask: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, int]:
    """attention_mask [B, T] -> (positions of its ones in the flat batch [N], cumulative lengths [B+1], longest)."""
    lengths = attention_mask.sum(dim=-1, dtype=torch.int32)
    indices = attention_mask.flatten().nonzero().flatten()
    return indices, F.pad(lengths.cumsum(0, dtype=torch.int32), (1, 0)), int(lengths.max())


def log_probs_from_logits_response(input_ids: torch.Tensor, logits: torch.Tensor, response_length: int) -> torch.Tensor:
    """Log-probs [B, R] of the last R = `response_length` tokens: input_ids [B, T], logits [B, T, V]."""
    return logprobs_from_logits(logits[:, -response_length - 1 : -1], input_ids[:, -response_length:])


def log_probs_from_logits_response_rmpad(
    input_ids: torch.Tensor, attention_mask: torch.Tensor, logits_rmpad: torch.Tensor, response_length: int
) -> torch.Tensor:
    """The same, 0 at padding, for logits [N, V] of the tokens with attention_mask [B, T] = 1, row after row."""
    indices, *_ = get_unpad_data(attention_mask)
    ids = input_ids.flatten()[indices].unsqueeze(0)
    return log_probs_from_logits_all_rmpad(ids, logits_rmpad, indices, *input_ids.shape, response_length)


def log_probs_from_logits_all_rmpad(
    input_ids_rmpad: torch.Tensor, logits_rmpad: torch.Tensor, indices: torch.Tensor, batch_size: int, seqlen: int,
    response_length: int,
) -> torch.Tensor:  # fmt: skip
    """The same for ids [1, N] without padding, whose positions in the flat [B * T] batch are `indices` [N]."""
    following = input_ids_rmpad.squeeze(0).roll(-1)  # that of a row's last token is not asked for
    values = logprobs_from_logits(logits_rmpad.squeeze(0) if logits_rmpad.dim() == 3 else logits_rmpad, following)
    padded = values.new_zeros(batch_size * seqlen).scatter(0, indices, values).view(batch_size, seqlen)
    real = torch.zeros(batch_size * seqlen, dtype=torch.bool, device=indices.device).index_fill(0, indices, True)
    last = real.view(batch_size, seqlen)[:, -response_length:]
    return padded[:, -response_length - 1 : -1] * last


def post_process_logits(
    input_ids: torch.Tensor | None, logits: torch.Tensor, temperature: float, top_k: int, top_p: float
) -> torch.Tensor:
    """Logits [..., V] divided by the temperature; -inf outside of the top k (0: all) and of the nucleus top_p.

    The nucleus is the smallest set of the most likely tokens whose probability reaches `top_p` (arXiv 1904.09751).
    """
    logits = logits / temperature
    if top_k > 0:
        least = logits.topk(min(top_k, logits.shape[-1]), dim=-1).values[..., -1:]
        logits = logits.masked_fill(logits < least, -torch.inf)
    if top_p < 1:
        probs, order = logits.softmax(-1).sort(dim=-1, descending=True)
        outside = probs.cumsum(-1) - probs >= top_p
        logits = logits.masked_fill(torch.zeros_like(outside).scatter(-1, order, outside), -torch.inf)
    return logits


def prepare_decoder_attention_mask(
    attention_mask: torch.Tensor | None, input_shape: tuple[int, int], inputs_embeds: torch.Tensor
) -> torch.Tensor | None:
    """[B, 1, T, T] in the embeddings' type: 0 where a position sees another, else the type's least number.

    attention_mask [B, T] hides padding. None where there is nothing to hide: T is 1 and no mask is given.
    """
    rows, length = input_shape
    if attention_mask is None and length == 1:
        return None
    seen = torch.ones(length, length, dtype=torch.bool, device=inputs_embeds.device).tril().expand(rows, 1, -1, -1)
    if attention_mask is not None:
        seen = seen & attention_mask.bool()[:, None, None, :].to(seen.device)
    hidden = torch.finfo(inputs_embeds.dtype).min
    return torch.zeros(seen.shape, dtype=inputs_embeds.dtype, device=seen.device).masked_fill(~seen, hidden)


def remove_pad_token(input_ids: torch.Tensor, attention_mask: torch.Tensor) -> list[list[int]]:
    """The ids of each row, [B, T], whose mask is 1."""
    return [ids[mask.bool()].tolist() for ids, mask in zip(input_ids, attention_mask, strict=True)]


@contextmanager
def check_device_is_available() -> Iterator[None]:
    """Run the block only where CUDA is; RuntimeError elsewhere."""
    if not torch.cuda.is_available():
        raise RuntimeError("this needs a CUDA device and none is visible; check CUDA_VISIBLE_DEVICES")
    yield


@contextmanager
def use_original_torch_compile() -> Iterator[None]:
    """Inside the block torch.compile is PyTorch's own, whatever another package has put in its place."""
    replaced, torch.compile = torch.compile, _TORCH_COMPILE
    try:
        yield
    finally:
        torch.compile = replaced


def broadcast_dict_tensor(tensors: dict[str, torch.Tensor] | TensorDict, src: int, group: Any) -> None:
    """Overwrite every tensor, in place, with rank `src`'s; keys and shapes agree on all ranks."""
    for key in sorted(tensors.keys()):
        dist.broadcast(tensors[key], src=src, group=group)


def allgather_dict_tensors(
    tensors: dict[str, torch.Tensor] | TensorDict, size: int, group: Any, dim: int = 0
) -> dict[str, torch.Tensor] | TensorDict:
    """Every tensor joined along `dim` over the ranks of `group` in rank order; shapes agree on all ranks."""
    gathered = {}
    for key in sorted(tensors.keys()):
        value = tensors[key].contiguous()
        parts = [torch.empty_like(value) for _ in range(size)]
        dist.all_gather(parts, value, group=group)
        gathered[key] = torch.cat(parts, dim=dim)
    if isinstance(tensors, dict):
        return gathered
    return type(tensors)(gathered, batch_size=[tensors.batch_size[0] * size], device=tensors.device)


def allgather_dict_into_dict(data: dict, group: Any = None) -> dict[str, list]:
    """{key: value} on every rank -> {key: [value of rank 0, value of rank 1, ...]} on all of them."""
    parts: list[dict] = [{} for _ in range(dist.get_world_size(group))]
    dist.all_gather_object(parts, data, group=group)
    return {key: [part[key] for part in parts] for key in data}


def _reduced(value: torch.Tensor, op: Any = dist.ReduceOp.SUM) -> torch.Tensor:
    dist.all_reduce(value, op=op)
    return value


def distributed_mean_max_min_std(
    local_tensor: torch.Tensor, compute_max: bool = True, compute_min: bool = True, compute_std: bool = True
) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor | None, torch.Tensor | None]:
    """Mean, max, min and unbiased deviation of all ranks' entries (any shape, not empty on any rank)."""
    local = local_tensor.detach().float()
    total, count = _reduced(torch.stack([local.sum(), local.new_tensor(local.numel())]))
    mean = total / count
    largest = _reduced(local.max(), dist.ReduceOp.MAX) if compute_max else None
    least = _reduced(local.min(), dist.ReduceOp.MIN) if compute_min else None
    std = (_reduced(((local - mean) ** 2).sum()) / (count - 1).clamp(min=1)).sqrt() if compute_std else None
    return mean, largest, least, std


def distributed_masked_mean(local_tensor: torch.Tensor, local_mask: torch.Tensor) -> torch.Tensor:
    """Mean over all ranks of the entries whose mask is 1; tensor and mask of one shape."""
    mask = local_mask.to(local_tensor.dtype)
    total, count = _reduced(torch.stack([masked_sum(local_tensor, mask), mask.sum()]).detach())
    return total / count.clamp(min=1e-8)
