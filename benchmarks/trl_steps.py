"""Steps of TRL's GRPOTrainer on a folder with model/, prompts.parquet and reward.py; its process holds nothing else."""

import argparse
import json
import time
from pathlib import Path

import pandas as pd
from transformers import AutoTokenizer, TrainerCallback

from verl.utils.import_utils import load_extern_object


class Clock(TrainerCallback):
    """Seconds from the beginning of each step to its end, generation included, and mean tokens of its answers."""

    def __init__(self) -> None:
        self.seconds: list[float] = []
        self.tokens: list[float] = []

    def on_step_begin(self, args, state, control, **kwargs) -> None:
        self.begun = time.perf_counter()

    def on_step_end(self, args, state, control, **kwargs) -> None:
        self.seconds.append(time.perf_counter() - self.begun)

    def on_log(self, args, state, control, logs, **kwargs) -> None:
        if "completions/mean_length" in logs:  # not in the summary at the end
            self.tokens.append(logs["completions/mean_length"])


def questions_of(rows: pd.DataFrame) -> tuple[list[str], list[str]]:
    """Prompts and ground truths of rows in the RL data format."""
    return [row[0]["content"] for row in rows["prompt"]], [row["ground_truth"] for row in rows["reward_model"]]


def parse(argv: list[str] | None = None) -> argparse.Namespace:
    """The options."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--out", type=Path, required=True)
    for name in ("steps", "prompts", "samples", "limit"):
        parser.add_argument(f"--{name}", type=int, required=True)
    parser.add_argument("--to-the-limit", action="store_true")
    parser.add_argument("--chat", action="store_true", help="prompts are conversations for the model's chat template")
    parser.add_argument("--rows", type=int, help="samples that are forwarded at a time; default: all of a step")
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--lr", type=float, default=1e-6)
    parser.add_argument("--temperature", type=float, default=1.0)
    return parser.parse_args(argv)


def main() -> None:
    """Train `--steps` steps; write their seconds and tokens to `--out`."""
    from datasets import Dataset  # requirements/bench.txt
    from trl import GRPOConfig, GRPOTrainer

    args = parse()
    score = load_extern_object(str(args.folder / "reward.py"), "compute_score")
    prompts, truths = questions_of(pd.read_parquet(args.folder / "prompts.parquet"))
    clock = Clock()
    if args.chat:
        prompts = [list(prompt) for prompt in pd.read_parquet(args.folder / "prompts.parquet")["prompt"]]
    rows = args.rows or args.prompts * args.samples
    config = GRPOConfig(
        output_dir=str(args.out.with_suffix("")), per_device_train_batch_size=rows,
        gradient_accumulation_steps=args.prompts * args.samples // rows,
        num_generations=args.samples, max_completion_length=args.limit, max_steps=args.steps, learning_rate=args.lr,
        lr_scheduler_type="constant",
        beta=0.0, temperature=args.temperature, use_cpu=True, bf16=False,
        model_init_kwargs={"dtype": args.dtype}, gradient_checkpointing=False, report_to="none",
        save_strategy="no", logging_steps=1, disable_tqdm=True,
        generation_kwargs={"min_new_tokens": args.limit} if args.to_the_limit else None,
    )  # fmt: skip
    trainer = GRPOTrainer(
        model=str(args.folder / "model"),
        args=config,
        processing_class=AutoTokenizer.from_pretrained(args.folder / "model"),
        train_dataset=Dataset.from_dict({"prompt": prompts, "truth": truths}),
        callbacks=[clock],
        reward_funcs=lambda completions, truth, **kwargs: [
            score("", answer if isinstance(answer, str) else answer[0]["content"], right)
            for answer, right in zip(completions, truth, strict=True)
        ],
    )
    trainer.train()
    args.out.write_text(json.dumps({"seconds": clock.seconds, "tokens": clock.tokens}))


if __name__ == "__main__":
    main()
