"""Steps of TRL's GRPOTrainer on a folder of benchmarks.rl_whole_step; its process holds nothing else."""

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


def parse(argv: list[str] | None = None) -> argparse.Namespace:
    """The options."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--out", type=Path, required=True)
    for name in ("steps", "prompts", "samples", "limit"):
        parser.add_argument(f"--{name}", type=int, required=True)
    parser.add_argument("--to-the-limit", action="store_true")
    return parser.parse_args(argv)


def main() -> None:
    """Train `--steps` steps; write their seconds and tokens to `--out`."""
    from datasets import Dataset  # requirements/bench.txt
    from trl import GRPOConfig, GRPOTrainer

    args = parse()
    score = load_extern_object(str(args.folder / "reward.py"), "compute_score")
    prompts = [row[0]["content"] for row in pd.read_parquet(args.folder / "prompts.parquet")["prompt"]]
    clock = Clock()
    config = GRPOConfig(
        output_dir=str(args.out.with_suffix("")), per_device_train_batch_size=args.prompts * args.samples,
        num_generations=args.samples, max_completion_length=args.limit, max_steps=args.steps, learning_rate=1e-6,
        beta=0.0, temperature=1.0, use_cpu=True, bf16=False, gradient_checkpointing=False, report_to="none",
        save_strategy="no", logging_steps=1, disable_tqdm=True,
        generation_kwargs={"min_new_tokens": args.limit} if args.to_the_limit else None,
    )  # fmt: skip
    trainer = GRPOTrainer(
        model=str(args.folder / "model"), args=config, train_dataset=Dataset.from_dict({"prompt": prompts}),
        processing_class=AutoTokenizer.from_pretrained(args.folder / "model"), callbacks=[clock],
        reward_funcs=lambda completions, **kwargs: [score("", text, "") for text in completions],
    )  # fmt: skip
    trainer.train()
    args.out.write_text(json.dumps({"seconds": clock.seconds, "tokens": clock.tokens}))


if __name__ == "__main__":
    main()
