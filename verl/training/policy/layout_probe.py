"""Compares the layouts of a batch on the loaded model: padded rows, a flat row, a flat row with shared prompts."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager

import torch
import torch.distributed as dist
from loguru import logger
from tensordict import TensorDict
from transformers import PreTrainedModel

from verl.training.parallel.sequence_parallel import (
    get_ulysses_sequence_parallel_group,
    get_ulysses_sequence_parallel_world_size,
    set_ulysses_sequence_parallel_group,
)
from verl.training.policy.attention import NAME as PACKED
from verl.training.policy.attention import NAME_OF_FLASH as PACKED_FLASH

LIMIT, LIMIT_OF_HALF = 1e-3, 0.05  # of differences in float32, and in half precision
PROMPT, ANSWERS = 6, (7, 4)  # tokens of the rows
WINDOW = 4  # of attention: shorter than the prompt

Compute = Callable[[TensorDict, bool, bool], torch.Tensor]
"""(rows, flat, wide) -> [rows, R] or [rows, R, H]: values at the responses, from one flat row if `flat`, else with
padding; computed in float32 if `wide`."""


def agreeing_layouts(
    model: PreTrainedModel, what: str, with_padding: Compute, layouts: Mapping[str, Compute], device: torch.device
) -> dict[str, bool]:
    """{layout: whether it gives what each row alone gives}, of "with padding" and of each of `layouts`.

    `layouts`, by name: "without padding", and perhaps "with shared prompts" too; it may be empty. `with_padding`
    computes the values with padding; `what` names them in messages. Called on all ranks. A warning names the layouts
    that disagree. Raises ValueError where padding changes the values too, or where ranks share sequences: they need a
    flat row.
    """
    agrees: dict[str, bool] = {}
    shown: list[str] = []
    name = type(model).__name__.removeprefix("FSDP")
    for layout, compute in {"with padding": with_padding, **layouts}.items():
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
    """(difference, limit) between values of two short rows in one batch and those of each row alone.

    The rows have one prompt; the batch is a `flat` row, or padded. The difference is the largest over rows, response
    tokens and ranks (infinite for NaN). A row's differences are divided by the standard deviation of its values if
    that is above 1: rounding errors grow with the values of a trained model.

    Computed in float32 (LIMIT), or with bfloat16 autocast where the model does not take float32 (LIMIT_OF_HALF). The
    model's attention windows are shorter meanwhile, so that the rows exceed them. Called on all ranks.
    """
    rows = _rows(model.get_input_embeddings().num_embeddings, device)
    with _exact_short_windows(model):
        try:
            differences, limit = _compared(compute, rows, flat, True), LIMIT
        except (RuntimeError, TypeError) as error:  # one that has nothing to do with float32 is raised again below
            logger.debug("{} does not compute in float32: {}", type(model).__name__, error)
            with torch.autocast(device.type, torch.bfloat16):
                differences, limit = _compared(compute, rows, flat, False), LIMIT_OF_HALF
    difference = differences.max().nan_to_num(torch.inf)
    if dist.is_initialized():
        dist.all_reduce(difference, op=dist.ReduceOp.MAX)
    return difference.item(), limit


def _compared(compute: Compute, rows: TensorDict, flat: bool, wide: bool) -> torch.Tensor:
    """[2]: each row's largest difference between the batch's values and those of the row alone, scaled as above.

    Ranks share sequences in flat rows only: each computes a padded batch, and a row alone, by itself.
    """
    group = get_ulysses_sequence_parallel_group()
    try:
        if not flat:
            set_ulysses_sequence_parallel_group(None)
        together = compute(rows, flat, wide)
        set_ulysses_sequence_parallel_group(None)
        largest = []
        for row, answer in enumerate(ANSWERS):
            kept = slice(1, 1 + PROMPT + answer)  # without the padding before and after it
            alone = {name: rows[name][row : row + 1, kept] for name in ("input_ids", "attention_mask", "position_ids")}
            alone |= {"responses": alone["input_ids"][:, PROMPT:], "group_index": rows["group_index"][:1]}
            expected = compute(TensorDict(alone, batch_size=1), False, wide)[0]
            largest.append((together[row, :answer] - expected).abs().max() / expected.std().clamp(min=1))
        return torch.stack(largest)
    finally:
        set_ulysses_sequence_parallel_group(group)


@contextmanager
def _exact_short_windows(model: PreTrainedModel) -> Iterator[None]:
    """Use exact attention instead of flash attention, whose kernel rounds; windows and chunks have WINDOW tokens."""
    flash = model.config._attn_implementation == PACKED_FLASH
    longer = []  # (object, attribute, its value)
    for part in (model.config.get_text_config(), *model.modules()):
        for name in ("sliding_window", "attention_chunk_size", "attention_window_size"):
            value = getattr(part, name, None)
            if type(value) is int and value > WINDOW:
                longer.append((part, name, value))
    try:
        if flash:
            model.set_attn_implementation(PACKED)
        for part, name, _ in longer:
            setattr(part, name, WINDOW)
        yield
    finally:
        if flash:
            model.set_attn_implementation(PACKED_FLASH)
        for part, name, value in longer:
            setattr(part, name, value)


def _rows(vocabulary: int, device: torch.device) -> TensorDict:
    """Two rows [2, 1 + PROMPT + max(ANSWERS)] of random tokens with one prompt: a column of padding, the prompt,
    ANSWERS[row] tokens of response, padding."""
    generator, width = torch.Generator().manual_seed(0), 1 + PROMPT + max(ANSWERS)
    ids = torch.randint(vocabulary, (2, width), generator=generator)
    ids[1, : 1 + PROMPT] = ids[0, : 1 + PROMPT]
    mask = torch.ones_like(ids)
    mask[:, 0] = 0
    for row, answer in enumerate(ANSWERS):
        mask[row, 1 + PROMPT + answer :] = 0
    columns = {"input_ids": ids, "attention_mask": mask, "position_ids": (mask.cumsum(-1) - 1).clamp(min=0)}
    columns |= {"responses": ids[:, 1 + PROMPT :], "group_index": torch.zeros(2, dtype=torch.int64)}
    return TensorDict(columns, batch_size=2, device=device)
