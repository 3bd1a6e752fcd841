"""Ways to ask GSM8K's questions, and the questions in the RL data format.

    python -m examples.pretrained.gsm8k.questions --gsm8k DIR [--prompt NAME | --tool] [--test N] [--out DIR]

writes train.parquet and test.parquet (the first N test questions, 256 by default) into --out. With --tool the rows are
for the agent loop tool_agent, with the tool of tools.yaml, which checks an answer; the worked answers before a question
call it, since models of this size do not call a tool of which they only read the description.
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
from examples.demo_runner import ROOT, json_rows
from examples.pretrained import fetch
from examples.pretrained.questions import conversation
from examples.pretrained.spd.labels import FEW_SHOT, SYSTEM
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


TOOL = "check_answer"  # of tools.yaml
TOOL_SYSTEM = (
    "Solve the question in at most five short lines. Then call the function check_answer with your answer. If it is "
    "wrong, correct it and call the function again. End with '#### ' and the number."
)


def worked_answers() -> list[tuple[str, str, str]]:
    """(question, steps of its answer, number) of the worked examples."""
    parts = ((row["question"], *row["answer"].rpartition(WORKED_ENDING)) for row in json_rows(FEW_SHOT))
    return [(question, steps, number.rstrip(".")) for question, steps, _, number in parts]


def messages(prompt: Prompt, question: str) -> list[dict[str, str]]:
    """The conversation up to the answer."""
    examples = worked_answers()[: prompt.turns]
    worked = [(asked, steps + prompt.ending.format(number)) for asked, steps, number in examples]
    return conversation(prompt.system, worked, f"{question.strip()} {prompt.instruction}".rstrip())


def tool_messages(question: str) -> list[dict[str, Any]]:
    """The conversation up to the answer, in which the worked answers call the tool."""
    turns: list[dict[str, Any]] = [{"role": "system", "content": TOOL_SYSTEM}]
    for asked, steps, number in worked_answers():
        call = {"id": "call00000", "type": "function", "function": {"name": TOOL, "arguments": {"answer": number}}}
        turns += [
            {"role": "user", "content": asked},
            {"role": "assistant", "content": steps.strip(), "tool_calls": [call]},
            {"role": "tool", "content": f"Current parsed answer='{number}' reward=1.0"},
            {"role": "assistant", "content": f"#### {number}"},
        ]
    return [*turns, {"role": "user", "content": question.strip()}]


def asked(prompt: Prompt | None, row: dict[str, Any], number: int, split: str) -> dict[str, Any]:
    """A row of GSM8K in the RL data format, without `prompt` for the tool, which gets the right answer.

    ValueError where the row's answer does not end in '#### <number>'.
    """
    converted = convert(row, number, split)
    info = converted["extra_info"]
    if prompt is None:
        tools = {TOOL: {"create_kwargs": {"ground_truth": converted["reward_model"]["ground_truth"]}}}
        info |= {"need_tools_kwargs": True, "tools_kwargs": tools}
        return {**converted, "agent_name": "tool_agent", "prompt": tool_messages(info["question"])}
    return {**converted, "prompt": messages(prompt, info["question"]), "extra_info": {**info, "marker": prompt.marker}}


def write(gsm8k: Path, folder: Path, prompt: Prompt | None, sizes: Mapping[str, int | None] = SIZES) -> None:
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
    parser.add_argument("--tool", action="store_true", help="for the agent loop tool_agent; --prompt is not read then")
    parser.add_argument("--test", type=int, default=VALIDATION_SIZE, metavar="N",
                        help="questions of test.parquet (default: %(default)s)")  # fmt: skip
    parser.add_argument("--out", type=output_folder, default=str(ROOT / "outputs" / "pretrained" / "gsm8k"),
                        help="folder of both files (default: outputs/pretrained/gsm8k)")  # fmt: skip
    args = parser.parse_args(argv)
    prompt = None if args.tool else CANDIDATES[args.prompt]
    write(fetch.gsm8k_folder(args.gsm8k), args.out, prompt, {**SIZES, "test": args.test})
    how = f"the tool {TOOL}" if args.tool else f"the prompt {args.prompt}"
    print(f"{os.path.relpath(args.out)}: train.parquet and test.parquet, with {how}")


if __name__ == "__main__":
    main()
