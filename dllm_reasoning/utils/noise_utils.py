"""The noise of responses before refinement: pattern, level and token."""

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from transformers import PreTrainedTokenizerBase


@dataclass(frozen=True)
class Pattern:
    """`positions(length, level, width, generator)` -> (noised, region), bool [length] each, over a response's tokens.

    Later rounds decode the tokens of `region` again and leave the others unchanged. `windows`: noise is in windows
    next to the clean text instead. `warm_up`: the model's own guesses replace the noise before the first round.
    `has_width`: the model learns blocks of a fixed width.
    """

    positions: Callable[[int, float, int, torch.Generator], tuple[torch.Tensor, torch.Tensor]] | None
    windows: bool = False
    warm_up: bool = False
    has_width: bool = False


def _everywhere(length: int, level: float, width: int, generator: torch.Generator) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.rand(length, generator=generator) < level, torch.ones(length, dtype=torch.bool)


def _after_a_cut(length: int, level: float, width: int, generator: torch.Generator) -> tuple[torch.Tensor, ...]:
    noised = torch.arange(length) >= torch.randint(max(1, length), (), generator=generator)
    return noised, noised.clone()


def _one_block(length: int, level: float, width: int, generator: torch.Generator) -> tuple[torch.Tensor, torch.Tensor]:
    offset = torch.arange(length) - torch.randint(max(1, length - width + 1), (), generator=generator)
    noised = (offset >= 0) & (offset < width)
    return noised, noised.clone()


PATTERNS = {
    "iid": Pattern(_everywhere),  # each token independently, with the sample's probability
    "suffix": Pattern(_after_a_cut),  # everything from a random position on
    "block": Pattern(_one_block, has_width=True),  # `width` consecutive tokens
    "trajectory": Pattern(_one_block, warm_up=True, has_width=True),  # such a block after some rounds of the model's
    "packed": Pattern(None, windows=True, has_width=True),  # windows of `width` tokens next to the clean sample
}

# How far from noise_min to noise_max: (progress of the run in [0, 1], uniform number of the sample) -> [0, 1]
SCHEDULES: dict[str, Callable[[float, float], float]] = {
    "uniform": lambda progress, uniform: uniform,
    "linear": lambda progress, uniform: progress,
    "cosine": lambda progress, uniform: (1 - math.cos(math.pi * progress)) / 2,
}


def noise_level(schedule: str, low: float, high: float, progress: float, generator: torch.Generator) -> float:
    """A sample's noise probability p: U(low, high), or rising from low to high with `progress` (linear, cosine).

    Every schedule draws one number, so that the schedule changes nothing but the level.
    """
    uniform = float(torch.rand((), generator=generator))
    return low + (high - low) * SCHEDULES[schedule](min(1.0, max(0.0, progress)), uniform)


def row_generator(seed: int) -> torch.Generator:
    """The generator of one sample's noise, which thus depends neither on the other rows nor on the rank."""
    return torch.Generator().manual_seed(seed)


def q_sample(
    input_ids: torch.Tensor, response_mask: torch.Tensor, noised: torch.Tensor, noise_token_id: int
) -> torch.Tensor:
    """The first round's input s_0: the noise token replaces the response tokens that are `noised`.

    input_ids [B, T] int64, response_mask [B, T] (1 = response), noised [B, T] bool -> [B, T] int64.
    """
    return torch.where(noised & response_mask.bool(), noise_token_id, input_ids)


def greedy_decode_response(input_ids: torch.Tensor, predicted: torch.Tensor, region: torch.Tensor) -> torch.Tensor:
    """The next round's input: where `region` is true at i + 1, the token becomes the one predicted at i; [B, T]."""
    decoded = input_ids.clone()
    decoded[:, 1:] = torch.where(region[:, 1:].bool(), predicted[:, :-1], input_ids[:, 1:])
    return decoded


def window_starts(
    length: int, count: int, generator: torch.Generator, *, width: int = 1, aligned: float = 0.0
) -> list[int]:
    """`count` positions in a response of `length` tokens at which windows begin; all 0 if it is empty.

    Positions are uniform and, within a sample, evenly spread (systematic sampling). The share `aligned` of them lies at
    multiples of `width`, where generation in full blocks begins.
    """
    blocks = round(aligned * count)
    starts: list[int] = []
    for size, number, step in ((-(-length // width), blocks, width), (length, count - blocks, 1)):
        first = float(torch.rand((), generator=generator, dtype=torch.float64))
        starts += [step * min(max(0, size - 1), int((first + i) * size / number)) for i in range(number)]
    return starts


def noise_token_of(name: str, tokenizer: PreTrainedTokenizerBase) -> int:
    """The id of iterative.noise_token: `eos`, `mask`, or a token of the vocabulary by its text; else ValueError."""
    special = {"eos": tokenizer.eos_token_id, "mask": tokenizer.mask_token_id}
    if name in special:
        if special[name] is None:
            # responses end in EOS whatever the noise token is
            other = "" if name == "eos" else ", or name a token of its vocabulary"
            raise ValueError(
                f"iterative.noise_token={name}, but the tokenizer {tokenizer.name_or_path!r} has no {name} token; add "
                f"one to its tokenizer_config.json{other}."
            )
        return special[name]
    vocabulary = tokenizer.get_vocab()
    if name not in vocabulary:
        raise ValueError(
            f"iterative.noise_token={name!r} is not a token of {tokenizer.name_or_path!r}; use eos, mask or a token of "
            "its vocabulary."
        )
    return vocabulary[name]
