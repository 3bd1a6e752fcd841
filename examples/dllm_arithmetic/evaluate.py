"""Accuracy and tokens per forward, or tokens per second, of a model in every mode of generation.

    python -m examples.dllm_arithmetic.evaluate --model NAME=DIR --questions FILE --block W --out FILE

Accuracy and tokens per forward are of all questions, in batches. Every forward counts. OUT is {"questions", "rows",
"correct"}; `correct` has each question's verdict under greedy. With --timed N OUT is {mode: tokens per second} of N
questions, one at a time on one thread.
"""

import argparse
import functools
import json
import math
import operator
import os
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pandas as pd
import torch
from loguru import logger
from transformers import AutoModelForCausalLM, AutoTokenizer

from dllm_reasoning.inference.generator import GenerationResult, iterative_generate
from examples.dllm_arithmetic.corpus import final_answer
from recipe.spd.rollout.answers import is_correct
from verl.models.kv_cache import Prefills
from verl.utils.accelerator import get_device_name
from verl.utils.fs import output_file
from verl.utils.tokenizer import stop_ids

LIMIT = 128
AUP_ALPHA, AUP_WORST = 3.0, 5.0  # weight of lost accuracy; points below the slowest mode at which a mode is left out
MODES: dict[str, dict[str, Any]] = {
    "greedy": {"refine_iter": 0, "add_eos_length": 0},
    "refine 0": {"refine_iter": 0}, "refine 1": {"refine_iter": 1}, "refine 2": {"refine_iter": 2},
    "converge": {"refine_iter": "converge"}, "slide": {"refine_iter": "slide"}, "verify": {"refine_iter": "verify"},
    "branch": {"refine_iter": "branch"}, "branch 3": {"refine_iter": "branch", "add_eos_length": 3},
    "slide 0.99": {"refine_iter": "slide", "confidence_threshold": 0.99},
    "slide 0.9": {"refine_iter": "slide", "confidence_threshold": 0.9},
}  # fmt: skip


class Subject:
    """A model on the questions."""

    def __init__(
        self, directory: Path, questions: pd.DataFrame, block: int, batch: int, limit: int = LIMIT,
        text_answers: bool = False,
    ) -> None:  # fmt: skip
        """`limit`: tokens of an answer; `text_answers`: the end of an answer is a word or a number, not a result."""
        self.model = AutoModelForCausalLM.from_pretrained(directory).to(get_device_name()).eval()
        self.tokenizer = AutoTokenizer.from_pretrained(directory)
        self.ends = stop_ids(self.tokenizer, str(directory))
        self.truths, self.block, self.batch = list(questions["answer"]), block, batch
        self.limit, self.text_answers = limit, text_answers
        encode = self.tokenizer
        self.prompts = [encode(q, add_special_tokens=False)["input_ids"] for q in questions["instruction"]]

    def options(self, mode: str) -> dict[str, Any]:
        """The settings of a mode."""
        return {"add_eos_length": self.block - 1, **MODES[mode]}

    def generate(self, prompts: list[list[int]], mode: str, prefills: Prefills | None = None) -> GenerationResult:
        """The answers of one mode."""
        return iterative_generate(self.model, prompts, self.ends, self.tokenizer.pad_token_id,
                                  max_new_tokens=self.limit, return_details=True, prefills=prefills,
                                  **self.options(mode))  # fmt: skip

    def answers(self, modes: Sequence[str]) -> dict[str, GenerationResult]:
        """Every question's answer in each mode; the modes share one reading of a batch of prompts."""
        parts: dict[str, list[GenerationResult]] = {mode: [] for mode in modes}
        for start in range(0, len(self.prompts), self.batch):
            prefills = Prefills()
            for mode, done in parts.items():
                begun, prompts = time.perf_counter(), self.prompts[start : start + self.batch]
                done.append(self.generate(prompts, mode, prefills))
                logger.info("{}: {} of {} questions answered, the last {} in {:.0f} s", mode, start + len(prompts),
                            len(self.prompts), len(prompts), time.perf_counter() - begun)  # fmt: skip
        return {mode: functools.reduce(operator.add, done) for mode, done in parts.items()}

    def measure(self, mode: str, result: GenerationResult) -> tuple[dict[str, float], list[bool]]:
        """Of the answers of a mode: (results, which of them are correct)."""
        texts = self.tokenizer.batch_decode(result.tokens, skip_special_tokens=True)
        pairs = zip(result.tokens, texts, self.truths, strict=True)
        right = [self.is_right(ids, text, truth) for ids, text, truth in pairs]
        share = sum(right) / len(right)
        results = {
            "block": 1 + self.options(mode)["add_eos_length"], "accuracy": share,
            "accuracy_se": math.sqrt(share * (1 - share) / len(right)),
            "tokens_per_forward": result.stats.tokens_per_forward,
        }  # fmt: skip
        return results, right

    def is_right(self, ids: list[int], text: str, truth: str) -> bool:
        """Whether an answer, which has ended, gives the right result."""
        if not self.text_answers:
            return final_answer(text) == truth
        return bool(ids) and ids[-1] in self.ends and is_correct(text, truth)

    def speed(self, mode: str, count: int) -> float:
        """Tokens per second of the first `count` questions, one at a time."""
        self.generate(self.prompts[:1], mode)
        begun, tokens = time.perf_counter(), 0
        for prompt in self.prompts[:count]:
            tokens += self.generate([prompt], mode).stats.tokens[0]
        return tokens / (time.perf_counter() - begun)


def evaluate(name: str, subject: Subject, modes: list[str]) -> tuple[list[dict[str, Any]], list[bool]]:
    """A row per mode (greedy first), and which greedy answers are correct."""
    answers = subject.answers(["greedy", *(mode for mode in modes if mode != "greedy")])
    greedy, rows, correct = answers["greedy"].tokens, [], []
    for mode, result in answers.items():
        results, right = subject.measure(mode, result)
        correct = right if mode == "greedy" else correct
        same = sum(a == b for a, b in zip(result.tokens, greedy, strict=True)) / len(greedy)
        rows.append({"model": name, "mode": mode, **results, "same_as_greedy": same})
    return rows, correct


def paired(a: list[bool], b: list[bool]) -> dict[str, float]:
    """Mean of a - b over the same questions, in points, with its 95 % interval."""
    differences = [100.0 * (x - y) for x, y in zip(a, b, strict=True)]
    mean = sum(differences) / len(differences)
    spread = math.sqrt(sum((d - mean) ** 2 for d in differences) / max(1, len(differences) - 1) / len(differences))
    return {"difference": mean, "low": mean - 1.96 * spread, "high": mean + 1.96 * spread}


def accuracy_under_parallelism(rows: Sequence[Mapping[str, Any]], best: float) -> float:
    """AUP of a model's modes, in % times tokens per forward (d3LLM, arXiv 2601.07568, section on AUP).

    `rows` have `accuracy` y (0 to 1) and `tokens_per_forward` r; `best` is the highest accuracy of any model, y_max.
    With the modes in order of r, those of at least y_1 - 5 points: r_1 y_1 + sum of (r_i - r_(i-1)) times the mean of
    y W(y) at both, where W(y) = min(exp(-3 (1 - y / y_max)), 1) and y is in %.
    """
    points = sorted((row["tokens_per_forward"], 100 * row["accuracy"]) for row in rows)
    first = points[0][1]
    points = [(r, y, y * min(math.exp(-AUP_ALPHA * (1 - y / (100 * best))), 1.0))
              for r, y in points if y >= first - AUP_WORST]  # fmt: skip
    area = points[0][0] * first
    for (r, _, weighted), (next_r, _, next_weighted) in zip(points, points[1:], strict=False):
        area += (next_r - r) * (weighted + next_weighted) / 2
    return area


def main(argv: list[str] | None = None) -> None:
    """Evaluate one model and write its rows."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True, help="NAME=DIR")
    parser.add_argument("--questions", type=Path, required=True)
    parser.add_argument("--limit", type=int, help="questions; the first ones")
    parser.add_argument("--block", type=int, required=True)
    parser.add_argument("--modes", nargs="+", choices=MODES, default=list(MODES))
    parser.add_argument("--max-new-tokens", type=int, default=LIMIT)
    parser.add_argument("--text-answers", action="store_true", help="answers are graded as recipe.spd does")
    parser.add_argument("--batch", type=int, default=100)
    parser.add_argument("--timed", type=int, default=0, help="nothing but tokens per second, of so many questions")
    parser.add_argument("--out", type=output_file, required=True)
    args = parser.parse_args(argv)
    torch.set_num_threads(1 if args.timed else len(os.sched_getaffinity(0)))
    name, _, directory = args.model.partition("=")
    questions = pd.read_parquet(args.questions)[: args.limit]
    subject = Subject(Path(directory), questions, args.block, args.batch, args.max_new_tokens, args.text_answers)
    if args.timed:
        args.out.write_text(json.dumps({mode: subject.speed(mode, args.timed) for mode in args.modes}, indent=1))
        return
    rows, correct = evaluate(name, subject, args.modes)
    args.out.write_text(json.dumps({"questions": len(questions), "rows": rows, "correct": correct}, indent=1))


if __name__ == "__main__":
    main()
