"""GRPO of Qwen2.5-Coder-0.5B-Instruct on GSM8K by the command of `make demo-gsm8k`, three seeds."""

from collections.abc import Mapping
from typing import Any

from benchmarks.harness import Row, mean_row, row, run_seeds
from examples.demo_runner import ROOT
from examples.pretrained.gsm8k.questions import VALIDATION_SIZE
from verl.utils.accelerator import default_dtype, get_device_name

OUT = ROOT / "outputs" / "benchmarks" / "gsm8k"


def run() -> list[Row]:
    """The command, whose runs are kept, with GSM8K in its default folder, and the rows of what it measured."""
    return measured(run_seeds("examples.pretrained.gsm8k.demo", OUT))


def measured(result: Mapping[str, Any]) -> list[Row]:
    """Rows of the demo's result.json."""
    rows = []
    for name, gain, how in (("acc", "gsm8k_gain_points", "the reward"),
                            ("last_number", "gsm8k_gain_last_number", "the last number")):  # fmt: skip
        *trained, _ = (list(values.values()) for values in result["accuracy"][name].values())
        unit = f"points by {how} on {VALIDATION_SIZE} test questions, mean, {default_dtype(get_device_name())}"
        rows += [
            mean_row(gain, result["gains"][name], unit),
            mean_row(f"gsm8k_start_{name}", [values[0] for values in trained], f"% right by {how}"),
            mean_row(f"gsm8k_end_{name}", [values[-1] for values in trained], f"% right by {how}"),
        ]
    *steps, _ = result["step_seconds"].values()
    return [
        *rows,
        row("gsm8k_gain_control", [max(map(abs, result["control"].values()))], "points that an accuracy moves at "
            "learning rate 0"),
        row("gsm8k_step_seconds", steps, "s of a step, median of the seeds' medians"),
        Row("gsm8k_seconds", max(result["seconds"]), "s, longest run", min(result["seconds"]), max(result["seconds"]),
            len(result["seconds"])),
    ]  # fmt: skip
