"""The full SPD chain from nothing, with a time budget a phase: test bed, data, GRPO training, evaluation, report.

    python -m examples.spd_arithmetic.demo [--backbone target|own] [--steps N] [--questions 1000] [--out DIR]

Ends with the evaluation table and OUT/evaluation.json. Everything is made here from --seed; a test bed that the same
arguments made before is reused.
"""

import argparse
import shutil
import sys
import time
from collections.abc import Mapping
from pathlib import Path

from examples.demo_runner import ROOT, console, out_folder, python, run_phases, run_shown, train
from verl.report.page import write_report

BUDGET_S = {"set-up": 400.0, "test bed": 360.0, "training": 230.0, "evaluation": 130.0}
OWN_EXTRA_S = {"training": 300.0, "evaluation": 180.0}
STEPS = 90
LIMIT = 128  # tokens of an answer, in the test bed, in training and in the evaluation
HARMLESS_SHARES = {"target": ("0.8", "0.6", "0.4", "0.2"), "own": ("0.8", "0.6", "0.4")}  # accepted above a threshold
MAX_VAL_DROP = "0.02"  # the upper end of an interval, which 600 questions leave a point wide
MARGINS, TYPICALS = ("4", "8", "12"), ("0.001", "0.0003")
DTYPE = "float32"  # the documented results; the models are too small for bfloat16 to be faster
# By LoRA, with a head that reads what the target's head does: docs/experiments.md has the results of others.
OWN_TRAINING = ("spd.backbone=own", "actor_rollout_ref.model.lora_rank=16", "actor_rollout_ref.model.lora_alpha=32",
                "spd.head_inputs=pair")  # fmt: skip


def training_command(testbed: Path, run: Path, store: Path, steps: int, seed: int) -> list[str]:
    """Training of a scorer on a test bed's blocks, saved at its last step."""
    command = python("train_spd_scorer.py", "--model", testbed / "target", "--output-dir", run, "--blocks",
                     testbed / "blocks_train.parquet", "--metadata", testbed / "metadata_train.parquet")
    settings = {
        "spd.rollout.draft_path": testbed / "draft", "spd.rollout.store_path": store, "spd.rollout.max_tokens": LIMIT,
        "spd.rollout.server_args": f"[--dtype,{DTYPE}]", "data.seed": seed, "spd.seed": seed,
        "actor_rollout_ref.actor.fsdp_config.dtype": DTYPE, "trainer.total_training_steps": steps,
        "trainer.save_freq": steps, "trainer.device": "cpu", "trainer.total_epochs": 1000, "trainer.logger": "[file]",
        "trainer.val_before_train": "false",
    }  # fmt: skip
    return [*command, *(f"{key}={value}" for key, value in settings.items())]


def saved_scorer(run: Path, steps: int) -> Path:
    """Where a training of that many steps leaves its scorer."""
    return run / f"global_step_{steps}" / "actor" / "huggingface"


def commands(args: argparse.Namespace) -> dict[str, list[str]]:
    """The command of each phase, as a user would type it."""
    testbed, run = args.out / "testbed", args.out / args.backbone / "run"
    make = python("examples.spd_arithmetic.prepare_blocks", "--out", testbed, "--seed", args.seed,
                  "--n-test-questions", args.questions, "--max-new-tokens", LIMIT, "--dtype", DTYPE)
    train = training_command(testbed, run, args.out / "completions.sqlite3", args.steps, args.seed)
    train += ["--val-blocks", str(testbed / "blocks_val.parquet"), "--val-metadata",
              str(testbed / "metadata_val.parquet"), "trainer.logger=[file,tensorboard]"]
    if args.backbone == "own":
        train += OWN_TRAINING
    evaluate = python(
        "scripts/eval_spd_scorer.py", "--out", args.out / args.backbone, "--dtype", DTYPE, "--target",
        testbed / "target", "--draft", testbed / "draft", "--scorer", saved_scorer(run, args.steps), "--questions",
        testbed / "questions_test.jsonl", "--val-questions", testbed / "questions_val.jsonl", "--harm-labels",
        testbed / "harm_labels.jsonl", "--max-new-tokens", LIMIT, "--val-harm-labels",
        testbed / "harm_labels_val.jsonl", "--max-val-drop", MAX_VAL_DROP, "--harmless-shares",
        *HARMLESS_SHARES[args.backbone], "--margins", *MARGINS, "--typicals", *TYPICALS,
    )
    return {"test bed": make, "training": train, "evaluation": evaluate}


def main(argv: list[str] | None = None) -> int:
    """Run the phases; gives the exit code."""
    args = parse_arguments(argv)
    started, command, run = time.monotonic(), commands(args), args.out / args.backbone / "run"
    budget = {k: v + (OWN_EXTRA_S.get(k, 0.0) if args.backbone == "own" else 0.0) for k, v in BUDGET_S.items()}
    phases = run_phases("SPD scorer: test bed, GRPO training, evaluation", budget, {
        "test bed": lambda: run_shown(command["test bed"]),
        "training": lambda: train("SPD", command["training"], run, args.steps, describe),
        "evaluation": lambda: run_shown(command["evaluation"]),
    })  # fmt: skip
    if phases is None:
        return 1
    evaluation = args.out / args.backbone / "evaluation.json"
    shutil.copy(evaluation, args.out / "evaluation.json")
    shutil.copy(evaluation.with_suffix(".png"), run / "evaluation.png")
    report = write_report(run, title=f"SPD scorer, {args.backbone} backbone")
    console.print(phases.table())
    console.print(f"evaluation {args.out / 'evaluation.json'}\npicture    {evaluation.with_suffix('.png')}")
    console.print(f"report     {report}\nall in {time.monotonic() - started:.0f} s")
    return 0


def describe(data: Mapping[str, float]) -> str:
    """The metrics of a step that are shown next to the progress bar."""
    if "critic/score/mean" not in data:  # a validation
        return ""
    reward, accepted = data["critic/score/mean"], data["spd/accepted_len/mean"]
    return f"reward {reward:+.3f}  accepted {accepted:.2f}  entropy {data['actor/entropy']:.3f}"


def parse_arguments(argv: list[str] | None) -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--backbone", choices=("target", "own"), default="target")
    parser.add_argument("--steps", type=int, default=STEPS, help="GRPO steps")
    parser.add_argument("--questions", type=int, default=1000, help="held-out questions")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=out_folder, default=str(ROOT / "outputs" / "spd_arithmetic"))
    return parser.parse_args(argv)


if __name__ == "__main__":
    sys.exit(main())
