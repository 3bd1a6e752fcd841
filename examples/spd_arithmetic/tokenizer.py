"""Word-level tokenizer of the arithmetic corpus, as a Hugging Face fast tokenizer."""

from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from examples.spd_arithmetic.corpus import vocabulary

PAD, EOS, SEP, UNK = "<pad>", "<eos>", "<sep>", "<unk>"
PAD_ID, EOS_ID, SEP_ID, UNK_ID = range(4)


def token_ids() -> dict[str, int]:
    """Id of every token: the special tokens first, then the corpus vocabulary."""
    return {token: i for i, token in enumerate([PAD, EOS, SEP, UNK, *vocabulary()])}


def word_tokenizer(ids: dict[str, int], **special: str) -> PreTrainedTokenizerFast:
    """A tokenizer that splits at spaces and adds no special token by itself; `special`: further special tokens."""
    inner = Tokenizer(models.WordLevel(ids, unk_token=UNK))
    inner.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(tokenizer_object=inner, pad_token=PAD, eos_token=EOS, unk_token=UNK,
                                   padding_side="left", clean_up_tokenization_spaces=False, **special)


def build_tokenizer() -> PreTrainedTokenizerFast:
    """The corpus' tokenizer."""
    return word_tokenizer(token_ids(), sep_token=SEP)


class Encoder:
    """Words to ids and back, without the overhead of the fast tokenizer; a word outside the corpus is an error."""

    def __init__(self) -> None:
        self.ids = token_ids()
        self.tokens = list(self.ids)

    def encode(self, words: list[str]) -> list[int]:
        """Ids of the words."""
        try:
            return [self.ids[word] for word in words]
        except KeyError as error:
            raise ValueError(f"word {error} is not in the corpus vocabulary; add it to corpus.vocabulary()") from error

    def decode(self, ids: list[int]) -> str:
        """Text of the ids, special tokens left out."""
        return " ".join(self.tokens[i] for i in ids if i >= len((PAD, EOS, SEP, UNK)))
