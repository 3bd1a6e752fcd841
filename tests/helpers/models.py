"""Tiny models and tokenizers, made from a seed: no download, seconds to build."""

from pathlib import Path

import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

SPECIAL = ["<pad>", "<bos>", "<eos>", "<sep>", "<unk>"]
ENDS = dict(pad_token_id=0, bos_token_id=1, eos_token_id=2)
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
    special = {f"{token.strip('<>')}_token": token for token in SPECIAL}
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=core, **special)
    tokenizer.chat_template = CHAT_TEMPLATE
    return tokenizer


def save_tiny_llama(
    directory: Path, hidden: int = 64, layers: int = 2, seed: int = 0, vocab_size: int = 64, positions: int = 2048,
    tied: bool = False,
) -> str:  # fmt: skip
    """Write config, safetensors weights and tokenizer of a small Llama; returns the directory as text.

    With `tied` its output matrix is its embedding, as in most small models that people use.
    """
    torch.manual_seed(seed)
    size = dict(hidden_size=hidden, intermediate_size=2 * hidden, num_hidden_layers=layers, vocab_size=vocab_size)
    heads = dict(num_attention_heads=hidden // 32, num_key_value_heads=hidden // 32)
    config = LlamaConfig(**size, **heads, **ENDS, max_position_embeddings=positions, tie_word_embeddings=tied)
    LlamaForCausalLM(config).save_pretrained(str(directory))
    make_tokenizer().save_pretrained(str(directory))
    return str(directory)


ANSWERS = [f"####{digit}" for digit in range(4)]


def save_answering_llama(directory: Path) -> str:
    """A Llama that writes by its last token alone: after the word with id w "####{w % 5}" and an end, or w again and
    again where w % 5 is 4. So completions decide whether an answer is right, and some hit any limit.
    """
    after = {word: ANSWERS[i % 5] if i % 5 < 4 else word for i, word in enumerate(WORDS, len(SPECIAL))}
    return save_markov_llama(directory, [*WORDS, *ANSWERS], after)


def save_markov_llama(
    directory: Path, words: list[str], after: dict[str, str], chat_template: str = "", sharpness: float = 20.0,
    **size: int,
) -> str:  # fmt: skip
    """A Llama that writes by its last token alone: after a word that of `after`, nearly always; an end after any other.

    `sharpness` is the logit of that word; the others have 0. `size` replaces settings of LlamaConfig.
    """
    torch.manual_seed(0)
    tokenizer = make_tokenizer(words)
    tokenizer.chat_template = chat_template or tokenizer.chat_template
    size = dict(hidden_size=80, intermediate_size=128, num_hidden_layers=2, num_attention_heads=2, head_dim=32,
                max_position_embeddings=512) | size  # fmt: skip
    config = LlamaConfig(vocab_size=len(tokenizer), tie_word_embeddings=False, **size, **ENDS)
    model = LlamaForCausalLM(config)
    tokens = tokenizer.convert_ids_to_tokens(range(len(tokenizer)))
    following = [tokenizer.convert_tokens_to_ids(after.get(token, "<eos>")) for token in tokens]
    with torch.no_grad():
        for layer in model.model.layers:
            layer.self_attn.o_proj.weight.zero_()
            layer.mlp.down_proj.weight.zero_()
        states = model.model.norm(model.model.embed_tokens.weight)  # [V, H]; V < H, so that the rows are independent
        wanted = torch.nn.functional.one_hot(torch.tensor(following), len(tokenizer)).float()
        model.lm_head.weight.copy_(sharpness * (torch.linalg.pinv(states) @ wanted).T)
    model.save_pretrained(str(directory))
    tokenizer.save_pretrained(str(directory))
    return str(directory)
