"""Iterative refinement of a small language model on worked arithmetic, compared with plain SFT of the same base.

    python -m examples.dllm_arithmetic.demo [--seed 0] [--out DIR]

Trains a base, then refinement and its SFT twin in parallel, one thread each. Ends with accuracy against tokens per
forward and per second for every mode, acceptance criteria (acceptance.py), OUT/evaluation.json and a report page.
"""

import argparse
import json
import os
import shutil
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rich.table import Table

from examples.demo_runner import (
    ROOT,
    TrainingWatch,
    console,
    make_progress,
    out_folder,
    run_logged,
    run_phases,
    run_shown,
    run_side_by_side,
)
from examples.dllm_arithmetic.acceptance import LOSSLESS, criteria_of, criteria_table
from examples.dllm_arithmetic.evaluate import paired
from verl.report.page import write_report

BUDGET_S = {"set-up": 400.0, "base": 200.0, "training": 1000.0, "evaluation": 280.0}
BLOCK, WINDOWS, ALIGNED = 8, 12, 0.5
STEPS, ROUNDS, AR_WEIGHT = 1800, 2, 2.0
SINGLE_ROUND_STEPS = 600
TIMED = 40  # questions by which tokens per second are measured
TWIN_MODES = (*LOSSLESS, "refine 1")  # the others take as long, and none of its answers by them is correct
TWIN_STEPS = 3950  # a step of plain SFT takes at most half as long; a criterion compares CPU times


def common(model: Path, data: Path, run: Path, steps: int, seed: int) -> dict[str, Any]:
    """Settings that both trainers share."""
    return {
        "data.train_files": data / "train.parquet", "data.val_files": data / "val.parquet", "data.max_length": 160,
        "data.train_batch_size": 8, "data.micro_batch_size_per_gpu": 8, "data.dataloader_num_workers": 0,
        "data.prompt_key": "instruction", "data.response_key": "output", "model.partial_pretrain": model,
        "model.enable_gradient_checkpointing": "false", "model.fsdp_config.dtype": "float32",
        "optim.optimizer_impl": "examples.muon", "optim.optimizer": "MuonWithAdamW", "optim.lr": 0.02,
        "optim.weight_decay": 0.0,
        "trainer.device": "cpu", "trainer.n_gpus_per_node": 1, "trainer.total_training_steps": steps,
        "trainer.test_freq": 500, "trainer.seed": seed, "trainer.default_local_dir": run,
        "trainer.logger": "[tensorboard]", "trainer.project_name": "dllm_arithmetic",
        "trainer.experiment_name": run.name,
        "trainer.checkpoint.save_contents": "[model,optimizer,extra,hf_model]",
    }  # fmt: skip


def command(module: str, settings: Mapping[str, Any]) -> list[str]:
    """A trainer's command line as a user would type it."""
    return [sys.executable, "-m", module, *(f"{key}={value}" for key, value in settings.items())]


def refine_command(model: Path, data: Path, run: Path, steps: int, seed: int, *more: str) -> list[str]:
    """Refinement with packed windows next to the clean text."""
    settings = common(model, data, run, steps, seed) | {
        "trainer.save_checkpoint_steps": -1, "iterative.noise_pattern": "packed", "iterative.block_length": BLOCK,
        "iterative.windows_per_sample": WINDOWS, "iterative.aligned_windows": ALIGNED,
        "iterative.num_iterations": ROUNDS,
        "iterative.single_round_steps": min(SINGLE_ROUND_STEPS, steps // 2),
        "iterative.ar_loss_weight": AR_WEIGHT, "iterative.noise_seed": seed,
    }  # fmt: skip
    return [*command("dllm_reasoning.train_iterative_refine", settings), *more]


def twin_command(model: Path, data: Path, run: Path, steps: int, seed: int) -> list[str]:
    """Plain SFT on the given answers."""
    return command("verl.trainer.fsdp_sft_trainer", common(model, data, run, steps, seed))


def trained_model(run: Path) -> Path:
    """The Hugging Face directory of a run's last checkpoint."""
    step = (run / "latest_checkpointed_iteration.txt").read_text().strip()
    return run / f"global_step_{step}" / "huggingface"


def describe(data: Mapping[str, float]) -> str:
    """The losses of a step, for the progress bar."""
    names = ("train/loss", "train/loss_s0", "train/loss_s1", "train/loss_ar")
    return "  ".join(f"{name.removeprefix('train/')} {data[name]:.3f}" for name in names if name in data)


def refine_and_twin(out: Path, seed: int, steps: int, twin_steps: int, more: list[str]) -> dict[str, float]:
    """Run both trainings in parallel, one thread each; returns the CPU seconds of each."""
    model, data = out / "base" / "model", out / "base"
    runs = {"refinement": (out / "refinement", steps), "twin": (out / "twin", twin_steps)}
    for run, _ in runs.values():
        shutil.rmtree(run, ignore_errors=True)
    refine = refine_command(model, data, out / "refinement", steps, seed, *more)
    twin = twin_command(model, data, out / "twin", twin_steps, seed)
    with make_progress() as progress:
        jobs = [(refine, out / "refinement.log"), (twin, out / "twin.log")]
        watch = TrainingWatch(progress, runs, describe)
        seconds = run_side_by_side(jobs, watch, {**os.environ, "OMP_NUM_THREADS": "1"})
    return dict(zip(("refined", "twin"), seconds, strict=True))


def evaluate(out: Path, models: Mapping[str, Path], questions: int) -> dict[str, Any]:
    """Evaluate both models in parallel, then time them one after the other; the content of evaluation.json."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}

    def job(name: str, kind: str, *more: str) -> tuple[list[str], Path]:
        command = [sys.executable, "-m", "examples.dllm_arithmetic.evaluate", "--model", f"{name}={models[name]}",
                   "--questions", str(out / "base" / "test.parquet"), "--block", str(BLOCK), "--limit", str(questions),
                   "--out", str(out / f"{kind}_{name}.json"), *more]  # fmt: skip
        if name == "twin":
            command += ["--modes", *TWIN_MODES]
        return command, out / f"{kind}_{name}.log"

    run_side_by_side([job(name, "evaluation") for name in models], env=environment)
    results = {name: json.loads((out / f"evaluation_{name}.json").read_text()) for name in models}
    for name, part in results.items():
        run_logged(*job(name, "speed", "--timed", str(TIMED)), env=environment)
        speed = json.loads((out / f"speed_{name}.json").read_text())
        for row in part["rows"]:
            row["tokens_per_second"] = speed[row["mode"]]
    counts = {part["questions"] for part in results.values()}
    return {
        "questions": counts.pop(),
        "rows": [row for part in results.values() for row in part["rows"]],
        "greedy_refined_less_twin": paired(results["refined"]["correct"], results["twin"]["correct"]),
    }


def result_table(results: Mapping[str, Any]) -> Table:
    """The rows as a table."""
    table = Table(title=f"{results['questions']} held-out questions; every forward counts")
    timed = "tokens_per_second" in results["rows"][0]
    speed = ("tokens/s",) if timed else ()
    for column in ("model", "mode", "block", "accuracy %", "tokens/forward", *speed, "same as greedy %"):
        table.add_column(column, justify="left" if column in ("model", "mode") else "right")
    last = None
    for row in results["rows"]:
        if last not in (None, row["model"]):
            table.add_section()
        last = row["model"]
        accuracy = f"{100 * row['accuracy']:.1f} ±{100 * row['accuracy_se']:.1f}"
        seconds = [f"{row['tokens_per_second']:.0f}"] if timed else []
        table.add_row(row["model"], row["mode"], str(row["block"]), accuracy, f"{row['tokens_per_forward']:.2f}",
                      *seconds, f"{100 * row['same_as_greedy']:.1f}")  # fmt: skip
    return table


def summary(results: Mapping[str, Any]) -> list[str]:
    """Lines on the paired interval and the CPU time of each training."""
    gap, cpu = results["greedy_refined_less_twin"], results["cpu_seconds"]
    interval = f"{gap['difference']:+.1f} points (95 %: {gap['low']:+.1f} to {gap['high']:+.1f})"
    lines = [
        f"greedy, refined less twin: {interval}; CPU seconds: refined {cpu['refined']:.0f}, twin {cpu['twin']:.0f}"
    ]
    if cpu["twin"] < cpu["refined"]:
        lines.append("[red]The twin got less CPU time than the refined model; raise --twin-steps.[/red]")
    return lines


def parse(argv: list[str] | None) -> argparse.Namespace:
    """The options."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=out_folder, default=str(ROOT / "outputs" / "dllm"))
    parser.add_argument("--base-steps", type=int)
    parser.add_argument("--steps", type=int, default=STEPS)
    parser.add_argument("--twin-steps", type=int, default=TWIN_STEPS)
    parser.add_argument("--questions", type=int, default=1000)
    parser.add_argument("settings", nargs="*", help="further settings of the refinement, key=value")
    return parser.parse_args(argv)


def main(argv: list[str] | None = None) -> int:
    """Run the phases; returns the exit code."""
    args, begun = parse(argv), time.monotonic()
    out, run, results, cpu = args.out, args.out / "refinement", {}, {}
    make = [sys.executable, "-m", "examples.dllm_arithmetic.make_base", "--out", str(out / "base"), "--seed",
            str(args.seed), *(["--steps", str(args.base_steps)] if args.base_steps else [])]  # fmt: skip

    def training() -> None:
        cpu.update(refine_and_twin(out, args.seed, args.steps, args.twin_steps, args.settings))
        shutil.rmtree(out / "refined", ignore_errors=True)
        shutil.copytree(trained_model(run), out / "refined")

    def evaluation() -> None:
        models = {"refined": out / "refined", "twin": trained_model(out / "twin")}
        results.update(evaluate(out, models, args.questions))

    works = {"base": lambda: run_shown(make), "training": training, "evaluation": evaluation}
    phases = run_phases("Iterative refinement against plain SFT", BUDGET_S, works)
    if phases is None:
        return 1
    results["cpu_seconds"] = cpu
    results["criteria"] = criteria_of(results)
    (out / "evaluation.json").write_text(json.dumps(results, indent=1))
    console.print(result_table(results))
    console.print(criteria_table(results["criteria"]))
    console.print("\n".join(summary(results)))
    console.print(phases.table())
    console.print(f"report {write_report(run)}\nall in {time.monotonic() - begun:.0f} s")
    return 0


if __name__ == "__main__":
    sys.exit(main())
