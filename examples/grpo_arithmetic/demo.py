"""GRPO of a small language model on word problems: vLLM in the ranks' own processes, FSDP, a rule reward.

    python -m examples.grpo_arithmetic.demo [--steps N] [--control-steps N] [--seed 0] [--out DIR]

Trains a start by SFT that mostly guesses, improves it by GRPO, which learns to show its work, then runs the same
command with learning rate 0 as a control. Ends with the accuracies on validation questions, the acceptance criteria
(acceptance.py), OUT/result.json and the report page OUT/run/report.html.

The control is short: its weights never change and validation is greedy, so that any number of steps gives the accuracy
of the start. It shows that the gain comes from the updates, not from the rollout, the weight sync or the validation.
"""

import argparse
import sys
import time
from collections.abc import Mapping
from pathlib import Path

from examples.demo_runner import ROOT, by_step, console, out_folder, python, run_phases, run_shown, train
from examples.grpo_arithmetic.acceptance import criteria_of, report
from examples.grpo_arithmetic.make_start import DATA_SOURCE, SFT_STEPS

BUDGET_S = {"set-up": 400.0, "start": 190.0, "GRPO": 400.0, "control": 100.0}
STEPS, CONTROL_STEPS = 60, 8
VALIDATIONS = 4
ACCURACY = f"val-core/{DATA_SOURCE}/acc/mean@1"
HERE = "examples/grpo_arithmetic"


def training_command(start: Path, run: Path, steps: int, seed: int, *more: str) -> list[str]:
    """GRPO as a user would type it."""
    settings = {
        "algorithm.adv_estimator": "grpo", "data.train_files": start / "train.parquet",
        "data.val_files": start / "val.parquet", "data.train_batch_size": 32, "data.max_prompt_length": 96,
        "data.max_response_length": 96, "data.seed": seed, "data.dataloader_num_workers": 0,
        "custom_reward_function.path": f"{HERE}/reward.py",
        "actor_rollout_ref.model.path": start / "model", "actor_rollout_ref.rollout.name": "vllm",
        "actor_rollout_ref.rollout.n": 8, "actor_rollout_ref.rollout.dtype": "float32",
        "actor_rollout_ref.rollout.max_num_seqs": 256,
        "actor_rollout_ref.model.enable_gradient_checkpointing": "false",
        "actor_rollout_ref.actor.share_prompt_forward": "true", "actor_rollout_ref.actor.fsdp_config.dtype": "float32",
        "actor_rollout_ref.actor.optim.lr": "2e-4", "actor_rollout_ref.actor.ppo_mini_batch_size": 32,
        "actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu": 64,
        "actor_rollout_ref.rollout.log_prob_micro_batch_size_per_gpu": 64,
        "trainer.device": "cpu", "trainer.n_gpus_per_node": 1, "trainer.total_epochs": 1000,
        "trainer.total_training_steps": steps, "trainer.test_freq": max(1, steps // VALIDATIONS),
        "trainer.save_freq": steps, "trainer.default_local_dir": run, "trainer.logger": "[tensorboard]",
        "trainer.project_name": "grpo_arithmetic", "trainer.experiment_name": run.name,
    }  # fmt: skip
    return python("verl.trainer.main_ppo", *(f"{key}={value}" for key, value in settings.items()), *more)


def describe(data: Mapping[str, float]) -> str:
    """The part of a step's metrics that is shown next to the bar."""
    if "critic/score/mean" not in data:  # a validation
        return ""
    reward, length = data["critic/score/mean"], data["response_length/mean"]
    return f"reward {reward:.3f}  answer {length:.1f} tokens  {data['timing_s/step']:.1f} s a step"


def parser_of(doc: str, steps: int, sft_steps: int, name: str) -> argparse.ArgumentParser:
    """The options of a demo of GRPO from a start that is made here; `name`: of its folder in outputs."""
    parser = argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=steps)
    parser.add_argument("--sft-steps", type=int, default=sft_steps)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=out_folder, default=str(ROOT / "outputs" / name))
    return parser


def start_command(module: str, args: argparse.Namespace) -> list[str]:
    """The command that makes the start of the options in OUT/start."""
    return python(module, "--out", args.out / "start", "--seed", args.seed, "--sft-steps", args.sft_steps)


def parse(argv: list[str] | None) -> argparse.Namespace:
    """The options."""
    parser = parser_of(__doc__, STEPS, SFT_STEPS, "grpo_arithmetic")
    parser.add_argument("--control-steps", type=int, default=CONTROL_STEPS)
    return parser.parse_args(argv)


def commands(args: argparse.Namespace) -> dict[str, list[str]]:
    """The command of each phase."""
    start, out = args.out / "start", args.out
    zero = ("actor_rollout_ref.actor.optim.lr=0", "trainer.save_freq=0")
    return {
        "start": start_command("examples.grpo_arithmetic.make_start", args),
        "GRPO": training_command(start, out / "run", args.steps, args.seed),
        "control": training_command(start, out / "control", args.control_steps, args.seed, *zero),
    }


def main(argv: list[str] | None = None) -> int:
    """Run the phases; returns the exit code, 0 even if a criterion is missed."""
    args, begun = parse(argv), time.monotonic()
    run, control, command = args.out / "run", args.out / "control", commands(args)
    phases = run_phases("GRPO with a vLLM hybrid engine", BUDGET_S, {
        "start": lambda: run_shown(command["start"]),
        "GRPO": lambda: train("GRPO", command["GRPO"], run, args.steps, describe),
        "control": lambda: train("control", command["control"], control, args.control_steps, describe),
    })  # fmt: skip
    if phases is None:
        return 1
    trained, same = by_step(run, ACCURACY), by_step(control, ACCURACY)
    criteria = criteria_of(trained, same, time.monotonic() - begun)
    shares = {"GRPO": trained, "control, learning rate 0": same}
    report(args.out, {"seed": args.seed, "grpo": trained, "control": same}, criteria, "GRPO on word problems",
           {"validation accuracy %": shares})  # fmt: skip
    console.print(phases.table())
    console.print(f"report {run / 'report.html'}\nall in {time.monotonic() - begun:.0f} s")
    return 0


if __name__ == "__main__":
    sys.exit(main())
