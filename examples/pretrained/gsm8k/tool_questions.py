"""GSM8K's questions for the agent loop tool_agent, with the tool of tools.yaml, which checks an answer.

    python -m examples.pretrained.gsm8k.tool_questions --gsm8k DIR [--out DIR]

writes train.parquet and test.parquet (the first 256 test questions) into --out. Two worked conversations before each
question call the tool: models of this size do not call a tool of which they only read the description.
"""

import argparse
import os
from functools import partial
from typing import Any

from examples.data_preprocess.gsm8k import convert
from examples.data_preprocess.local_files import save
from examples.demo_runner import ROOT
from examples.pretrained import fetch
from examples.pretrained.gsm8k.questions import VALIDATION_SIZE, WORKED_ENDING
from examples.pretrained.spd.labels import FEW_SHOT, read_gsm8k
from verl.data.rl_dataset import DatasetError
from verl.utils.fs import output_folder

TOOL = "check_answer"
SYSTEM = (
    "Solve the question in at most five short lines. Then call the function check_answer with your answer. If it is "
    "wrong, correct it and call the function again. End with '#### ' and the number."
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


def beginning() -> list[dict[str, Any]]:
    """The messages before a question: the system message and the worked conversations."""
    messages: list[dict[str, Any]] = [{"role": "system", "content": SYSTEM}]
    for example in read_gsm8k(FEW_SHOT):
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
    """Write the files."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    fetch.add_gsm8k(parser)
    parser.add_argument("--out", type=output_folder, default=str(ROOT / "outputs" / "pretrained" / "gsm8k_tool"))
    args = parser.parse_args(argv)
    gsm8k = fetch.gsm8k_folder(args.gsm8k)
    try:
        for split, size in (("train", None), ("test", VALIDATION_SIZE)):
            save(partial(asked, beginning()), gsm8k / f"{split}.jsonl", args.out, size)
    except DatasetError as error:
        raise SystemExit(str(error)) from error
    print(f"{os.path.relpath(args.out)}: train.parquet and test.parquet, with the tool {TOOL}")


if __name__ == "__main__":
    main()
