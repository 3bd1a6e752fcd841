"""Small random models of two architectures, right-padded samples, captured warnings."""

from contextlib import contextmanager

import torch
from transformers import LlamaConfig, LlamaForCausalLM, Qwen3Config, Qwen3ForCausalLM

from dllm_reasoning.utils.attention import warn_once
from tests.helpers.logs import logged

VOCABULARY, EOS, PAD = 48, 2, 0


def tiny(architecture: str, seed: int = 0, initializer_range: float = 0.35, hidden_size: int = 32):
    """Two layers, width 32, wide output weights, so that the next token depends on all text before it.

    `architecture`: llama, tied (a Llama whose output matrix is its embedding) or qwen3.
    """
    torch.manual_seed(seed)
    shape = dict(
        vocab_size=VOCABULARY, hidden_size=hidden_size, intermediate_size=48, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=512, pad_token_id=PAD, eos_token_id=EOS,
        bos_token_id=1, tie_word_embeddings=architecture == "tied", initializer_range=initializer_range,
    )  # fmt: skip
    if architecture in ("llama", "tied"):
        return LlamaForCausalLM(LlamaConfig(**shape)).eval()
    return Qwen3ForCausalLM(Qwen3Config(head_dim=8, **shape)).eval()


def samples(instructions, responses, seed: int = 0):
    """Right-padded rows of these lengths; the last response token is EOS. [B, T] each."""
    generator = torch.Generator().manual_seed(seed)
    width = max(a + b for a, b in zip(instructions, responses, strict=True))
    ids = torch.zeros(len(instructions), width, dtype=torch.int64)
    mask, answers = torch.zeros_like(ids), torch.zeros_like(ids)
    for i, (a, b) in enumerate(zip(instructions, responses, strict=True)):
        ids[i, : a + b] = torch.randint(5, VOCABULARY, (a + b,), generator=generator)
        ids[i, a + b - 1] = EOS
        mask[i, : a + b] = 1
        answers[i, a : a + b] = 1
    positions = torch.arange(width).expand_as(ids)
    return {"input_ids": ids, "attention_mask": mask, "position_ids": positions, "response_mask": answers}


@contextmanager
def captured_warnings():
    """A list of the warnings logged meanwhile; `warn_once` starts afresh."""
    warn_once.cache_clear()
    with logged() as lines:
        yield lines
