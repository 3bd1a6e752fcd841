"""Rollouts with drafts, from the result of `make demo-refine-rl`, which runs first if it has not been run."""

import json
import os
import subprocess
import sys
from pathlib import Path
from statistics import mean

from benchmarks import lossless
from benchmarks.harness import Row, ratios, row, say
from examples.demo_runner import ROOT
from examples.refine_rl_arithmetic.results import EDGES, WALL, batch_ratio, forwards_ratio, values


def run() -> list[Row]:
    """Forwards: a value per seed; times: a value per repetition."""
    out = Path(os.environ.get("REFINE_RL", ROOT / "outputs" / "refine_rl"))
    if not (out / "result.json").exists():
        demo = [sys.executable, "-m", "examples.refine_rl_arithmetic.demo", "--out", str(out)]
        subprocess.run(demo, cwd=ROOT, check=True)
    say(f"from {out / 'result.json'}")
    result = json.loads((out / "result.json").read_text())
    runs, generation = result["runs"], result["generation"]
    rows = []
    for edge, steps in EDGES.items():
        for name, ratio in (("refine_forwards_ratio", forwards_ratio), ("refine_batch_forwards_ratio", batch_ratio)):
            rows.append(row(f"{name}_{edge}", [ratio(run, steps) for run in runs["refine_all"]],
                            "times fewer forwards than token by token"))  # fmt: skip
    for name in filter("plain".__ne__, runs):
        tokens = [mean(values(run, "tokens_per_forward", EDGES["end"])) for run in runs[name]]
        rows.append(row(f"tokens_per_forward_end_{name}", tokens, "tokens per forward"))
    for batch in WALL:
        plain = generation["hf"][batch]["seconds"]
        rows.append(row(f"refine_wall_{batch}", ratios(plain, generation["refine"][batch]["seconds"]),
                        "times the speed of rollout hf"))  # fmt: skip
        for rollout, cells in generation.items():
            name, cell = f"{rollout.replace(', ', '_')}_{batch}", cells[batch]
            rows.append(row(f"tokens_per_second_{name}", [cell["tokens"] / s for s in cell["seconds"]], "tokens / s"))
            if counted := cell.get("rollout/tokens_per_forward"):
                rows.append(row(f"tokens_per_forward_{name}", [counted], "tokens per forward"))
    same = [cells[batch]["same"] for rollout, cells in generation.items() if "refine" in rollout for batch in WALL]
    rows.append(row("refine_same_samples", [min(same)], "share of the answers that equal those of rollout hf, least"))
    leading = [steps for steps, _ in result["same_steps"]]
    rows.append(row("refine_same_steps", leading, "leading steps of GRPO with the same samples"))
    accuracy = values(result["students"]["opd"], "accuracy")
    rows.append(row("opd_gain_points", [100 * (accuracy[-1] - accuracy[0])], "points over the student's start"))
    return rows + lossless.run()
