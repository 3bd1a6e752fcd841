"""Questions of reasoning-gym as chat messages, with worked examples, in the RL data format.

    python -m examples.pretrained.questions [--out outputs/pretrained/data] [--seed 0]

Writes OUT/train.parquet and OUT/val.parquet.
"""

import argparse
import json
import os
import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import Any

import pandas as pd

from examples.demo_runner import ROOT
from verl.utils.fs import output_folder

# Item i of seed s is drawn from Random(s + i): these stay apart as long as no set has more than a million items.
TRAIN, EXAMPLES, VALIDATION = 1_000_000, 3_000_000, 5_000_000
SEED_STEP = 10_000  # between the training sets of two seeds
ANSWER = re.compile(r"(?:^|\n)Answer: *(\S.*?) *$")
ASKED = "Reply with one line: 'Answer: ' and the result."


@dataclass(frozen=True)
class Prompt:
    """How a question is asked: the system message ("": the chat template's own), and the number of worked examples,
    which are earlier turns of the conversation."""

    system: str = ASKED
    examples: int = 0


@dataclass(frozen=True)
class Task:
    """A dataset of reasoning-gym: its name and the parameters that differ from its defaults."""

    dataset: str
    parameters: dict[str, Any] = field(default_factory=dict)

    def items(self, seed: int, size: int) -> Any:
        """The first `size` items that are drawn from `seed`; SystemExit without the package."""
        try:
            import reasoning_gym
        except ImportError as error:
            raise SystemExit(f"{error}: install requirements/pretrained.txt, as make demo-pretrained does") from error
        return reasoning_gym.create_dataset(self.dataset, seed=seed, size=size, **self.parameters)


def messages(task: Task, prompt: Prompt, question: str) -> list[dict[str, str]]:
    """The conversation up to the answer."""
    worked = [(item["question"].strip(), f"Answer: {item['answer']}")
              for item in islice(task.items(EXAMPLES, prompt.examples + 1), prompt.examples)]  # fmt: skip
    return conversation(prompt.system, worked, question.strip())


def conversation(system: str, worked: Sequence[tuple[str, str]], question: str) -> list[dict[str, str]]:
    """Messages: the system message unless it is "", worked questions with their answers as turns, the question."""
    turns = [turn for pair in worked for turn in zip(("user", "assistant"), pair, strict=True)]
    said = [*([("system", system)] if system else []), *turns, ("user", question)]
    return [{"role": role, "content": text} for role, text in said]


def answer_of(text: str) -> str | None:
    """What follows `Answer: ` in the last line, which must begin so."""
    match = ANSWER.search(text.strip())
    return match and match[1]


TASK, PROMPT = Task("chain_sum", {"max_terms": 2, "max_digits": 2}), Prompt(examples=2)
DATA_SOURCE = TASK.dataset
TRAIN_SIZE, VALIDATION_SIZE = 2000, 256


def write(folder: Path, seed: int, train: int = TRAIN_SIZE, validation: int = VALIDATION_SIZE) -> None:
    """train.parquet of a seed, and val.parquet of different questions, none of which is in train, for all seeds."""
    folder.mkdir(parents=True, exist_ok=True)
    asked = {item["question"]: item for item in TASK.items(VALIDATION, 2 * validation)}
    held_out = list(asked.values())[:validation]
    drawn = [item for item in TASK.items(TRAIN + SEED_STEP * seed, train) if item["question"] not in asked]
    for split, items in (("train", drawn), ("val", held_out)):
        rows = [
            {"data_source": DATA_SOURCE, "prompt": messages(TASK, PROMPT, item["question"]),
             "reward_model": {"style": "rule", "ground_truth": str(item["answer"])},
             "extra_info": {"index": i, "entry": json.dumps(item, default=str)}}
            for i, item in enumerate(items)
        ]  # fmt: skip
        pd.DataFrame(rows).to_parquet(folder / f"{split}.parquet")


def main(argv: list[str] | None = None) -> None:
    """Write both files."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=output_folder, default=str(ROOT / "outputs" / "pretrained" / "data"))
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args(argv)
    write(args.out, args.seed)
    sizes = [len(pd.read_parquet(args.out / f"{split}.parquet")) for split in ("train", "val")]
    print(f"{os.path.relpath(args.out)}: {sizes[0]} questions to train on, {sizes[1]} others to validate")


if __name__ == "__main__":
    main()
