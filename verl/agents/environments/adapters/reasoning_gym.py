"""Tasks of reasoning-gym: generated questions, scored by the task's own `score_answer`."""

import functools
import re
from collections.abc import Iterator
from random import Random
from typing import Any

from loguru import logger

from verl.agents.environments.base import Ask, Environment, Library, Message, check_ranges, make_row

EXAMPLES_SEED = 3_000_000  # of worked examples
DRAWS = 2  # items drawn per validation question, so that enough different ones remain


class ReasoningGym(Environment):
    """Questions of one task, or of several by weight.

    Item i of seed s comes from Random(s + i), so that seeds that are close share items: the ranges of training,
    validation and worked examples must not overlap, and training leaves out questions that validation asks.
    """

    LIBRARY = Library("reasoning_gym", "reasoning-gym", "0.1.25")

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        settings = self.settings
        check_ranges(  # (first seed, number of seeds)
            settings, seed=(settings.seed, settings.size), val_seed=(settings.val_seed, DRAWS * settings.val_size),
            examples=(EXAMPLES_SEED, settings.examples),
        )  # fmt: skip
        # Caches of this instance: making a data set or an entry takes time.
        self.dataset = functools.cache(self._make_dataset)
        self.entry = functools.lru_cache(4096)(lambda task, seed, size, index: self.dataset(task, seed, size)[index])
        self.worked_examples = functools.cache(self._make_worked_examples)
        self.pattern = re.compile(settings.answer_pattern)
        self.system = settings.system_prompt
        if self.system is None:
            from reasoning_gym.utils import SYSTEM_PROMPTS

            self.system = SYSTEM_PROMPTS["default"]

    def _make_dataset(self, task: str, seed: int, size: int) -> Any:
        return self.library.create_dataset(task, seed=seed, size=size, **self.settings.parameters.get(task, {}))

    def _make_worked_examples(self, task: str) -> list[Message]:
        messages = []
        for index in range(self.settings.examples):
            entry = self.entry(task, EXAMPLES_SEED, self.settings.examples, index)
            question, answer = entry["question"].strip(), self.settings.answer_format.format(entry["answer"])
            messages += [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]
        return messages

    def _messages(self, task: str, question: str) -> list[Message]:
        system = [{"role": "system", "content": self.system}] if self.system else []
        return [*system, *self.worked_examples(task), {"role": "user", "content": question.strip()}]

    def _drawn(self, seed: int, size: int) -> Iterator[tuple[dict[str, Any], dict[str, Any]]]:
        """(item for `converse`, entry of reasoning-gym: question, answer and metadata) of each draw."""
        names, weights = zip(*self.settings.weights.items(), strict=True)
        for index in range(size):
            # Not Random(seed + index), of which the entry itself is drawn.
            (task,) = Random(f"{seed} {index}").choices(names, weights)
            yield {"task": task, "seed": seed, "size": size, "index": index}, self.entry(task, seed, size, index)

    async def rows(self, split: str, files: list[str]) -> list[dict[str, Any]]:
        settings = self.settings
        validation: dict[str, tuple] = {}  # question -> (item, entry); training leaves these questions out
        for item, entry in self._drawn(settings.val_seed, DRAWS * settings.val_size):
            validation.setdefault(entry["question"], (item, entry))
        if split == "val":
            chosen = list(validation.values())[: settings.val_size]
            if len(chosen) < settings.val_size:
                text = "data.environment.val_size={}: the tasks have only {} different questions in {} draws"
                logger.warning(text, settings.val_size, len(chosen), DRAWS * settings.val_size)
        else:
            drawn = self._drawn(settings.seed, settings.size)
            chosen = [(item, entry) for item, entry in drawn if entry["question"] not in validation]
            if left := settings.size - len(chosen):
                text = "data.environment.size={}: {} questions are left out, since they are drawn for validation too"
                logger.info(text, settings.size, left)
            if not chosen:
                raise ValueError(
                    f"data.environment.size={settings.size}: every question is drawn for validation too. Lower "
                    "data.environment.val_size, or change data.environment.params so that there are more questions."
                )
        rows = []
        for number, (item, entry) in enumerate(chosen):
            prompt = self._messages(item["task"], entry["question"])
            rows.append(make_row(item["task"], prompt, str(entry["answer"]), number, item, settings))
        return rows

    async def converse(self, item: dict[str, Any], ask: Ask) -> dict[str, Any]:
        """score: of the task; acc: 1.0 if it is 1; answered: whether an answer was given in the format."""
        task, seed, size = item["task"], item["seed"], item["size"]
        entry = self.entry(task, seed, size, item["index"])
        reply = await ask(self._messages(task, entry["question"]), None)
        answers = list(self.pattern.finditer((reply["content"] or "").strip()))
        score = float(self.dataset(task, seed, size).score_answer(answers[-1][1], entry)) if answers else 0.0
        return {"score": score, "acc": float(score >= 1.0), "answered": float(bool(answers))}
