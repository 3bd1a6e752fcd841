"""GRPO of Qwen2.5-Coder-0.5B-Instruct on GSM8K: a step against TRL's and against its bare parts, and the command of
`make demo-gsm8k` on three seeds.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from benchmarks.against_trl import Case
from benchmarks.harness import Row, mean_row, row, run_seeds
from examples.demo_runner import ROOT
from examples.pretrained import fetch
from examples.pretrained.demo import training_command
from examples.pretrained.gsm8k import demo
from examples.pretrained.gsm8k.questions import CANDIDATES, CHOSEN, MODEL, VALIDATION_SIZE, write
from verl.utils.accelerator import default_dtype, get_device_name

OUT = ROOT / "outputs" / "benchmarks" / "gsm8k"
PROMPT = CANDIDATES[CHOSEN]
REWARD = """from examples.pretrained.gsm8k.reward import compute_score as score


def compute_score(data_source, solution_str, ground_truth, extra_info=None):
    return score(data_source, solution_str, ground_truth, {{"marker": {marker!r}}})["score"]
"""


def run() -> list[Row]:
    """The steps, then the command, whose runs are kept, with GSM8K in its default folder."""
    return steps() + measured(run_seeds("examples.pretrained.gsm8k.demo", OUT))


def steps() -> list[Row]:
    """Steps of the demo's command with 8 samples of each of 8 prompts."""
    out, model = OUT / "steps", fetch.model_folder(None, name=MODEL)
    out.mkdir(parents=True, exist_ok=True)
    write(fetch.gsm8k_folder(ROOT / "outputs" / "gsm8k"), out / "data", PROMPT)
    more = demo.settings(PROMPT, lora=0)

    def command(folder: Path, count: int, settings: tuple[str, ...]) -> list[str]:
        return training_command(model, demo.source(out / "data"), folder, count, 0, *more, *settings, lr=0.0)

    case = Case(
        "gsm8k", out, prompts=8, samples=8, limit=PROMPT.limit, command=command, trl_rows=(8, 16),
        reward=REWARD.format(marker=PROMPT.marker), truth=lambda row: row["reward_model"]["ground_truth"],
        temperature=demo.TEMPERATURE,
    )  # fmt: skip
    return case.in_turn(model) + case.over_parts(model)


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
