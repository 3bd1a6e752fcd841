"""GRPO of a pretrained model on questions of reasoning-gym, with vLLM, and a control.

    python -m examples.pretrained.demo [--model DIR] [--seeds 0 1 2] [--steps N] [--lr 2e-5] [--out DIR]

The model is SmolLM2-135M-Instruct (examples.pretrained.fetch) or any Hugging Face folder with a chat template. Task and
prompt were chosen before any training (selection.json). Ends with the accuracies on held-out questions, the acceptance
criteria, OUT/result.json and OUT/curves.png; each run has a report page. Runs that have ended are kept, and one that
was stopped resumes from its last checkpoint: delete OUT to start again.

The control has learning rate 0: its weights never change, so that a few steps show that its accuracy does not move.
"""

import argparse
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from statistics import mean
from typing import Any

import torch

from examples.demo_runner import begin, by_step, console, out_folder, python
from examples.grpo_arithmetic.acceptance import Criterion, report
from examples.grpo_arithmetic.demo import describe
from examples.pretrained import fetch, questions
from examples.pretrained.stages import Stage, record_of, refuse_other_settings, run_stages

STEPS, CONTROL_STEPS, VALIDATIONS, SAVE_EVERY = 16, 4, 2, 8
PROMPTS, SAMPLES, LR = 16, 8, 2e-5
GAIN_POINTS, FORMAT, TIME_S = 10.0, 90.0, 1500.0  # points, % of the answers, seconds
SOURCE = questions.DATA_SOURCE
ACCURACY, ANSWERED = f"val-core/{SOURCE}/acc/mean@1", f"val-aux/{SOURCE}/answered/mean@1"
HERE = "examples/pretrained"


def from_environment(seed: int) -> dict[str, Any]:
    """Settings of reasoning-gym's questions and scores: the same questions as those that questions.write writes."""
    key, task, prompt = "data.environment", questions.TASK, questions.PROMPT
    parameters = ", ".join(f"{name}: {value}" for name, value in task.parameters.items())
    return {
        f"{key}.name": "reasoning_gym", f"{key}.tasks": f"[{task.dataset}]",
        f"{key}.params": f"{{{task.dataset}: {{{parameters}}}}}", f"{key}.size": questions.TRAIN_SIZE,
        f"{key}.val_size": questions.VALIDATION_SIZE, f"{key}.seed": questions.TRAIN + questions.SEED_STEP * seed,
        f"{key}.val_seed": questions.VALIDATION, f"{key}.system_prompt": f'"{prompt.system}"',
        f"{key}.examples": prompt.examples, f"{key}.answer_pattern": f'"{questions.ANSWER.pattern}"',
        f"{key}.answer_format": '"Answer: {}"',
    }  # fmt: skip


def from_files(data: Path) -> dict[str, Any]:
    """Settings of questions in the files of a folder, with their reward function."""
    return {"data.train_files": data / "train.parquet", "data.val_files": data / "val.parquet",
            "custom_reward_function.path": f"{HERE}/reward.py"}  # fmt: skip


def training_command(
    model: Path, source: Mapping[str, Any], run: Path, steps: int, seed: int, *more: str, lr: float = LR
) -> list[str]:
    """GRPO as a user would type it, on one GPU or on the CPU; `source` are the settings of questions and scores."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    settings = {
        "algorithm.adv_estimator": "grpo", **source, "data.train_batch_size": PROMPTS, "data.seed": seed,
        "data.max_prompt_length": 160, "data.max_response_length": 32, "actor_rollout_ref.model.path": model,
        "actor_rollout_ref.rollout.name": "vllm", "actor_rollout_ref.rollout.n": SAMPLES,
        "actor_rollout_ref.actor.ppo_mini_batch_size": PROMPTS, "actor_rollout_ref.actor.use_dynamic_bsz": "true",
        "actor_rollout_ref.actor.optim.lr": lr, "trainer.device": device, "trainer.n_gpus_per_node": 1,
        "trainer.total_epochs": 1000, "trainer.total_training_steps": steps,
        "trainer.test_freq": max(1, steps // VALIDATIONS), "trainer.save_freq": min(SAVE_EVERY, steps),
        "trainer.max_actor_ckpt_to_keep": 1, "trainer.default_local_dir": run, "trainer.logger": "[tensorboard]",
        "trainer.project_name": "pretrained", "trainer.experiment_name": run.name,
    }  # fmt: skip
    return python("verl.trainer.main_ppo", *(f"{key}={value}" for key, value in settings.items()), *more)


def criteria_of(gains: Sequence[float], moved: float, answered: float, seconds: float) -> dict[str, Criterion]:
    """Criteria by name: accuracy gained by each seed and moved by the control, in points; the least share of answers in
    the asked format before training, in %; seconds of the longest run."""
    return {
        "gain": gain_criterion(f"accuracy gained on {questions.VALIDATION_SIZE} held-out questions", gains,
                               GAIN_POINTS),
        "control": Criterion("accuracy gained by the control (learning rate 0)", f"{moved:.1f} points", "0",
                             moved == 0),
        "format": Criterion("held-out answers in the asked format before training", f"{answered:.1f} %",
                            f"at least {FORMAT:g} %", answered >= FORMAT),
        "seconds": time_criterion(seconds, TIME_S),
    }  # fmt: skip


def gain_criterion(what: str, gains: Sequence[float], least: float) -> Criterion:
    """At least so many points, as a mean over seeds."""
    each = ", ".join(f"{gain:.1f}" for gain in gains)
    return Criterion(f"{what}, mean of {len(gains)} seeds (each)", f"{mean(gains):.1f} points ({each})",
                     f"at least {least:g}", mean(gains) >= least)  # fmt: skip


def time_criterion(seconds: float, most: float) -> Criterion:
    """At most so many seconds for the longest run."""
    return Criterion("time of the longest run", f"{seconds:.0f} s", f"at most {most:.0f} s", seconds <= most)


def runs_of(
    args: argparse.Namespace, control_steps: int, stage_of: Callable[[Path, int, int, float], Stage]
) -> dict[str, Stage]:
    """The training of each seed, then the control, by the names that are shown; `stage_of` gets the run's folder, its
    steps, seed and learning rate. Raises SystemExit if --out has runs with other settings."""
    wanted = {f"seed {seed}": (f"seed{seed}", args.steps, seed, args.lr) for seed in args.seeds}
    wanted["control, learning rate 0"] = ("control", control_steps, args.seeds[0], 0.0)
    runs = {name: stage_of(args.out / folder, *more) for name, (folder, *more) in wanted.items()}
    for run in runs.values():
        refuse_other_settings(run, args.out)
    return runs


def shares_of(runs: Mapping[str, Stage], metric: str) -> dict[str, dict[int, float]]:
    """A share that is measured at validations, by run and step."""
    return {name: by_step(run.result, metric) for name, run in runs.items()}


def percentages(shares: Mapping[str, Mapping[int, float]]) -> dict[str, dict[int, float]]:
    """The same in %."""
    return {name: {step: 100 * value for step, value in values.items()} for name, values in shares.items()}


def gained(accuracies: Mapping[str, Mapping[int, float]]) -> tuple[list[float], float]:
    """Points that each seed has gained, and points by which the control, the last run, has moved."""
    *gains, moved = [list(values.values())[-1] - list(values.values())[0] for values in accuracies.values()]
    return gains, moved


def show_pages(runs: Mapping[str, Stage], accuracy: str, file: Path) -> None:
    """Draw held-out accuracy, mean reward and answer length over steps, a line per run, as a PNG, and print where it
    and the report pages are."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(12, 3.6), layout="constrained")
    axes = figure.subplots(1, 3)
    shown = {"held-out accuracy": accuracy, "mean reward of a step": "critic/score/mean",
             "answer length, tokens": "response_length/mean"}  # fmt: skip
    for axis, (label, metric) in zip(axes, shown.items(), strict=True):
        for name, run in runs.items():
            values = by_step(run.result, metric)
            axis.plot(values.keys(), values.values(), ".-", label=name)
        axis.set(xlabel="step", ylabel=label)
        axis.grid(alpha=0.3)
    axes[0].set(ylim=(0, None))
    axes[0].legend()
    figure.savefig(file, dpi=110)
    pages = [f"report {run.result / 'report.html'}" for run in runs.values()]
    console.print(*pages, f"curves {file}", sep="\n", soft_wrap=True)


def options(doc: str, steps: int, lr: float | None, out: Path) -> argparse.ArgumentParser:
    """The options that demos of GRPO share, with their defaults."""
    parser = argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, help="a Hugging Face folder with a chat template")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0])
    parser.add_argument("--steps", type=int, default=steps)
    parser.add_argument("--lr", type=float, default=lr)
    parser.add_argument("--out", type=out_folder, default=str(out))
    return parser


def parse(parser: argparse.ArgumentParser, argv: list[str] | None) -> argparse.Namespace:
    """The options; `more` has the settings of main_ppo."""
    args, args.more = parser.parse_known_args(argv)
    if wrong := [setting for setting in args.more if "=" not in setting]:
        parser.error(f"unknown: {' '.join(wrong)}; settings of main_ppo have the form key=value")
    return args


def main(argv: list[str] | None = None) -> int:
    """Fetch, train and report; returns the exit code, 0 even if a criterion is missed."""
    args = parse(options(__doc__, STEPS, LR, fetch.OUT / "demo"), argv)
    begin("GRPO of a pretrained model")
    model = fetch.model_folder(args.model)

    def stage_of(run: Path, steps: int, seed: int, lr: float) -> Stage:
        command = training_command(model, from_environment(seed), run, steps, seed, *args.more, lr=lr)
        return Stage(run.name, command, run, training=(run, steps))

    runs = runs_of(args, CONTROL_STEPS, stage_of)
    if not run_stages(list(runs.values()), args.out, describe):
        return 1
    seconds = [record_of(run, args.out)["seconds"] for run in runs.values()]
    shares = {"held-out accuracy %": shares_of(runs, ACCURACY), "answers in the format %": shares_of(runs, ANSWERED)}
    accuracies, formats = map(percentages, shares.values())
    gains, moved = gained(accuracies)
    criteria = criteria_of(gains, moved, min(values[0] for values in formats.values()), max(seconds))
    result = {"model": str(args.model or fetch.NOTE), "accuracy": accuracies, "gains": gains,
              "control": moved, "seconds": seconds}  # fmt: skip
    report(args.out, result, criteria, f"GRPO on {SOURCE}", shares)
    show_pages(runs, ACCURACY, args.out / "curves.png")
    if not args.model:
        console.print(f"The model: {fetch.NOTE}.")
    return 0


if __name__ == "__main__":
    sys.exit(main())
