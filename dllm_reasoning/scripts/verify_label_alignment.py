"""Checks on a real model and tokenizer that labels, response mask and shift are aligned; exits 1 if one is wrong.

    python -m dllm_reasoning.scripts.verify_label_alignment --model_path DIR [--instruction TEXT] [--response TEXT]
"""

import argparse
import sys
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from dllm_reasoning.config.iterative import IterativeConfig
from dllm_reasoning.losses.iterative_loss import IterativeLoss
from dllm_reasoning.losses.layouts import IGNORED, Layout, build_layout
from dllm_reasoning.trainer.sft_dataset import encode_segments
from dllm_reasoning.utils.attention import mask_problem
from dllm_reasoning.utils.noise_utils import greedy_decode_response
from verl.utils.model import create_huggingface_actor
from verl.utils.tokenizer import hf_tokenizer

Batch = dict[str, torch.Tensor]
"""One sample as training sees it: input_ids, attention_mask, position_ids, response_mask (1 = response), [1, T]."""


def make_batch(tokenizer: Any, instruction: str, response: str) -> Batch:
    ids, learned = encode_segments(tokenizer, [(instruction, False), (f"{response}{tokenizer.eos_token}", True)])
    positions = torch.arange(len(ids))[None]
    return {"input_ids": torch.tensor([ids]), "attention_mask": torch.ones_like(positions), "position_ids": positions,
            "response_mask": torch.tensor([learned])}  # fmt: skip


def layout_of(batch: Batch, noise_token: int, pattern: str = "iid", level: float = 0.0, split: bool = False) -> Layout:
    """The layout of one sample at a fixed noise level."""
    noise = IterativeConfig(noise_pattern=pattern, noise_min=level, noise_max=level, block_length=4)
    return build_layout(batch, [0], noise, noise_token, split=split)


def check_mask(model: nn.Module, eos: int, batch: Batch) -> str | None:
    """The mask starts after the instruction and ends with EOS; noise changes its tokens only."""
    responses, ids = batch["response_mask"][0].bool(), batch["input_ids"][0]
    if responses[0] or not responses[-1] or ids[-1] != eos:
        return "the response does not run from the end of the instruction to EOS"
    noised = layout_of(batch, eos, level=1.0).tail.ids[0]
    if not torch.equal(noised, torch.where(responses, eos, ids)):
        return "noise changes the instruction, or leaves a response token unchanged"
    return None


def check_labels(model: nn.Module, eos: int, batch: Batch) -> str | None:
    """The label at i is the token at i + 1, from the last instruction token on."""
    labels, ids = layout_of(batch, eos).tail.labels[0], batch["input_ids"][0]
    first = int(batch["response_mask"][0].argmax())
    if not torch.equal(labels[first - 1 : -1], ids[first:]) or bool((labels[: first - 1] != IGNORED).any()):
        return "labels are not the response shifted by one"
    return None


def check_loss(model: nn.Module, eos: int, batch: Batch) -> str | None:
    """Without noise the loss equals Hugging Face's own, for full rows, a shared instruction and packed windows (rows
    only if the model's attention rules out the others)."""
    responses = batch["response_mask"].bool()
    labels = torch.where(responses, batch["input_ids"], IGNORED)
    expected = float(model(input_ids=batch["input_ids"], labels=labels).loss) * int(responses.sum())
    variants = (("iid", False), ("iid", True), ("packed", True))
    for pattern, split in variants[:1] if mask_problem(model) else variants:
        layout = layout_of(batch, eos, pattern, split=split)
        losses = IterativeLoss([1.0], 1.0, share=split).run(model, layout, None, scale=1.0, ar_scale=1.0)
        actual = float(losses.ar if pattern == "packed" else losses.rounds[0])
        if abs(actual - expected) > 1e-4 * max(1.0, expected):
            return f"{pattern}: loss {actual:.6f}, Hugging Face's own {expected:.6f}"
    return None


def check_shift(model: nn.Module, eos: int, batch: Batch) -> str | None:
    """A prediction at i becomes the token at i + 1, in the response only."""
    responses, ids = batch["response_mask"].bool(), batch["input_ids"]
    predicted = model(input_ids=ids).logits.argmax(-1)
    decoded = greedy_decode_response(ids, predicted, responses)[0].tolist()
    for i in range(1, ids.shape[1]):
        expected = int(predicted[0, i - 1] if responses[0, i] else ids[0, i])
        if decoded[i] != expected:
            return f"position {i} holds {decoded[i]}, expected {expected}"
    return None


CHECKS: dict[str, Callable[[nn.Module, int, Batch], str | None]] = {
    "response mask": check_mask, "next-token labels": check_labels, "loss": check_loss, "decode shift": check_shift,
}  # fmt: skip


def main(argv: list[str] | None = None) -> int:
    """Run every check; returns 1 if one fails."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model_path", required=True)
    parser.add_argument("--instruction", default="2 + 3 =")
    parser.add_argument("--response", default="5 . 5 + 1 = 6")
    args = parser.parse_args(argv)
    tokenizer = hf_tokenizer(args.model_path)
    model = create_huggingface_actor(args.model_path).eval()
    batch = make_batch(tokenizer, args.instruction, args.response)
    failed = 0
    with torch.no_grad():
        for name, check in CHECKS.items():
            problem = check(model, tokenizer.eos_token_id, batch)
            failed += problem is not None
            sys.stdout.write(f"{name}: {'ok' if problem is None else 'WRONG: ' + problem}\n")
    return int(failed > 0)


if __name__ == "__main__":
    sys.exit(main())
