"""The small Llama that the demo trains from scratch."""

from __future__ import annotations

from pathlib import Path

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from examples.dllm_arithmetic.corpus import build_tokenizer


def write_new_model(directory: Path, seed: int) -> None:
    """1.2 M parameters (6 layers, width 128), untrained, with its tokenizer."""
    torch.manual_seed(seed)
    tokenizer = build_tokenizer()
    model = LlamaForCausalLM(LlamaConfig(
        vocab_size=len(tokenizer), hidden_size=128, intermediate_size=384, num_hidden_layers=6, num_attention_heads=4,
        num_key_value_heads=4, max_position_embeddings=512, pad_token_id=tokenizer.pad_token_id, bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id, tie_word_embeddings=True,
    ))  # fmt: skip
    model.save_pretrained(directory)
    tokenizer.save_pretrained(directory)
