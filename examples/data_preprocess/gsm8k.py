"""GSM8K's format to verl's: python -m examples.data_preprocess.gsm8k --local_dataset_path DIR --local_save_dir DIR."""

import re
from typing import Any

from examples.data_preprocess.local_files import field, run

DATA_SOURCE = "openai/gsm8k"
INSTRUCTION = 'Let\'s think step by step and output the final answer after "####".'
ANSWER = re.compile(r"####\s*(-?[0-9.,]*[0-9])\s*$")


def convert(row: dict[str, Any], number: int, split: str) -> dict[str, Any]:
    """A row with `question` and `answer`; ValueError where the answer does not end in '#### <number>'."""
    question, answer = field(row, "question"), field(row, "answer")
    match = ANSWER.search(answer)
    if match is None:
        raise ValueError(f"the answer does not end in '#### <number>': {answer[-60:]!r}")
    return {
        "data_source": DATA_SOURCE,
        "prompt": [{"role": "user", "content": f"{question} {INSTRUCTION}"}],
        "ability": "math",
        "reward_model": {"style": "rule", "ground_truth": match.group(1).replace(",", "")},
        "extra_info": {"split": split, "index": number, "answer": answer, "question": question},
    }


if __name__ == "__main__":
    run(convert, __doc__, "~/data/gsm8k")
