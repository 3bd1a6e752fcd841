"""Ways to ask GSM8K's questions, and the questions in the RL data format.

    python -m examples.pretrained.gsm8k.questions --gsm8k DIR [--prompt NAME] [--out DIR]

writes train.parquet and test.parquet (the first 256 test questions) into --out.
"""

import argparse
import os
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from examples.data_preprocess.gsm8k import INSTRUCTION, convert
from examples.data_preprocess.local_files import save
from examples.demo_runner import ROOT
from examples.pretrained import fetch
from examples.pretrained.questions import conversation
from examples.pretrained.spd.labels import FEW_SHOT, SYSTEM, read_gsm8k
from verl.data.rl_dataset import DatasetError
from verl.utils.fs import output_folder

WORKED_ENDING = "The answer is "  # of the answers in FEW_SHOT, which end in one number and a full stop
VALIDATION_SIZE = 256
SIZES = {"train": None, "test": VALIDATION_SIZE}  # questions of each file, the first ones; None: all
MODEL = "qwen2.5-coder-0.5b"  # of examples.pretrained.fetch


@dataclass(frozen=True)
class Prompt:
    """How a question is asked, how long answers may be, and what the reward reads.

    Attributes:
        marker: text after which the reward reads the number.
        ending: last line of a worked answer, with {} for the number.
        limit: tokens of an answer.
        system: the system message; "": the chat template's own.
        instruction: follows the question.
        turns: number of worked answers, which are earlier turns of the conversation.
    """

    marker: str
    ending: str
    limit: int = 200
    system: str = ""
    instruction: str = ""
    turns: int = 2


#: By name; `instruction` is upstream's, and `brief` the prompt of examples.pretrained.spd.
CANDIDATES = {
    "instruction": Prompt("####", "#### {}", limit=320, instruction=INSTRUCTION, turns=0),
    "hashes": Prompt("####", "#### {}"),
    "answer_is": Prompt("The answer is", "The answer is {}."),
    "boxed": Prompt("\\boxed{", "The answer is \\boxed{{{}}}."),
    "brief": Prompt("The answer is", "The answer is {}.", system=SYSTEM),
}
CHOSEN = "answer_is"  # by selection.json


def messages(prompt: Prompt, question: str) -> list[dict[str, str]]:
    """The conversation up to the answer."""
    worked = []
    for row in read_gsm8k(FEW_SHOT)[: prompt.turns]:
        steps, _, number = row["answer"].rpartition(WORKED_ENDING)
        worked.append((row["question"], steps + prompt.ending.format(number.rstrip("."))))
    return conversation(prompt.system, worked, f"{question.strip()} {prompt.instruction}".rstrip())


def asked(prompt: Prompt, row: dict[str, Any], number: int, split: str) -> dict[str, Any]:
    """A row of GSM8K in the RL data format; ValueError where its answer does not end in '#### <number>'."""
    converted = convert(row, number, split)
    info = converted["extra_info"]
    return {**converted, "prompt": messages(prompt, info["question"]), "extra_info": {**info, "marker": prompt.marker}}


def write(gsm8k: Path, folder: Path, prompt: Prompt, sizes: Mapping[str, int | None] = SIZES) -> None:
    """FOLDER/SPLIT.parquet with the first rows of each split, all where its size is None. SystemExit where a row
    cannot be read."""
    for split, size in sizes.items():
        try:
            save(partial(asked, prompt), gsm8k / f"{split}.jsonl", folder, size)
        except DatasetError as error:
            raise SystemExit(str(error)) from error


def main(argv: list[str] | None = None) -> None:
    """Write the files."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    fetch.add_gsm8k(parser)
    parser.add_argument("--prompt", choices=CANDIDATES, default=CHOSEN, help="how questions are asked (docs/gsm8k.md)")
    parser.add_argument("--out", type=output_folder, default=str(ROOT / "outputs" / "pretrained" / "gsm8k"))
    args = parser.parse_args(argv)
    write(fetch.gsm8k_folder(args.gsm8k), args.out, CANDIDATES[args.prompt])
    print(f"{os.path.relpath(args.out)}: train.parquet and test.parquet, with the prompt {args.prompt}")


if __name__ == "__main__":
    main()
