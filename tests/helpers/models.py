"""Tiny models and tokenizers, made from a seed: no download, seconds to build."""

from pathlib import Path

import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

SPECIAL = ["<pad>", "<bos>", "<eos>", "<sep>", "<unk>"]
WORDS = [str(i) for i in range(20)] + "a b c d e f g h i j k l m n o p q r s t u v w x y z + - * = . , ? :".split()
CHAT_TEMPLATE = (
    "{% for m in messages %}{% if m['role'] == 'user' %}q : {{ m['content'] }} a : "
    "{% else %}{{ m['content'] }} <eos>{% endif %}{% endfor %}"
)


def make_tokenizer(words: list[str] = WORDS) -> PreTrainedTokenizerFast:
    """Word-level tokenizer: ids 0-4 are pad, bos, eos, sep, unk; then one id a word."""
    vocab = {w: i for i, w in enumerate(SPECIAL + list(words))}
    core = Tokenizer(models.WordLevel(vocab, unk_token="<unk>"))
    core.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=core,
        pad_token="<pad>",
        bos_token="<bos>",
        eos_token="<eos>",
        sep_token="<sep>",
        unk_token="<unk>",
    )
    tokenizer.chat_template = CHAT_TEMPLATE
    return tokenizer


def save_tiny_llama(directory: Path, hidden: int = 64, layers: int = 2, seed: int = 0, vocab_size: int = 64) -> str:
    """Write config, safetensors weights and tokenizer of a small Llama; returns the directory as text."""
    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=vocab_size,
        hidden_size=hidden,
        intermediate_size=2 * hidden,
        num_hidden_layers=layers,
        num_attention_heads=hidden // 32,
        num_key_value_heads=hidden // 32,
        max_position_embeddings=512,
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=2,
        tie_word_embeddings=False,
    )
    LlamaForCausalLM(config).save_pretrained(str(directory))
    make_tokenizer().save_pretrained(str(directory))
    return str(directory)
