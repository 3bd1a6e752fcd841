"""The question sets of the demo: tasks of reasoning-gym, with worked examples for few-shot prompts."""

import json
import random
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

from examples.pretrained.questions import SEED_STEP, TRAIN, VALIDATION, Task
from examples.pretrained.reward import verifier
from recipe.spd.rollout.answers import final_answer, is_correct
from verl.utils.jsonl import read_objects

INSTRUCTION = "Explain briefly and end with 'The answer is'."
# The chat template's own system message has as many tokens as a short question.
SYSTEM = "You answer questions."
TEST = 7_000_000  # examples.pretrained.questions: seeds a million apart share no item
SEEDS = {"train": TRAIN, "val": VALIDATION, "test": TEST}
HINT = "The right answer is {}. Explain briefly how to get it and end with 'The answer is'."
SHOTS = 3  # worked examples before a question, drawn from those of its task
WORKED = Path(__file__).with_name("worked.json")

GSM8K, GSM8K_VALIDATION = "gsm8k", 1000  # a task from files; questions of its training file that validate
LIMIT, LIMIT_GSM8K = 64, 256  # tokens of an answer; with GSM8K

# Names decide the answer of needle_haystack, words that of family_relationships, digits that of aiw.
TASKS = {
    "needle_haystack": Task("needle_haystack", {"min_num_statements": 3, "max_num_statements": 5}),
    "family_relationships": Task("family_relationships", {"min_family_size": 3, "max_family_size": 3}),
    "aiw": Task("aiw", {"task_type_weights": [1.0, 0.0, 0.0]}),  # siblings
}


@dataclass(frozen=True)
class Asked:
    """A question of a task: `entry` is reasoning-gym's item, which its verifier reads.

    `worked` is an answer with its explanation that came with the question; there is no other in reasoning-gym's tasks.
    """

    task: str
    question: str
    answer: str
    entry: dict[str, Any]
    worked: str | None = None

    def is_right(self, answer: str | None) -> bool:
        """What the verifier of the task says of a bare answer."""
        if self.task == GSM8K:
            return answer is not None and is_correct(f"The answer is {answer}", self.answer)
        return answer is not None and verifier(TASKS[self.task].dataset)(answer, self.entry) >= 1


def draw(
    counts: dict[str, int], tasks: tuple[str, ...], seed: int = 0, gsm8k: Path | None = None
) -> dict[str, list[Asked]]:  # fmt: skip
    """Questions by split, of the tasks in turn; no text occurs twice, within or across the splits.

    Test questions are drawn first and training questions last, so that another number of the latter changes no others.
    `gsm8k`: folder with GSM8K's train.jsonl and test.jsonl, a further task.
    """
    seen: set[str] = set()
    return {split: list(islice(_unseen(split, tasks, seed, gsm8k, seen), counts[split]))
            for split in ("test", "val", "train") if split in counts}


def _unseen(split: str, tasks: tuple[str, ...], seed: int, gsm8k: Path | None, seen: set[str]) -> Iterator[Asked]:
    sources = {name: _of_gym(name, SEEDS[split] + SEED_STEP * seed) for name in tasks}
    if gsm8k is not None:
        sources[GSM8K] = _of_gsm8k(gsm8k, split, seed)
    while True:
        for name, items in sources.items():
            for asked in items:
                if asked.question not in seen:
                    seen.add(asked.question)
                    yield asked
                    break
            else:
                raise ValueError(f"{name} has too few different questions; ask for fewer, or drop the task")


def _of_gym(name: str, seed: int) -> Iterator[Asked]:
    for item in TASKS[name].items(seed, SEED_STEP):
        yield Asked(name, item["question"].strip(), str(item["answer"]), item)


def _of_gsm8k(folder: Path, split: str, seed: int) -> Iterator[Asked]:
    """Validation questions are the last ones of the training file."""
    rows = [row for _, row in read_objects(folder / ("test.jsonl" if split == "test" else "train.jsonl"))]
    if split != "test":
        rows = rows[-GSM8K_VALIDATION:] if split == "val" else rows[:-GSM8K_VALIDATION]
    for row in random.Random(seed).sample(rows, len(rows)):
        worked, _, answer = row["answer"].partition("####")
        text = f"{re.sub(r'<<[^<>]*>>', '', worked).strip()}\nThe answer is {answer.strip()}."
        yield Asked(GSM8K, row["question"].strip(), answer.strip(), {}, text)


def worked_examples(task: str, number: int) -> list[tuple[str, str]]:
    """SHOTS of the worked examples of a task as (question, answer), another selection for each number."""
    return random.Random(number).sample(json.loads(WORKED.read_text())[task], SHOTS)


def messages(question: str, instruction: str = INSTRUCTION, worked: Sequence[tuple[str, str]] = ()) -> list[dict]:
    """The conversation up to the answer of a question; `worked`: earlier turns, their questions complete."""
    turns = [("system", SYSTEM)]
    for text, answer in worked:
        turns += [("user", text), ("assistant", answer)]
    turns.append(("user", f"{question}\n{instruction}"))
    return [{"role": role, "content": content} for role, content in turns]


def hinted(asked: Asked, number: int) -> list[dict]:
    """A few-shot conversation that names the right answer and asks for its explanation.

    The model alone explains few answers; the right one among its own words is what it then learns to give without it.
    """
    worked = [(f"{question}\n{HINT.format(final_answer(answer))}", answer)
              for question, answer in worked_examples(asked.task, number)]  # fmt: skip
    return messages(asked.question, HINT.format(asked.answer), worked)
