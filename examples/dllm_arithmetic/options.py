"""Patterns, noise token, rounds and weights of iterative refinement, each trained from the same base.

    python -m examples.dllm_arithmetic.options [--seeds 0 1 2] [--options packed iid ...] [--steps 1800] [--out DIR]

Two trainings run at a time, one thread each; existing results are reused. Ends with a table of means over seeds
and OUT/options.json. The plain SFT twin is among the options; `--steps` changes its steps by the same factor.
"""

import argparse
import json
import os
import sys
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from rich.table import Table

from examples.demo_runner import ROOT, PhaseFailed, console, run_logged
from examples.dllm_arithmetic import demo
from verl.utils.fs import output_folder

OWN = [
    "iterative.self_generate.enable=true", "iterative.self_generate.max_prompts=4000",
    "iterative.self_generate.max_new_tokens=128", "iterative.self_generate.keep_ground_truth=true",
    "iterative.self_generate.ground_truth_key=answer",
    "iterative.self_generate.reward_function.path=examples/dllm_arithmetic/corpus.py",
]  # fmt: skip
# Settings in addition to the demo's; "twin" is plain SFT.
OPTIONS: dict[str, list[str]] = {
    "packed": [],
    "packed, K 1": ["iterative.num_iterations=1"],
    "packed, K 3": ["iterative.num_iterations=3"],
    "packed, AR 0": ["iterative.ar_loss_weight=0"],
    "packed, AR 4": ["iterative.ar_loss_weight=4"],
    "packed, not aligned": ["iterative.aligned_windows=0"],
    "packed, mask": ["iterative.noise_token=mask"],
    "packed, own answers": OWN,
    "iid": ["iterative.noise_pattern=iid", "iterative.ar_loss_weight=0"],
    "iid, AR 2": ["iterative.noise_pattern=iid"],
    "suffix, AR 2": ["iterative.noise_pattern=suffix"],
    "block, AR 2": ["iterative.noise_pattern=block"],
    "trajectory, AR 2": ["iterative.noise_pattern=trajectory"],
    "twin": [],
}
MODES = ("greedy", "refine 1", "slide", "verify")
METRICS = ("accuracy", "tokens_per_forward", "same_as_greedy")


def train_and_evaluate(option: str, seed: int, steps: int, out: Path) -> list[dict[str, Any]]:
    """Train and evaluate one option from the seed's base; its rows."""
    base, run = out / f"base-seed{seed}", out / f"{folder_name(option)}-{steps}-seed{seed}"
    rows = run / "evaluation.json"
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    if not rows.exists():
        if option == "twin":
            command = demo.twin_command(base / "model", base, run, demo.TWIN_STEPS * steps // demo.STEPS, seed)
        else:
            command = demo.refine_command(base / "model", base, run, steps, seed, *OPTIONS[option])
        run_logged(command, run.with_suffix(".log"), env=environment)
        arguments = ["--model", f"{option}={demo.trained_model(run)}", "--questions", str(base / "test.parquet"),
                     "--block", str(demo.BLOCK), "--timed", "0", "--modes", *MODES, "--out", str(rows)]  # fmt: skip
        run_logged([sys.executable, "-m", "examples.dllm_arithmetic.evaluate", *arguments], run / "evaluate.log",
                   env=environment)  # fmt: skip
        console.print(f"trained and evaluated: {option}, seed {seed}")
    return json.loads(rows.read_text())["rows"]


def folder_name(option: str) -> str:
    """An option's name must not contain "=": hydra accepts none in a path, and evaluate ends a model's name with it."""
    return option.replace(", ", "_").replace(" ", "-")


def summarize(rows: list[dict[str, Any]]) -> dict[str, dict[str, float]]:
    """Mean over seeds of each metric, by mode."""
    means = {}
    for mode in MODES:
        mine = [row for row in rows if row["mode"] == mode]
        means[mode] = {name: sum(row[name] for row in mine) / len(mine) for name in METRICS}
    return means


def show(results: Mapping[str, Mapping[str, Mapping[str, float]]]) -> Table:
    """A row per option: accuracy % and tokens per forward of each mode."""
    table = Table("option", *MODES, title="accuracy % @ tokens per forward, means over seeds")
    for option, modes in results.items():
        table.add_row(
            option, *(f"{100 * modes[m]['accuracy']:.1f} @ {modes[m]['tokens_per_forward']:.2f}" for m in MODES)
        )
    return table


def main(argv: list[str] | None = None) -> int:
    """Train and evaluate everything; returns the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--options", nargs="+", choices=OPTIONS, default=list(OPTIONS))
    parser.add_argument("--steps", type=int, default=demo.STEPS)
    parser.add_argument("--out", type=output_folder, default=str(ROOT / "outputs" / "dllm_options"))
    args = parser.parse_args(argv)
    out = args.out.resolve()
    try:
        for seed in args.seeds:
            if not (out / f"base-seed{seed}" / "test.parquet").exists():
                made = ["--out", str(out / f"base-seed{seed}"), "--seed", str(seed)]
                run_logged(
                    [sys.executable, "-m", "examples.dllm_arithmetic.make_base", *made], out / f"base-seed{seed}.log"
                )
        jobs = [(option, seed) for seed in args.seeds for option in args.options]
        with ThreadPoolExecutor(2) as pool:
            rows = dict(zip(jobs, pool.map(lambda job: train_and_evaluate(*job, args.steps, out), jobs), strict=True))
    except PhaseFailed as failure:
        console.print(str(failure), style="red", markup=False)  # a log may contain brackets
        return 1
    results = {o: summarize([row for seed in args.seeds for row in rows[o, seed]]) for o in args.options}
    console.print(show(results))
    summary = {"seeds": args.seeds, "steps": args.steps, "options": results}
    (out / "options.json").write_text(json.dumps(summary, indent=1))
    return 0


if __name__ == "__main__":
    sys.exit(main())
