"""Questions of a test bed, split three ways: drawn from the corpus, or read from a GSM8K-format file."""

import itertools
import json
import random
from dataclasses import asdict, dataclass
from pathlib import Path

from transformers import PreTrainedTokenizerBase

from examples.spd_arithmetic import corpus
from recipe.spd.answers import extract_answer
from verl.utils.chat_template import render_chat
from verl.utils.jsonl import read_objects

SPLITS = ("train", "val", "test")


@dataclass(frozen=True)
class Question:
    """One question as the models see it."""

    question_id: str
    question: str
    prompt_ids: list[int]
    ground_truth: str


Splits = dict[str, list[Question]]


def draw_questions(counts: dict[str, int], seed: int, tokenizer: PreTrainedTokenizerBase) -> Splits:
    """Word problems of the corpus; no text occurs twice, within or across the splits."""
    rng = random.Random(f"questions/{seed}")
    truth: dict[str, str] = {}
    while len(truth) < sum(counts.values()):
        problem = corpus.sample_problem(rng)
        truth[corpus.question_text(problem)] = str(corpus.solve(problem))
    texts = list(truth)
    return _split(texts, [truth[t] for t in texts], [tokenizer(t)["input_ids"] for t in texts], counts)


def read_gsm8k(path: Path, counts: dict[str, int], seed: int, tokenizer: PreTrainedTokenizerBase) -> Splits:
    """Questions of a jsonl file with `question` and `answer` ("... #### 42"), in an order that the seed fixes."""
    truth: dict[str, str] = {}
    for number, row in read_objects(path):
        if not {"question", "answer"} <= row.keys():
            raise ValueError(f"{path}, line {number}: keys {sorted(row)}; expected question and answer (GSM8K format)")
        answer = extract_answer(row["answer"])
        if answer is None:
            raise ValueError(f"{path}, line {number}: no answer in {row['answer'][-60:]!r}; end it with '#### 42'")
        truth[row["question"].strip()] = answer
    needed = sum(counts.values())
    if len(truth) < needed:
        raise ValueError(
            f"{path} has {len(truth)} distinct questions, but {needed} are requested ({counts}); "
            "lower --n-train-questions, --n-val-questions or --n-test-questions"
        )
    texts = random.Random(seed).sample(sorted(truth), needed)
    return _split(texts, [truth[t] for t in texts], [_chat_prompt(t, tokenizer) for t in texts], counts)


def _chat_prompt(question: str, tokenizer: PreTrainedTokenizerBase) -> list[int]:
    ask = f"{question}\nReason step by step, then finish with 'the answer is' and the number."
    if tokenizer.chat_template is None:
        return tokenizer(f"Question: {ask}\nAnswer:")["input_ids"]
    messages = [{"role": "user", "content": ask}]
    text = render_chat(tokenizer, messages, add_generation_prompt=True)
    return tokenizer(text, add_special_tokens=False)["input_ids"]


def _split(texts: list[str], truth: list[str], prompts: list[list[int]], counts: dict[str, int]) -> Splits:
    rows = zip(texts, prompts, truth, strict=True)
    return {
        split: [Question(f"{split}-{i}", *row) for i, row in enumerate(itertools.islice(rows, counts[split]))]
        for split in SPLITS
    }


def write_questions(path: Path, questions: list[Question]) -> None:
    """One JSON line a question."""
    path.write_text("".join(json.dumps(asdict(q)) + "\n" for q in questions))
