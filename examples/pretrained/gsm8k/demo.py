"""GRPO of Qwen2.5-Coder-0.5B-Instruct on GSM8K, with vLLM, a control, and the trained model in vLLM's server.

    python -m examples.pretrained.gsm8k.demo --gsm8k DIR [--model DIR] [--lora RANK] [--seeds 0 1 2] [--steps N]
                                             [--lr 5e-6] [--prompt NAME] [--out DIR] [key=value ...]

The model is fetched (examples.pretrained.fetch), or is any Hugging Face folder with a chat template; with --lora,
adapters are trained. The prompt was chosen before any training (examples.pretrained.gsm8k.select). key=value are
settings of main_ppo for all runs, such as trainer.device=cuda.

Validation has two accuracies: by the reward, which reads the number after a marker, and by the last number of the
answer, whatever its format. Their difference tells how much of a gain is format. The control has learning rate 0. The
model of the first seed is merged into a Hugging Face folder and served, with --lora as an adapter too. OUT has
result.json, curves.png and the runs, each with a report page. What has ended is kept, and a stopped run resumes from
its last checkpoint: delete OUT to start again.
"""

import hashlib
import json
import sys
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

from rich.table import Table

from examples.data_preprocess.gsm8k import DATA_SOURCE
from examples.demo_runner import ROOT, begin, by_step, console, python
from examples.grpo_arithmetic.acceptance import Criterion, report
from examples.grpo_arithmetic.demo import describe
from examples.pretrained import demo as grpo
from examples.pretrained import fetch
from examples.pretrained.gsm8k.questions import CANDIDATES, CHOSEN, MODEL, VALIDATION_SIZE, Prompt, write
from examples.pretrained.stages import Stage, record_of, run_stages

STEPS, CONTROL_STEPS, LR, LORA_LR = 20, 1, 5e-6, 5e-5
TEMPERATURE = 0.7  # at 1, most prompts get no right answer in a step (docs/experiments.md)
PROMPT_LIMIT, SERVED = 512, 32  # tokens of a prompt; test questions that the server answers
TOKENS = 4096  # of a micro-batch: with the default, activations of the 0.5B model take 9 GB
GAIN_POINTS, GAIN_LAST_NUMBER, TIME_S = 12.0, 4.0, 5400.0  # points, points, seconds
ACCURACY, LAST_NUMBER, ANSWERED = (
    f"val-{kind}/{DATA_SOURCE}/{name}/mean@1" for kind, name in
    (("core", "acc"), ("aux", "last_number"), ("aux", "answered"))
)  # fmt: skip
COLUMNS = {"right by the reward %": ACCURACY, "by the last number %": LAST_NUMBER, "with the marker %": ANSWERED}


def source(data: Path) -> dict[str, Any]:
    """Settings of questions and scores."""
    return {"data.train_files": data / "train.parquet", "data.val_files": data / "test.parquet",
            "custom_reward_function.path": "examples/pretrained/gsm8k/reward.py"}  # fmt: skip


def settings(prompt: Prompt, lora: int) -> list[str]:
    """What differs from the settings of examples.pretrained.demo."""
    chosen = {"data.max_prompt_length": PROMPT_LIMIT, "data.max_response_length": prompt.limit,
              "actor_rollout_ref.rollout.temperature": TEMPERATURE,
              "actor_rollout_ref.actor.ppo_max_token_len_per_gpu": TOKENS}  # fmt: skip
    if lora:
        model = "actor_rollout_ref.model"
        chosen |= {f"{model}.lora_rank": lora, f"{model}.lora_alpha": lora,
                   "actor_rollout_ref.rollout.lora_as_adapter": "true"}  # fmt: skip
    return [f"{key}={value}" for key, value in chosen.items()]


def served_stages(trained: Stage, model: Path, prompt: Prompt, lora: int, out: Path) -> list[Stage]:
    """Export of a trained model, and its answers in vLLM's server."""
    actor = trained.result / f"global_step_{trained.training[1]}" / "actor"
    merged = Stage("merged", python(
        "verl.model_merger", "merge", "--local_dir", actor, "--target_dir", out / "merged",
    ), out / "merged", (trained,))  # fmt: skip
    served = Stage("served", python(
        "examples.pretrained.gsm8k.serve", "--model", model, "--merged", out / "merged", "--questions",
        out / "data" / "test.parquet", "--limit", SERVED, "--length", PROMPT_LIMIT + prompt.limit, "--max-new-tokens",
        prompt.limit, "--out", out / "served.json",
        *(["--adapter", actor / "lora_adapter"] if lora else []),
    ), out / "served.json", (merged,))  # fmt: skip
    return [merged, served]


def criteria_of(
    by_reward: tuple[Sequence[float], float], by_last_number: tuple[Sequence[float], float], seconds: float
) -> dict[str, Criterion]:
    """Criteria by name: for both accuracies the points that each seed has gained and the control has moved; seconds of
    the longest run."""
    criteria = {}
    for name, (gains, _), how, least in (("gain", by_reward, "the reward", GAIN_POINTS),
                                         ("gain_last_number", by_last_number, "the last number", GAIN_LAST_NUMBER)):
        what = f"accuracy by {how} gained on {VALIDATION_SIZE} test questions"
        criteria[name] = grpo.gain_criterion(what, gains, least)
    moved = [by_reward[1], by_last_number[1]]
    return criteria | {
        "control": Criterion("accuracies gained by the control (learning rate 0)",
                             f"{moved[0]:.1f} and {moved[1]:.1f} points", "0", moved == [0, 0]),
        "seconds": grpo.time_criterion(seconds, TIME_S),
    }  # fmt: skip


def served_table(served: Mapping[str, Any]) -> Table:
    """A row for each served model."""
    table = Table("", "right by the reward %", "by the last number %", "answers as merged %",
                  title=f"{served['questions']} test questions in vLLM's server, greedy decoding")  # fmt: skip
    for name, row in served["models"].items():
        table.add_row(name, *(f"{100 * row[share]:.1f}" for share in ("acc", "last_number", "as_merged")))
    return table


def main(argv: list[str] | None = None) -> int:
    """Fetch, train, serve and report; returns the exit code, 0 even if a criterion is missed."""
    parser = grpo.options(__doc__, STEPS, None, ROOT / "outputs" / "pretrained_gsm8k")
    fetch.add_gsm8k(parser)
    parser.add_argument("--lora", type=int, default=0, metavar="RANK", help="train adapters of this rank")
    parser.add_argument("--prompt", choices=CANDIDATES, default=CHOSEN)
    args = grpo.parse(parser, argv)
    if args.lr is None:
        args.lr = LORA_LR if args.lora else LR
    begin("GRPO on GSM8K")
    gsm8k, data, prompt = fetch.gsm8k_folder(args.gsm8k), args.out / "data", CANDIDATES[args.prompt]
    model = fetch.model_folder(args.model, name=MODEL)
    files = b"".join((gsm8k / name).read_bytes() for name in ("train.jsonl", "test.jsonl"))
    given = f"{prompt} {hashlib.sha256(files).hexdigest()}"
    more = [*settings(prompt, args.lora), *args.more]

    def stage_of(run: Path, steps: int, seed: int, lr: float) -> Stage:
        command = grpo.training_command(model, source(data), run, steps, seed, *more, lr=lr)
        return Stage(run.name, command, run, (), partial(write, gsm8k, data, prompt), given, (run, steps))

    runs = grpo.runs_of(args, CONTROL_STEPS, stage_of)
    further = served_stages(next(iter(runs.values())), model, prompt, args.lora, args.out)
    if not run_stages([*runs.values(), *further], args.out, describe):
        return 1
    seconds = [record_of(run, args.out)["seconds"] for run in runs.values()]
    shares = {heading: grpo.shares_of(runs, metric) for heading, metric in COLUMNS.items()}
    accuracies = dict(zip(("acc", "last_number"), map(grpo.percentages, shares.values()), strict=False))
    gains = {name: grpo.gained(values) for name, values in accuracies.items()}
    criteria = criteria_of(*gains.values(), max(seconds))
    steps = {name: median(by_step(run.result, "timing_s/step").values()) for name, run in runs.items()}
    served = json.loads((args.out / "served.json").read_text())
    result = {"model": str(args.model or fetch.NOTE), "prompt": args.prompt, "lora": args.lora,
              "accuracy": accuracies, "gains": {name: each for name, (each, _) in gains.items()},
              "control": {name: moved for name, (_, moved) in gains.items()}, "seconds": seconds,
              "step_seconds": steps, "served": served}  # fmt: skip
    report(args.out, result, criteria, f"GRPO on GSM8K, {VALIDATION_SIZE} test questions", shares)
    grpo.show_pages(runs, ACCURACY, args.out / "curves.png")
    console.print(served_table(served))
    shown = ", ".join(f"{name}: {value:.1f}" for name, value in steps.items())
    console.print(f"seconds of a step, median: {shown}", highlight=False)
    if not args.model:
        console.print(f"The model: {fetch.NOTE}.")
    return 0


if __name__ == "__main__":
    sys.exit(main())
