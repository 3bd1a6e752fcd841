"""What a worker of the test bed does with transformers: completions and speculative decoding in plain batches."""

from collections.abc import Sequence
from functools import cache
from typing import Any

import torch
from torch import nn
from transformers import AutoModelForCausalLM
from transformers.utils.logging import disable_progress_bar

from examples.spd_arithmetic.pair import PairFiles, end_tokens
from recipe.spd.data.blocks import Block, cut_at_end
from recipe.spd.rollout.decoder import greedy_generate, speculative_generate
from scripts.spd_evaluation.rules import margin as accept_within
from verl.models.loading import torch_dtype_of


@cache
def _load(files: PairFiles) -> dict[str, nn.Module]:
    """Both models on the device, once per process."""
    torch.set_num_threads(files.threads)
    disable_progress_bar()  # its lines would cross those of the command
    dtype = torch_dtype_of(files.dtype, "--dtype")
    return {name: AutoModelForCausalLM.from_pretrained(files.folder / name, dtype=dtype).to(files.device).eval()
            for name in ("target", "draft")}


def complete(files: PairFiles, role: str, rows: Sequence[tuple[list[int], int]]) -> list[list[int]]:
    """Greedy continuation of each prompt by `target` or `draft`, its end token included, of at most so many tokens."""
    prompts, limits = zip(*rows, strict=True)
    made = greedy_generate(_load(files)[role], prompts, max_new_tokens=max(limits),
                           eos_token_id=end_tokens(files.folder), batch_size=files.batch_size).tokens
    return [ids[:limit] for ids, limit in zip(made, limits, strict=True)]


def decode(files: PairFiles, margin: float, rows: Sequence[tuple[list[int], int]]) -> dict[str, list]:
    """Speculative decoding of (prompt, tokens before the first block): lists `tokens`, `rounds` and `accepted` with an
    entry per row, and `blocks`, those with a mismatch: row, tokens of the answer before it, draft, target.
    """
    models, ends = _load(files), end_tokens(files.folder)
    prompts, offsets = zip(*rows, strict=True)
    limits: dict[str, Any] = {"eos_token_id": ends, "batch_size": files.batch_size}
    begun: list[list[int]] = [[] for _ in rows]
    if longest := max(offsets):
        own = greedy_generate(models["target"], prompts, max_new_tokens=longest, **limits)
        begun = [ids[:offset] for ids, offset in zip(own.tokens, offsets, strict=True)]
        begun = [[] if ends.intersection(ids) else ids for ids in begun]  # shorter answers start at their beginning
    blocks = []

    def keep(block: Block, accepted: torch.Tensor) -> None:
        columns = (block.rows.tolist(), block.context_ids, block.draft_ids.tolist(), block.target_ids.tolist())
        for row, context, draft, target in zip(*columns, strict=True):
            draft, target = cut_at_end(draft, target, ends)
            if draft != target[:-1]:
                blocks.append((row, len(context) - len(prompts[row]), draft, target))

    result = speculative_generate(
        models["target"], models["draft"], [p + ids for p, ids in zip(prompts, begun, strict=True)],
        accept_within(margin), gamma=files.gamma, max_new_tokens=files.max_new_tokens, on_block=keep, **limits)
    tokens = [ids + more for ids, more in zip(begun, result.tokens, strict=True)]
    return {"tokens": tokens, "rounds": result.rounds, "accepted": result.accepted, "blocks": blocks}


def complete_blocks(files: PairFiles, blocks: Sequence[tuple[list[int], ...]]) -> list[tuple[list[int], ...]]:
    """Draft and target ids of (context, draft, target) that `decode` recorded: they are complete."""
    return [block[1:] for block in blocks]
