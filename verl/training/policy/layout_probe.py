"""Compares the layouts of a batch on the loaded model: padded rows, a flat row, a flat row with shared prompts."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
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
from transformers import PreTrainedModel

from verl.training.parallel.sequence_parallel import (
    get_ulysses_sequence_parallel_group,
    get_ulysses_sequence_parallel_world_size,
    set_ulysses_sequence_parallel_group,
)
from verl.training.policy.attention import NAME, NAME_OF_FLASH

LIMIT, LIMIT_OF_HALF = 1e-3, 0.05  # of differences in float32, and in half precision
PROMPT, ANSWERS = 6, (7, 4)  # tokens of the rows
WINDOW = 4  # of attention: shorter than the prompt

Compute = Callable[[TensorDict, bool, bool], torch.Tensor]
"""(two rows, whether they go in a flat row, whether in float32) -> [2, R] or [2, R, H]: values at the responses."""


def agreeing_layouts(
    model: PreTrainedModel, what: str, padded: Compute, layouts: Mapping[str, Compute], device: torch.device
) -> dict[str, bool]:
    """Which of `layouts` ("without padding" and perhaps "with shared prompts") give what each row alone gives.

    A warning says which do not. `what`: name of the values in messages; `padded`: computes them with padding. Called on
    all ranks. Raises ValueError where padding changes the values too, or where ranks share sequences, which needs a
    flat row.
    """
    agrees, shown, name = {}, [], type(model).__name__.removeprefix("FSDP")
    for layout, compute in {"with padding": padded, **layouts}.items():
        difference, limit = layout_difference(model, compute, layout != "with padding", device)
        agrees[layout] = difference <= limit
        shown.append(f"{layout} they differ by {difference:.2g} (limit {limit})")
    text = f"{what} of {name} for two short rows, against those of each row alone: {', '.join(shown)}"
    if all(agrees.values()):
        logger.debug(text)
        return agrees
    if not agrees["with padding"]:
        raise ValueError(f"{text}. This model does not leave padding out of what it computes: train another one.")
    if get_ulysses_sequence_parallel_world_size() > 1:
        raise ValueError(f"{text}. ulysses_sequence_parallel_size above 1 needs rows without padding: set it to 1.")
    kept = "" if agrees["without padding"] else "Batches keep their padding. "
    logger.warning(f"{text}. {kept}Prompts are not shared.")
    return agrees


@torch.no_grad()
def layout_difference(
    model: PreTrainedModel, compute: Compute, flat: bool, device: torch.device
) -> tuple[float, float]:
    """(largest difference over all ranks, its limit) between what `compute` gives for two short rows of one prompt on
    `device` together, with padding or `flat`, and for each of them alone. A row's differences are divided by the
    standard deviation of its values if that is above 1: rounding errors grow with the values of a trained model.

    They are computed in float32, or in the model's own type where one of its functions does not take float32; windows
    of the model's attention are shorter meanwhile, so that the rows exceed them.
    """
    rows = _rows(model.get_input_embeddings().num_embeddings, device)
    with _exact_short_windows(model):
        try:
            differences, limit = _compared(compute, rows, flat, True), LIMIT
        except (RuntimeError, TypeError) as error:
            logger.debug("{} does not compute in float32: {}", type(model).__name__, error)
            with torch.autocast(device.type, torch.bfloat16):
                differences, limit = _compared(compute, rows, flat, False), LIMIT_OF_HALF
    difference = differences.max().nan_to_num(torch.inf)
    if dist.is_initialized():
        dist.all_reduce(difference, op=dist.ReduceOp.MAX)
    return difference.item(), limit


def _compared(compute: Compute, rows: TensorDict, flat: bool, in_float32: bool) -> torch.Tensor:
    """[2]: each row's largest difference, scaled, from that row alone, without padding, which one rank computes."""
    group = get_ulysses_sequence_parallel_group()
    together = compute(rows, True, in_float32) if flat else None
    try:
        set_ulysses_sequence_parallel_group(None)
        together, largest = compute(rows, False, in_float32) if together is None else together, []
        for row, answer in enumerate(ANSWERS):
            kept = slice(1, 1 + PROMPT + answer)
            alone = {name: rows[name][row : row + 1, kept] for name in ("input_ids", "attention_mask", "position_ids")}
            alone |= {"responses": alone["input_ids"][:, PROMPT:], "group_index": rows["group_index"][:1]}
            expected = compute(TensorDict(alone, batch_size=1), False, in_float32)[0]
            largest.append((together[row, :answer] - expected).abs().max() / expected.std().clamp(min=1))
        return torch.stack(largest)
    finally:
        set_ulysses_sequence_parallel_group(group)


@contextmanager
def _exact_short_windows(model: PreTrainedModel) -> Iterator[None]:
    """Replace flash attention, whose kernel rounds, and shorten windows and chunks of attention to WINDOW tokens."""
    attention = model.config._attn_implementation
    names = ("sliding_window", "attention_chunk_size", "attention_window_size")
    places = [(part, name) for part in (model.config.get_text_config(), *model.modules()) for name in names]
    longer = [(part, name, value) for part, name in places
              if type(value := getattr(part, name, None)) is int and value > WINDOW]  # fmt: skip
    try:
        if attention == NAME_OF_FLASH:
            model.set_attn_implementation(NAME)
        for part, name, _ in longer:
            setattr(part, name, WINDOW)
        yield
    finally:
        if attention == NAME_OF_FLASH:
            model.set_attn_implementation(attention)
        for part, name, value in longer:
            setattr(part, name, value)


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

        def restore_inputs(module: nn.Module, args: Any, kwargs: Any) -> Any:
            self.depth -= 1
            return self.inputs.pop()  # as they were before the cast

        yield part.register_forward_pre_hook(before, prepend=True, with_kwargs=True)
        yield part.register_forward_pre_hook(restore_inputs, with_kwargs=True)
        yield part.register_forward_hook(lambda *_: setattr(self, "depth", self.depth + 1), prepend=True)
        yield part.register_forward_hook(lambda *_: setattr(self, "depth", self.depth - 1))


def _widened(value: Any) -> Any:
    half = (torch.bfloat16, torch.float16)
    if isinstance(value, torch.Tensor):
        return value.float() if value.dtype in half else value
    return torch.float32 if isinstance(value, torch.dtype) and value in half else value
