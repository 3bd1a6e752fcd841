"""Checks that a model and its tokenizer agree on which token each label, mask entry, loss term and prediction is for.

    python -m dllm_reasoning.scripts.verify_label_alignment [--model_path DIR] [--instruction TEXT] [--response TEXT]

Without --model_path it takes a small random Llama whose tokenizer knows the words of the sample.
Exits 1 if a check fails.
"""

import argparse
import sys
from collections.abc import Iterator

import torch
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import WhitespaceSplit
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from dllm_reasoning.config.iterative import IterativeConfig
from dllm_reasoning.losses.iterative_loss import IterativeLoss
from dllm_reasoning.losses.layouts import IGNORED, Layout, build_layout
from dllm_reasoning.utils.attention import mask_problem
from dllm_reasoning.utils.noise_utils import greedy_decode_response
from verl.data.sft_dataset import encode_segments
from verl.models.loading import create_huggingface_actor
from verl.utils.tokenizer import hf_tokenizer

Batch = dict[str, torch.Tensor]


def alignment_errors(
    model: nn.Module, eos: int, ids: torch.Tensor, responses: torch.Tensor
) -> Iterator[tuple[str, str | None]]:
    """(check, what is wrong or None) for one sample: ids int64 [1, T]; responses bool [1, T], True = response token."""
    positions = torch.arange(ids.shape[1])[None]
    batch = {"input_ids": ids, "attention_mask": torch.ones_like(positions), "position_ids": positions,
             "response_mask": responses.long()}  # fmt: skip
    error = None
    if responses[0, 0] or not responses[0, -1] or ids[0, -1] != eos:
        error = "the response does not run from the end of the instruction to EOS"
    elif not torch.equal(_layout(batch, eos, noise=1.0).tail.ids, torch.where(responses, eos, ids)):
        error = "noise changes the instruction, or leaves a response token unchanged"
    yield "response mask", error
    labels = torch.where(responses, ids, IGNORED)
    aligned = torch.equal(_layout(batch, eos).tail.labels[:, :-1], labels[:, 1:])
    yield "next-token labels", None if aligned else "labels are not the response shifted by one"
    problem = mask_problem(model)
    name = f"loss (of full rows only: the model {problem})" if problem else "loss"
    yield name, _loss_error(model, batch, eos, labels, only_full_rows=problem is not None)
    yield "decode shift", _decode_error(model, ids, responses)


def _layout(batch: Batch, eos: int, pattern: str = "iid", noise: float = 0.0, split: bool = False) -> Layout:
    """The sample's layout; `noise`: the share of response tokens that EOS replaces."""
    config = IterativeConfig(noise_pattern=pattern, noise_min=noise, noise_max=noise, block_length=4)
    return build_layout(batch, [0], config, eos, split=split)


def _loss_error(model: nn.Module, batch: Batch, eos: int, labels: torch.Tensor, only_full_rows: bool) -> str | None:
    """How a loss without noise, a sum, differs from Hugging Face's own, a mean; None if it does not."""
    expected = float(model(input_ids=batch["input_ids"], labels=labels).loss) * int((labels != IGNORED).sum())
    # (pattern, split): full rows, a shared instruction, packed windows after the clean text, whose loss is `ar`
    variants = (("iid", False), ("iid", True), ("packed", True))
    for pattern, split in variants[:1] if only_full_rows else variants:
        loss = IterativeLoss([1.0], 1.0, share=split)
        losses = loss.run(model, _layout(batch, eos, pattern, split=split), None, scale=1.0, ar_scale=1.0)
        actual = float(losses.ar if pattern == "packed" else losses.rounds[0])
        if abs(actual - expected) > 1e-4 * max(1.0, expected):  # float32 sums in another order
            return f"{pattern}: loss {actual:.6f}, Hugging Face's own {expected:.6f}"
    return None


def _decode_error(model: nn.Module, ids: torch.Tensor, responses: torch.Tensor) -> str | None:
    predicted = model(input_ids=ids).logits.argmax(-1)
    decoded = greedy_decode_response(ids, predicted, responses)
    for i in range(1, ids.shape[1]):  # a prediction at i - 1 becomes the token at i, in the response only
        expected = int(predicted[0, i - 1] if responses[0, i] else ids[0, i])
        if decoded[0, i] != expected:
            return f"position {i} holds {int(decoded[0, i])}, expected {expected}"
    return None


def random_model(words: list[str]) -> tuple[nn.Module, PreTrainedTokenizerFast]:
    """A Llama of two layers with random weights, and a tokenizer with one token per word."""
    numbers = {word: i for i, word in enumerate(dict.fromkeys(["<pad>", "<eos>", *words]))}
    words_to_ids = Tokenizer(WordLevel(numbers))
    words_to_ids.pre_tokenizer = WhitespaceSplit()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=words_to_ids, pad_token="<pad>", eos_token="<eos>")
    config = LlamaConfig(
        vocab_size=len(numbers), hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=2,
        pad_token_id=0, bos_token_id=None, eos_token_id=1,
    )  # fmt: skip
    torch.manual_seed(0)
    return LlamaForCausalLM(config).eval(), tokenizer


def main(argv: list[str] | None = None) -> int:
    """Run every check; returns 1 if one fails."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model_path", help="folder of a model with its tokenizer")
    parser.add_argument("--instruction", default="2 + 3 =", help="text that is read")
    parser.add_argument("--response", default="5 . 5 + 1 = 6", help="text that is learned; EOS is added")
    args = parser.parse_args(argv)
    if args.model_path is None:
        model, tokenizer = random_model(f"{args.instruction} {args.response}".split())
    else:
        model, tokenizer = create_huggingface_actor(args.model_path).eval(), hf_tokenizer(args.model_path)
    if tokenizer.eos_token_id is None:
        sys.exit(f"--model_path {args.model_path}: the tokenizer has no EOS token; add one to tokenizer_config.json.")
    segments = [(args.instruction, False), (f"{args.response}{tokenizer.eos_token}", True)]
    ids, responses = (torch.tensor([values]) for values in encode_segments(tokenizer, segments))
    failed = False
    with torch.no_grad():
        for name, error in alignment_errors(model, tokenizer.eos_token_id, ids, responses.bool()):
            failed |= error is not None
            sys.stdout.write(f"{name}: {'ok' if error is None else 'WRONG: ' + error}\n")
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
