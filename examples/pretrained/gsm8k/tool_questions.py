"""GSM8K's questions for the agent loop tool_agent, with the tool of tools.yaml, which checks an answer.

    python -m examples.pretrained.gsm8k.tool_questions --gsm8k DIR --out DIR [--worked N]

Small models do not call tools in the format of their chat template when they read its description only. N worked
conversations before each question (default 2), in which the tool is called, show them the format.
"""

import argparse
import sys
from functools import partial
from pathlib import Path
from typing import Any

from examples.data_preprocess.gsm8k import convert
from examples.data_preprocess.local_files import save
from examples.pretrained import fetch
from examples.pretrained.gsm8k.questions import WORKED_ENDING
from examples.pretrained.spd.labels import FEW_SHOT, read_gsm8k
from verl.data.rl_dataset import DatasetError
from verl.utils.fs import output_folder

TOOL = "check_answer"
SYSTEM = (
    "Solve the question in at most five short lines. Then call the tool check_answer with your answer. If it is "
    "wrong, correct it and call the tool again. End with '#### ' and the number."
)


def worked_conversation(question: str, steps: str, number: str) -> list[dict[str, Any]]:
    """A question, its solution with a call of the tool, the tool's response, and the final answer."""
    call = {"id": "call00000", "type": "function", "function": {"name": TOOL, "arguments": {"answer": number}}}
    return [
        {"role": "user", "content": question},
        {"role": "assistant", "content": steps, "tool_calls": [call]},
        {"role": "tool", "content": f"Current parsed answer='{number}' reward=1.0"},
        {"role": "assistant", "content": f"#### {number}"},
    ]


def beginning(worked: int) -> list[dict[str, Any]]:
    """The messages before a question: the system message, and that many worked conversations."""
    messages: list[dict[str, Any]] = [{"role": "system", "content": SYSTEM}]
    for example in read_gsm8k(FEW_SHOT)[:worked]:
        steps, _, answer = example["answer"].rpartition(WORKED_ENDING)
        messages += worked_conversation(example["question"], steps.strip(), answer.rstrip("."))
    return messages


def asked(before: list[dict[str, Any]], row: dict[str, Any], number: int, split: str) -> dict[str, Any]:
    """A row of GSM8K in the RL data format, with the right answer for the tool; ValueError as of `convert`."""
    converted = convert(row, number, split)
    messages = [*before, {"role": "user", "content": converted["extra_info"]["question"]}]
    create = {"create_kwargs": {"ground_truth": converted["reward_model"]["ground_truth"]}}
    extra = {**converted["extra_info"], "need_tools_kwargs": True, "tools_kwargs": {TOOL: create}}
    return {**converted, "agent_name": "tool_agent", "prompt": messages, "extra_info": extra}


def main(argv: list[str] | None = None) -> None:
    """Write OUT/train.parquet and OUT/test.parquet."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    fetch.add_gsm8k(parser)
    parser.add_argument("--out", type=output_folder, required=True)
    parser.add_argument("--worked", type=int, default=2, choices=range(3), help="worked conversations")
    args = parser.parse_args(argv)
    try:
        for file in save(partial(asked, beginning(args.worked)), fetch.gsm8k_folder(args.gsm8k), Path(args.out)):
            print(file)
    except (DatasetError, OSError) as error:
        sys.exit(str(error))


if __name__ == "__main__":
    main()
