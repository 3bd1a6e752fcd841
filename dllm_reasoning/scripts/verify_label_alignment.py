"""Proves on a real model and tokenizer that labels, response mask and shift are aligned; exits 1 if one is off.

    python -m dllm_reasoning.scripts.verify_label_alignment --model_path DIR [--instruction TEXT] [--response TEXT]
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from dllm_reasoning.losses.iterative_loss import IterativeLoss
from dllm_reasoning.losses.layouts import IGNORED, NoiseSettings, build_layout
from dllm_reasoning.trainer.sft_dataset import encode_segments
from dllm_reasoning.utils.attention import mask_problem
from dllm_reasoning.utils.noise_utils import greedy_decode_response
from verl.utils.model import create_huggingface_actor
from verl.utils.tokenizer import hf_tokenizer

Batch = dict[str, torch.Tensor]


def make_batch(tokenizer: Any, instruction: str, response: str) -> Batch:
    """The sample as training sees it, [1, T]."""
    ids, learned = encode_segments(tokenizer, [(instruction, False), (f"{response}{tokenizer.eos_token}", True)])
    places = torch.arange(len(ids))[None]
    return {"input_ids": torch.tensor([ids]), "attention_mask": torch.ones_like(places), "position_ids": places,
            "response_mask": torch.tensor([learned])}  # fmt: skip


def layout_of(batch: Batch, noise_token: int, pattern: str = "iid", level: float = 0.0, split: bool = False):
    """The layout of one sample under a fixed noise level."""
    noise = NoiseSettings(pattern, "uniform", level, level, width=4, windows=3, aligned=0.0, token=noise_token)
    return build_layout(batch, [0], noise, progress=0.0, split=split)


def response_mask(model: nn.Module, tokenizer: Any, batch: Batch) -> str | None:
    """The mask starts behind the instruction, and ends with EOS."""
    answers = batch["response_mask"][0].bool()
    ids = batch["input_ids"][0]
    if answers[0] or not answers[-1] or ids[-1] != tokenizer.eos_token_id:
        return "the response does not run from behind the instruction to EOS"
    noised = layout_of(batch, tokenizer.eos_token_id, level=1.0).tail.ids[0]
    if not torch.equal(noised[~answers], ids[~answers]) or bool((noised[answers] != tokenizer.eos_token_id).any()):
        return "noise touches the instruction, or spares the response"
    return None


def next_token_labels(model: nn.Module, tokenizer: Any, batch: Batch) -> str | None:
    """The label at i is the token at i + 1, from the last instruction token on."""
    labels, ids = layout_of(batch, tokenizer.eos_token_id).tail.labels[0], batch["input_ids"][0]
    first = int(batch["response_mask"][0].argmax())
    if not torch.equal(labels[first - 1 : -1], ids[first:]) or bool((labels[: first - 1] != IGNORED).any()):
        return "labels are not the response shifted by one"
    return None


def loss_of_the_model(model: nn.Module, tokenizer: Any, batch: Batch) -> str | None:
    """Without noise, the loss is that of Hugging Face's own labels argument; shared or not, whole or in windows (rows
    alone where the model's attention rules the others out)."""
    answers = batch["response_mask"].bool()
    own = torch.where(answers, batch["input_ids"], IGNORED)
    wanted = float(model(input_ids=batch["input_ids"], labels=own).loss) * int(answers.sum())
    ways = (("iid", False), ("iid", True), ("packed", True))
    for pattern, split in ways[:1] if mask_problem(model) else ways:
        layout = layout_of(batch, tokenizer.eos_token_id, pattern, split=split)
        told = IterativeLoss([1.0], 1.0, share=split).run(model, layout, None, scale=1.0, ar_scale=1.0)
        found = float(told.ar if pattern == "packed" else told.rounds[0])
        if abs(found - wanted) > 1e-4 * max(1.0, wanted):
            return f"{pattern}: loss {found:.6f}, Hugging Face's own {wanted:.6f}"
    return None


def decode_shift(model: nn.Module, tokenizer: Any, batch: Batch) -> str | None:
    """A prediction at i lands at i + 1, and a response decoded from clean text is the model's own greedy choice."""
    answers, ids = batch["response_mask"].bool(), batch["input_ids"]
    said = model(input_ids=ids).logits.argmax(-1)
    decoded = greedy_decode_response(ids, said, answers)
    for i in range(1, ids.shape[1]):
        wanted = said[0, i - 1] if answers[0, i] else ids[0, i]
        if decoded[0, i] != wanted:
            return f"place {i} holds {int(decoded[0, i])}, wanted {int(wanted)}"
    return None


CHECKS: dict[str, Callable[[nn.Module, Any, Batch], str | None]] = {
    "response mask": response_mask, "next-token labels": next_token_labels, "loss": loss_of_the_model,
    "decode shift": decode_shift,
}  # fmt: skip


def main(argv: list[str] | None = None) -> int:
    """Run every check; 1 if one fails."""
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
            wrong = check(model, tokenizer, batch)
            failed += wrong is not None
            sys.stdout.write(f"{name}: {'ok' if wrong is None else 'WRONG: ' + wrong}\n")
    return int(failed > 0)


if __name__ == "__main__":
    sys.exit(main())
