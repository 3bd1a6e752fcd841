"""Compares the layouts of a batch on the loaded model: padded rows, a flat row, a flat row with shared prompts."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
import torch.distributed as dist
from loguru import logger
from tensordict import TensorDict
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_map

from verl.utils.ulysses import get_ulysses_sequence_parallel_group, set_ulysses_sequence_parallel_group
from verl.workers.policy.attention import NAME, NAME_OF_FLASH
from verl.workers.policy.causal_lm import CausalLMPolicy, causal_model, response_log_probs

LIMIT, LIMIT_OF_HALF = 1e-3, 0.05  # of differences between log-probs in float32, and in half precision
PROMPT, ANSWERS = 6, (7, 4)  # tokens of the rows


@torch.no_grad()
def layout_difference(
    policy: CausalLMPolicy, model: nn.Module, device: torch.device, share_prompt: bool
) -> tuple[float, float]:  # fmt: skip
    """The largest difference between log-probs of two short rows with padding and in a flat row, and what it may be.

    The rows have the same prompt, which is shared with `share_prompt`. They are computed in float32, or in the model's
    own type where one of its functions does not take float32. Every rank gets the maximum over all ranks.
    """
    causal = causal_model(model)
    batch = _rows(causal.get_input_embeddings().num_embeddings, device)
    attention, chosen = causal.config._attn_implementation, (policy.remove_padding, policy.share_prompt)
    if attention == NAME_OF_FLASH:  # its kernel would round
        causal.set_attn_implementation(NAME)
    try:
        policy.forward = log_probs_in_float32
        differences, limit = _compared(policy, model, batch, share_prompt), LIMIT
    except (RuntimeError, TypeError) as error:
        logger.debug("{} does not compute in float32: {}", type(causal).__name__, error)
        policy.forward = response_log_probs
        with torch.autocast(device.type, torch.bfloat16):
            differences, limit = _compared(policy, model, batch, share_prompt), LIMIT_OF_HALF
    finally:
        policy.forward = response_log_probs
        policy.remove_padding, policy.share_prompt = chosen
        causal.set_attn_implementation(attention)
    counted = batch["attention_mask"][:, -max(ANSWERS) :].bool()
    difference = differences[counted].abs().max().nan_to_num(torch.inf)
    if dist.is_initialized():
        dist.all_reduce(difference, op=dist.ReduceOp.MAX)
    return difference.item(), limit


def _compared(policy: CausalLMPolicy, model: nn.Module, batch: TensorDict, share_prompt: bool) -> torch.Tensor:
    """Log-probs [2, R] of a flat row minus those with padding."""
    group = get_ulysses_sequence_parallel_group()
    options = {"temperature": 1.0, "with_entropy": False}
    try:
        policy.remove_padding, policy.share_prompt = True, share_prompt
        flat, _ = policy.log_probs(model, batch, **options)
        set_ulysses_sequence_parallel_group(None)  # each rank then computes full rows
        policy.remove_padding = policy.share_prompt = False
        return flat - policy.log_probs(model, batch, **options)[0]
    finally:
        set_ulysses_sequence_parallel_group(group)


def _rows(words: int, device: torch.device) -> TensorDict:
    """Two rows of one prompt, with a column of padding before it and answers of ANSWERS tokens; any words."""
    generator, width = torch.Generator().manual_seed(0), 1 + PROMPT + max(ANSWERS)
    ids = torch.randint(words, (2, width), generator=generator)
    ids[1, : 1 + PROMPT] = ids[0, : 1 + PROMPT]
    mask = torch.ones_like(ids)
    mask[:, 0] = 0
    for row, answer in enumerate(ANSWERS):
        mask[row, 1 + PROMPT + answer :] = 0
    columns = {"input_ids": ids, "attention_mask": mask, "position_ids": (mask.cumsum(-1) - 1).clamp(min=0)}
    columns |= {"responses": ids[:, 1 + PROMPT :], "group_index": torch.zeros(2, dtype=torch.int64)}
    return TensorDict(columns, batch_size=2, device=device)


def log_probs_in_float32(model: nn.Module, **inputs: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """`response_log_probs` in float32, whatever type FSDP2 gathers the weights in."""
    with in_float32(model):
        return response_log_probs(model, **inputs)


@contextmanager
def in_float32(model: nn.Module) -> Iterator[None]:
    """Let the body of the model's forward compute in float32."""
    mode = _Float32()
    with ExitStack() as stack:
        for part in (part for part in model.modules() if isinstance(part, FSDPModule)):
            for handle in mode.leave_out_hooks(part):
                stack.callback(handle.remove)
        stack.enter_context(mode)
        yield


class _Float32(TorchFunctionMode):
    """Widens tensors and dtypes of half precision among the arguments of every function, outside of FSDP2's hooks."""

    def __init__(self) -> None:
        super().__init__()
        self.depth = 0  # of FSDP2's hooks that run
        self.inputs: list[Any] = []

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if self.depth:
            return func(*args, **(kwargs or {}))
        args, kwargs = tree_map(_widened, (args, kwargs or {}))
        return func(*args, **kwargs)

    def leave_out_hooks(self, part: FSDPModule) -> Iterator[Any]:
        """Hooks around those that gather and free the weights of `part`, and cast its inputs; their handles."""

        def before(module: nn.Module, args: Any, kwargs: Any) -> None:
            self.depth += 1
            self.inputs.append((args, kwargs))

        def gathered(module: nn.Module, args: Any, kwargs: Any) -> Any:
            self.depth -= 1
            return self.inputs.pop()  # as they were before the cast

        yield part.register_forward_pre_hook(before, prepend=True, with_kwargs=True)
        yield part.register_forward_pre_hook(gathered, with_kwargs=True)
        yield part.register_forward_hook(lambda *_: setattr(self, "depth", self.depth + 1), prepend=True)
        yield part.register_forward_hook(lambda *_: setattr(self, "depth", self.depth - 1))


def _widened(value: Any) -> Any:
    half = (torch.bfloat16, torch.float16)
    if isinstance(value, torch.Tensor):
        return value.float() if value.dtype in half else value
    return torch.float32 if isinstance(value, torch.dtype) and value in half else value
