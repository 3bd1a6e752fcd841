"""GRPO of SmolLM2-135M-Instruct: the demo on three seeds, its steps against TRL's, and the log-probs of rollout and
trainer. Steps are those of the demo with 8 samples of each of 8 prompts.
"""

import time
from pathlib import Path
from typing import Any

import torch

from benchmarks.against_trl import ACTOR, ROLLOUT, Case
from benchmarks.harness import Row, mean_row, row, run_seeds, say
from examples.demo_runner import ROOT
from examples.pretrained import demo, fetch, questions
from verl.utils.accelerator import default_dtype

OUT = ROOT / "outputs" / "benchmarks" / "pretrained"
REWARD = """from examples.pretrained.reward import compute_score as score


def compute_score(data_source, solution_str, ground_truth, extra_info=None):
    return score({source!r}, solution_str, "", {{"entry": ground_truth}})["score"]
"""


def case_of(model: Path) -> Case:
    """The steps of the demo's command."""

    def command(folder: Path, count: int, settings: tuple[str, ...]) -> list[str]:
        return demo.training_command(model, demo.from_files(OUT / "data"), folder, count, 0, *settings, lr=0.0)

    return Case(
        "grpo", OUT, prompts=8, samples=8, limit=32, command=command, trl_rows=(16, 32),
        reward=REWARD.format(source=questions.DATA_SOURCE), truth=lambda row: row["extra_info"]["entry"],
    )  # fmt: skip


def gain() -> list[Row]:
    """The demo on three seeds."""
    return gained(run_seeds("examples.pretrained.demo", OUT / "demo"))


def gained(result: dict[str, Any]) -> list[Row]:
    """Rows of the demo's result.json."""
    *trained, control = (list(accuracies.values()) for accuracies in result["accuracy"].values())
    return [
        mean_row("grpo_gain_points", result["gains"], f"points on {questions.VALIDATION_SIZE} held-out items, mean"),
        row("grpo_gain_start", [values[0] for values in trained], "% right"),
        row("grpo_gain_end", [values[-1] for values in trained], "% right"),
        row("grpo_gain_control", [abs(control[-1] - control[0])], "points that accuracy moves at learning rate 0"),
        Row("grpo_gain_seconds", max(result["seconds"]), "s, longest run", min(result["seconds"]),
            max(result["seconds"]), len(result["seconds"])),
    ]  # fmt: skip


def mismatch(case: Case) -> list[Row]:
    """Rollout against trainer at the first step, in both types."""
    rows = []
    for dtype in ("bfloat16", "float32"):
        settings = (f"{ROLLOUT}.dtype={dtype}", f"{ACTOR}.fsdp_config.dtype={dtype}",
                    f"{ROLLOUT}.calculate_log_probs=true")  # fmt: skip
        first = case.steps(f"first_{dtype}", settings, count=1)[0]
        for name, key in (("kl", "rollout_corr/kl"), ("pearson", "training/rollout_actor_probs_pearson_corr")):
            rows.append(row(f"first_step_{name}_{dtype}", [first[key]], "rollout and trainer, vLLM"))
    return rows


def run() -> list[Row]:
    """All rows."""
    OUT.mkdir(parents=True, exist_ok=True)
    model = fetch.main([])
    questions.write(OUT / "data", seed=0)
    begun = time.monotonic()
    case = case_of(model)
    rows = mismatch(case) + case.in_turn(model)
    say(f"{torch.get_num_threads()} threads, {default_dtype('cpu')} by default, {time.monotonic() - begun:.0f} s")
    return gain() + rows
