"""The question sets of the demo: tasks of reasoning-gym, and the answers that come with them."""

import random
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import cycle, islice
from pathlib import Path
from types import MappingProxyType
from typing import Any

from examples.pretrained.questions import TRAIN, VALIDATION, Task
from examples.pretrained.reward import verifier
from recipe.spd.rollout.answers import is_correct
from verl.utils.jsonl import read_objects

INSTRUCTION = "Answer briefly."
# The chat template's own system message has as many tokens as a short question.
SYSTEM = "You answer questions."
TEST = 7_000_000  # examples.pretrained.questions: seeds a million apart share no item
SEEDS = {"train": TRAIN, "val": VALIDATION, "test": TEST}
GSM8K, GSM8K_VALIDATION = "gsm8k", 1000  # a task from files; questions of its training file that validate
LIMIT, LIMIT_GSM8K = 96, 256  # tokens of an answer; with GSM8K

# Names decide the answer of needle_haystack, words that of family_relationships, digits that of gsm_symbolic.
TASKS = {
    "gsm_symbolic": Task("gsm_symbolic"),
    "needle_haystack": Task("needle_haystack", {"min_num_statements": 3, "max_num_statements": 3}),
    "family_relationships": Task("family_relationships", {"min_family_size": 3, "max_family_size": 3}),
}
# Tasks of successive questions; calculations need more training questions than the other two.
TURNS = dict.fromkeys(SEEDS, tuple(TASKS))
TURNS["train"] = ("gsm_symbolic", "needle_haystack", "gsm_symbolic", "family_relationships", "gsm_symbolic")
ITEMS = 100_000  # at most, of a task and a split; also between the seeds of two sets
# Of gsm_symbolic's word problems, those with short texts and whole numbers up to LARGEST.
LARGEST, CHARACTERS = 20, 400
NUMBER = re.compile(r"\d+(?:[.,]\d+)?")


@dataclass(frozen=True)
class Asked:
    """A question of a task: `entry` is reasoning-gym's item, which its verifier reads.

    `worked` is the answer that came with the question: a calculation in words and numbers, or the bare answer in a
    sentence where the task has no other.
    """

    task: str
    question: str
    answer: str
    entry: dict[str, Any]
    worked: str

    def is_right(self, answer: str | None) -> bool:
        """What the verifier of the task says of a bare answer."""
        if self.task == GSM8K:
            return answer is not None and is_correct(f"The answer is {answer}", self.answer)
        return answer is not None and verifier(TASKS[self.task].dataset)(answer, self.entry) >= 1


def draw(
    counts: dict[str, int], seed: int = 0, gsm8k: Path | None = None, further: Mapping[str, int] = MappingProxyType({})
) -> dict[str, list[Asked]]:
    """Questions by split, of the tasks in turn; no text occurs twice, within or across the splits.

    Test questions are drawn first and training questions last, so that another number of the latter changes no others.
    `gsm8k`: folder with GSM8K's train.jsonl and test.jsonl, a further task. `further`: so many more questions of a
    split, which follow those of `counts` and are drawn after all of them.
    """
    seen: set[str] = set()
    streams = {split: _unseen(split, seed, gsm8k, seen) for split in ("test", "val", "train") if split in counts}
    drawn = {split: list(islice(stream, counts[split])) for split, stream in streams.items()}
    for split, count in further.items():
        drawn[split] += islice(streams[split], count)
    return drawn


def _unseen(split: str, seed: int, gsm8k: Path | None, seen: set[str]) -> Iterator[Asked]:
    sources, turns = {name: _of_gym(name, SEEDS[split] + ITEMS * seed) for name in TASKS}, TURNS[split]
    if gsm8k is not None:
        sources[GSM8K] = _of_gsm8k(gsm8k, split, seed)
        turns = (*turns, GSM8K)
    for name in cycle(turns):
        for asked in sources[name]:
            if asked.question not in seen:
                seen.add(asked.question)
                yield asked
                break
        else:
            raise ValueError(
                f"{name} has too few different questions: lower --questions (dllm.demo) or --counts (dllm.answers)"
            )


def _of_gym(name: str, seed: int) -> Iterator[Asked]:
    for item in TASKS[name].items(seed, ITEMS):
        question, answer = item["question"].strip(), str(item["answer"])
        worked = item["metadata"].get("answer_cot", "").rpartition("####")[0].strip()
        if worked and not _is_short(f"{question}\n{worked}"):
            continue
        yield Asked(name, question, answer, item, f"{worked}\nThe answer is {answer}.".strip())


def _is_short(text: str) -> bool:
    numbers = NUMBER.findall(text)
    return len(text) <= CHARACTERS and "%" not in text and all(n.isdigit() and int(n) <= LARGEST for n in numbers)


def _of_gsm8k(folder: Path, split: str, seed: int) -> Iterator[Asked]:
    """Validation questions are the last ones of the training file."""
    rows = [row for _, row in read_objects(folder / ("test.jsonl" if split == "test" else "train.jsonl"))]
    if split != "test":
        rows = rows[-GSM8K_VALIDATION:] if split == "val" else rows[:-GSM8K_VALIDATION]
    for row in random.Random(seed).sample(rows, len(rows)):
        worked, _, answer = row["answer"].partition("####")
        text = f"{re.sub(r'<<[^<>]*>>', '', worked).strip()}\nThe answer is {answer.strip()}."
        yield Asked(GSM8K, row["question"].strip(), answer.strip(), {}, text)


def messages(question: str) -> list[dict[str, str]]:
    """The conversation up to the answer of a question."""
    return [{"role": "system", "content": SYSTEM}, {"role": "user", "content": f"{question}\n{INSTRUCTION}"}]
