"""GRPO of a refined model that drafts for itself, against GRPO with token-by-token sampling; on-policy distillation.

    python -m examples.refine_rl_arithmetic.demo [--seeds 0 1 2] [--steps 60] [--dllm DIR] [--out DIR]

Starts from the refined model and the twin of `make demo-dllm` (--dllm). Per seed six runs from the refined model with
the same prompts (RUNS; the draws are the same as long as the policies are), two at a time, one thread each. A small
student twice: distilled from the twin (opd), and trained by GRPO. Ends with the times of generation, the acceptance
criteria (results.py), OUT/result.json and OUT/curves.png; OUT/seed0/refine_all/report.html has the curves, too.
A killed demo resumes: runs that have ended are kept, as long as their commands and models are the same; delete OUT to
start over.
"""

import argparse
import json
import os
import shutil
import signal
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pandas as pd

from examples.demo_runner import ROOT, Job, PhaseFailed, Phases, TrainingWatch, console, make_progress, run_side_by_side
from examples.dllm_arithmetic.demo import trained_model
from examples.grpo_arithmetic.acceptance import lines
from examples.grpo_arithmetic.demo import describe
from examples.refine_rl_arithmetic.results import DATA_SOURCE, criteria_of, draw_curves, same_steps, series, time_table
from verl.data.fingerprint import model_dir_fingerprint
from verl.report.page import write_report
from verl.utils.fs import output_folder

BUDGET_S = {"set-up": 400.0, "student": 240.0, "GRPO": 1200.0, "distillation": 300.0, "generation": 300.0}
STEPS, STUDENT_STEPS, VALIDATIONS = 60, 60, 6
ONE_THREAD = {**os.environ, "OMP_NUM_THREADS": "1"}
STUDENT = {"steps": 1000, "layers": 2, "bare": 0.35}  # it often answers without its work
ROLLOUT, ACTOR = "actor_rollout_ref.rollout", "actor_rollout_ref.actor"
SELF_DRAFT = {f"{ROLLOUT}.name": "refine", f"+{ROLLOUT}.custom.mode": "verify"}
REFINE_LOSS = f"+{ACTOR}.auxiliary_losses.refine_loss"
KEEP = {
    f"{REFINE_LOSS}.coef": 0.5, f"{REFINE_LOSS}.num_iterations": 2, f"{REFINE_LOSS}.windows_per_sample": 4,
    f"{REFINE_LOSS}.aligned_windows": 0.5,
}  # fmt: skip
FAST = {f"{ACTOR}.optim.lr": "1e-3"}  # ten times: the start answers nearly every question, and hardly moves at 1e-4
RUNS: dict[str, dict[str, Any]] = {
    "plain": {f"{ROLLOUT}.name": "hf"},
    "refine": SELF_DRAFT,
    "refine_all": SELF_DRAFT | KEEP,
    "refine_positive": SELF_DRAFT | KEEP | {f"{REFINE_LOSS}.samples": "positive"},
    "refine_fast": SELF_DRAFT | FAST,
    "refine_all_fast": SELF_DRAFT | KEEP | FAST,
}


def students_of(teacher: Path) -> dict[str, dict[str, Any]]:
    """Settings of the student's two runs."""
    plain = {f"{ROLLOUT}.name": "hf", f"{ACTOR}.optim.lr": "2e-4", "trainer.test_freq": 2}
    taught = {"algorithm.adv_estimator": "opd", "actor_rollout_ref.ref.model_path": teacher,
              "actor_rollout_ref.ref.log_prob_micro_batch_size_per_gpu": 64}  # fmt: skip
    return {"opd": plain | taught, "grpo": plain}


def write_questions(tables: Path, out: Path) -> None:
    """train.parquet and val.parquet of the dLLM demo in the RL data format."""
    out.mkdir(parents=True, exist_ok=True)
    for split in ("train", "val"):
        rows = [
            {"data_source": DATA_SOURCE, "prompt": [{"role": "user", "content": row.instruction}],
             "reward_model": {"style": "rule", "ground_truth": row.answer}, "extra_info": {"index": i}}
            for i, row in enumerate(pd.read_parquet(tables / f"{split}.parquet").itertuples())
        ]  # fmt: skip
        pd.DataFrame(rows).to_parquet(out / f"{split}.parquet")


def training_command(model: Path, data: Path, run: Path, steps: int, seed: int, more: Mapping[str, Any]) -> list[str]:
    """GRPO as a user would type it; `more` replaces settings."""
    settings = {
        "algorithm.adv_estimator": "grpo", "data.train_files": data / "train.parquet",
        "data.val_files": data / "val.parquet", "data.train_batch_size": 16, "data.max_prompt_length": 48,
        "data.max_response_length": 128, "data.seed": seed, "data.dataloader_num_workers": 0,
        "custom_reward_function.path": "examples/dllm_arithmetic/corpus.py",
        "actor_rollout_ref.model.path": model, "actor_rollout_ref.model.enable_gradient_checkpointing": "false",
        f"{ROLLOUT}.n": 8, f"{ROLLOUT}.log_prob_micro_batch_size_per_gpu": 64,
        f"{ACTOR}.share_prompt_forward": "true", f"{ACTOR}.fsdp_config.dtype": "float32",
        f"{ACTOR}.optim.lr": "1e-4", f"{ACTOR}.optim.lr_warmup_steps": 5,
        f"{ACTOR}.ppo_mini_batch_size": 16, f"{ACTOR}.ppo_micro_batch_size_per_gpu": 64,
        "trainer.device": "cpu", "trainer.n_gpus_per_node": 1, "trainer.total_epochs": 1000,
        "trainer.total_training_steps": steps, "trainer.test_freq": max(1, steps // VALIDATIONS),
        "trainer.save_freq": steps, "trainer.default_local_dir": run, "trainer.logger": "[tensorboard]",
        "trainer.rollout_data_dir": run / "samples", "trainer.project_name": "refine_rl_arithmetic",
        "trainer.experiment_name": run.name,
        f"{ACTOR}.checkpoint.save_contents": "[model,hf_model]",
    } | more  # fmt: skip
    return [sys.executable, "-m", "verl.trainer.main_ppo", *(f"{key}={value}" for key, value in settings.items())]


def run_once(jobs: Sequence[Job], inputs: Sequence[Path], watch: Callable[[], None] | None = None) -> None:
    """Run the jobs that have not ended before, two at a time, one thread each.

    A job with the log NAME.log leaves NAME.done.json when it has ended: its command and hashes of the models in
    `inputs`. If these differ now, it runs again. Before it starts, the folder NAME is removed.
    """
    models = {str(path): model_dir_fingerprint(path) for path in inputs}
    records = {log: json.dumps({"command": command, "models": models}, indent=1) for command, log in jobs}
    left = []
    for command, log in jobs:
        done = log.with_suffix(".done.json")
        if not done.exists() or done.read_text() != records[log]:
            done.unlink(missing_ok=True)
            shutil.rmtree(log.with_suffix(""), ignore_errors=True)
            left.append((command, log))
    if len(left) < len(jobs):
        console.print(f"  {len(jobs) - len(left)} of {len(jobs)} kept from an earlier run of the demo")
    run_side_by_side(left, watch, ONE_THREAD, at_once=2,
                     ended=lambda job: job[1].with_suffix(".done.json").write_text(records[job[1]]))  # fmt: skip


def train(
    model: Path, data: Path, runs: Mapping[Path, tuple[int, Mapping[str, Any]]], steps: int, *inputs: Path
) -> None:
    """Train each run, a folder with its seed and settings, under progress bars; `inputs`: models that it needs too."""
    jobs = [(training_command(model, data, run, steps, *settings), run.with_suffix(".log"))
            for run, settings in runs.items()]  # fmt: skip
    with make_progress() as progress:
        names = {f"{run.parent.name} {run.name}": (run, steps) for run in runs}
        run_once(jobs, [model, *inputs], TrainingWatch(progress, names, describe))


def parse(argv: list[str] | None) -> argparse.Namespace:
    """The options."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--steps", type=int, default=STEPS)
    parser.add_argument("--student-steps", type=int, default=STUDENT_STEPS, help="of both runs of the student")
    parser.add_argument("--dllm", type=Path, default=ROOT / "outputs" / "dllm", help="what make demo-dllm left")
    parser.add_argument("--out", type=output_folder, default=str(ROOT / "outputs" / "refine_rl"))
    args = parser.parse_args(argv)
    args.out, args.dllm = args.out.resolve(), args.dllm.resolve()
    return args


def main(argv: list[str] | None = None) -> int:
    """Run the phases; returns the exit code, 0 even if a criterion is missed."""
    args, begun = parse(argv), time.monotonic()
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))  # so that the running phase ends too
    out, refined, tables = args.out, args.dllm / "refined", args.dllm / "base"
    if not (refined / "config.json").exists():
        console.print(f"{args.dllm} holds no finished `make demo-dllm`: run that first, or name a folder with --dllm.")
        return 1
    teacher, phases = trained_model(args.dllm / "twin"), Phases(BUDGET_S)
    console.rule("GRPO of a model that drafts for itself")
    write_questions(tables, out / "data")
    make = [sys.executable, "-m", "examples.dllm_arithmetic.make_base", "--out", str(out / "student"),
            *(part for name, value in STUDENT.items() for part in (f"--{name}", str(value)))]  # fmt: skip
    students = {out / "students" / name: (args.seeds[0], more) for name, more in students_of(teacher).items()}
    trained = {out / f"seed{seed}" / name: (seed, more) for seed in args.seeds for name, more in RUNS.items()}

    def generation() -> None:
        draft = trained_model(out / "students" / "opd", "actor")
        command = [sys.executable, "-m", "examples.refine_rl_arithmetic.generation", "--model", str(refined),
                   "--draft", str(draft), "--questions", str(tables / "test.parquet"), "--out",
                   str(out / "generation.json")]  # fmt: skip
        run_once([(command, out / "generation.log")], [refined, draft])

    try:
        phases.run("student", lambda: run_once([(make, out / "student.log")], []))
        phases.run(
            "distillation",
            lambda: train(out / "student" / "model", out / "data", students, args.student_steps, teacher),
        )
        phases.run("generation", generation)
        phases.run("GRPO", lambda: train(refined, out / "data", trained, args.steps))
    except PhaseFailed as failure:
        console.print(str(failure), style="red", markup=False)  # a log may contain brackets
        return 1
    runs = {name: [series(out / f"seed{seed}" / name) for seed in args.seeds] for name in RUNS}
    taught = {run.name: series(run) for run in students}
    same = [same_steps(out / f"seed{seed}" / "plain", out / f"seed{seed}" / "refine") for seed in args.seeds]
    times = json.loads((out / "generation.json").read_text())
    criteria = criteria_of(runs, taught, same, times)
    result = {"seeds": args.seeds, "runs": runs, "students": taught, "same_steps": same, "generation": times,
              "criteria": {name: asdict(criterion) for name, criterion in criteria.items()}}  # fmt: skip
    (out / "result.json").write_text(json.dumps(result, indent=1))
    draw_curves(runs, taught, out / "curves.png")
    shown = out / f"seed{args.seeds[0]}" / "refine_all"
    shutil.copy(out / "curves.png", shown / "curves.png")
    console.print(time_table(times), phases.table())
    console.print("Acceptance criteria", *lines(criteria), sep="\n  ", highlight=False, soft_wrap=True)
    console.print(f"report {write_report(shown)}\ncurves {out / 'curves.png'}\nall in {time.monotonic() - begun:.0f} s")
    return 0


if __name__ == "__main__":
    sys.exit(main())
