"""MATH's format to verl's: examples.data_preprocess.math_dataset --local_dataset_path D --local_save_dir E"""

from typing import Any

from examples.data_preprocess.local_files import field, run

DATA_SOURCE = "DigitalLearningGmbH/MATH-lighteval"
INSTRUCTION = "Let's think step by step and output the final answer within \\boxed{}."


def last_boxed(text: str) -> str:
    """The content of the last \\boxed{...} (or \\fbox{...}) of a text, braces matched; ValueError without one."""
    start = max(text.rfind("\\boxed{"), text.rfind("\\fbox{"))
    if start < 0:
        raise ValueError(f"the solution holds no \\boxed{{...}}: {text[-60:]!r}")
    depth, begin = 0, text.index("{", start)
    for position in range(begin, len(text)):
        depth += {"{": 1, "}": -1}.get(text[position], 0)
        if depth == 0:
            return text[begin + 1 : position]
    raise ValueError(f"the braces of \\boxed do not close: {text[start : start + 60]!r}")


def convert(row: dict[str, Any], number: int, split: str) -> dict[str, Any]:
    """A row with `problem` and `solution`."""
    return {
        "data_source": DATA_SOURCE,
        "prompt": [{"role": "user", "content": f"{field(row, 'problem')} {INSTRUCTION}"}],
        "ability": "math",
        "reward_model": {"style": "rule", "ground_truth": last_boxed(field(row, "solution"))},
        "extra_info": {"split": split, "index": number},
    }


if __name__ == "__main__":
    run(convert, __doc__, "~/data/math")
