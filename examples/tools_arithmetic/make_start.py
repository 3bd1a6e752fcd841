"""Makes the demo's start: a small causal LM that guesses products and seldom calls the calculator, and questions.

    python -m examples.tools_arithmetic.make_start --out DIR [--seed 0] [--sft-steps N]

It is trained by SFT in plain torch on products of two numbers of two digits. Most training answers are the bare result,
which a model of this size cannot compute; the others call the calculator and copy its result. A start that the same
arguments made before is reused.
"""

import random
from pathlib import Path

import pandas as pd
from transformers import PreTrainedTokenizerFast

from examples.grpo_arithmetic.make_start import OnStep, make_once, parse, rl_row
from examples.spd_arithmetic import train_models, train_pair
from examples.spd_arithmetic.tokenizer import EOS, PAD, SEP, UNK, word_tokenizer

SFT_STEPS = 350
CALL_SHARE = 0.15  # of the training answers
CALL = ["<tool_call>", '{"name":', '"calculator",', '"arguments":', '{"expression":', '"', None, '"}}', "</tool_call>"]
WORDS = ["question", "answer", "result", "*", "?", ".", "Error:", *"0123456789", *(word for word in CALL if word)]
COUNTS = {"train": 4000, "val": 400}  # of 8,100 products; the training rows of SFT are drawn from the rest, too
DATA_SOURCE = "products"
CHAT_TEMPLATE = (
    "{% for message in messages %}{% if message['role'] == 'user' %}question {{ message['content'] }} ? "
    "{% elif message['role'] == 'tool' %}result {{ message['content'] }} . "
    "{% elif message['role'] == 'assistant' %}{{ message['content'] }} <eos> {% endif %}{% endfor %}"
)


def main(argv: list[str] | None = None) -> Path:
    """Make the start unless it exists; returns its folder."""
    args = parse(argv, __doc__, SFT_STEPS)

    def write(folder: Path, on_step: OnStep) -> None:
        products, tokenizer = split_products(args.seed), build_tokenizer()
        ids, held_out = tokenizer.get_vocab(), set(products["val"])
        config = train_models.target_config(len(ids), args.sft_steps)
        model = train_models.train(config, lambda rng: training_row(rng, ids, held_out), args.seed, on_step)
        train_pair.publish(model, folder / "model")
        tokenizer.save_pretrained(folder / "model")
        for split, pairs in products.items():
            pd.DataFrame([row(split, i, *pair) for i, pair in enumerate(pairs)]).to_parquet(folder / f"{split}.parquet")

    return make_once(args, [Path(__file__)], write)


def build_tokenizer() -> PreTrainedTokenizerFast:
    """A tokenizer that splits at spaces; each digit is a word."""
    words = list(dict.fromkeys([PAD, EOS, SEP, UNK, *WORDS]))
    tokenizer = word_tokenizer({word: i for i, word in enumerate(words)}, sep_token=SEP)
    tokenizer.chat_template = CHAT_TEMPLATE
    return tokenizer


def split_products(seed: int) -> dict[str, list[tuple[int, int]]]:
    """Pairs of factors for each split; no pair, in either order, is in two of them."""
    rng = random.Random(seed)
    pairs = [(a, b) for a in range(10, 100) for b in range(a, 100)]
    rng.shuffle(pairs)
    pairs = [pair if rng.random() < 0.5 else pair[::-1] for pair in pairs]
    val = COUNTS["val"]
    return {"val": pairs[:val], "train": pairs[val : val + COUNTS["train"]]}


def question(a: int, b: int) -> list[str]:
    """The words of a question's content."""
    return [*str(a), "*", *str(b)]


def training_row(rng: random.Random, ids: dict[str, int], held_out: set[tuple[int, int]]) -> train_models.Row:
    """A question with a bare answer, or with a call, its result and the answer."""
    pair = (rng.randint(10, 99), rng.randint(10, 99))
    while pair in held_out or pair[::-1] in held_out:
        pair = (rng.randint(10, 99), rng.randint(10, 99))
    asked, result = question(*pair), [*str(pair[0] * pair[1])]
    parts = [(False, ["question", *asked, "?"])]
    if rng.random() < CALL_SHARE:
        call = [word for part in CALL for word in ([part] if part else asked)]
        parts += [(True, [*call, EOS]), (False, ["result", *result, "."])]
    parts.append((True, ["answer", *result, EOS]))
    tokens = [ids[word] for _, words in parts for word in words]
    labels = [ids[word] if counts else train_models.IGNORED for counts, words in parts for word in words]
    return tokens, labels


def row(split: str, index: int, a: int, b: int) -> dict:
    """A question in the RL data format."""
    return rl_row(DATA_SOURCE, split, index, " ".join(question(a, b)), str(a * b))


if __name__ == "__main__":
    main()
