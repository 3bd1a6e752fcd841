"""Multi-step word problems with worked steps; numbers are written digit by digit, so that steps must be calculated.

Problems are those of the SPD demo (2 to 5 steps); answers are in its house style, each step with its calculation
spelled out. No question occurs twice.
"""

import random
import re
from collections.abc import Mapping
from pathlib import Path

import pandas as pd
from transformers import PreTrainedTokenizerFast

from examples.spd_arithmetic import corpus as problems
from examples.spd_arithmetic.tokenizer import EOS, PAD, UNK, word_tokenizer

MASK = "<mask>"
SPECIAL = (PAD, EOS, UNK, MASK)
CHAT_TEMPLATE = "{% for message in messages %}{{ message['content'] }}{% endfor %}"  # the model knows questions only
DATA_SOURCE = "worked_arithmetic"
COUNTS = {"train": 20000, "val": 200, "test": 1000}


def digits(text: str) -> str:
    """Each number as its digits, a space in between: 15 -> 1 5."""
    return re.sub(r"\d+", lambda number: " ".join(number.group()), text)


def instruction_of(problem: problems.Problem) -> str:
    """The question."""
    return digits(problems.question_text(problem))


def worked_answer(problem: problems.Problem) -> str:
    """The answer in house style: every step with its calculation, then `the answer is N`."""
    words, _ = problems.render(problems.answer_slots(problem), problems.house_style)
    return digits(" ".join(words))


def vocabulary() -> dict[str, int]:
    """Special tokens, digits, words."""
    words = [word for word in problems.vocabulary() if not word.isdigit()]
    return {token: i for i, token in enumerate([*SPECIAL, *"0123456789", *words])}


def build_tokenizer() -> PreTrainedTokenizerFast:
    """Splits at spaces."""
    tokenizer = word_tokenizer(vocabulary(), mask_token=MASK)
    tokenizer.chat_template = CHAT_TEMPLATE
    return tokenizer


def draw(counts: dict[str, int], seed: int) -> dict[str, pd.DataFrame]:
    """The splits as tables, by name."""
    rng, rows = random.Random(f"dllm/{seed}"), {}
    while len(rows) < sum(counts.values()):
        problem = problems.sample_problem(rng)
        rows[instruction_of(problem)] = (worked_answer(problem), str(problems.solve(problem)))
    table = pd.DataFrame([(q, *a) for q, a in rows.items()], columns=["instruction", "output", "answer"])
    tables, start = {}, 0
    for split, count in counts.items():
        tables[split] = table.iloc[start : start + count].reset_index(drop=True)
        start += count
    return tables


def write(tables: Mapping[str, pd.DataFrame], directory: Path) -> None:
    """One parquet file per split: instruction, output, answer, and the columns of the RL data format."""
    for split, table in tables.items():
        table.assign(
            data_source=DATA_SOURCE, prompt=[[{"role": "user", "content": text}] for text in table["instruction"]],
            reward_model=[{"style": "rule", "ground_truth": answer} for answer in table["answer"]],
        ).to_parquet(directory / f"{split}.parquet")  # fmt: skip


def final_answer(text: str) -> str | None:
    """The number after the last `answer is`, its digits joined; None without one."""
    numbers = re.findall(r"answer is ((?:\d ?)+)", text)
    return numbers[-1].replace(" ", "") if numbers else None


def compute_score(data_source: str, solution_str: str, ground_truth: str, extra_info: dict | None = None) -> float:
    """1 if the final answer is correct, else 0."""
    return float(final_answer(solution_str) == ground_truth)
