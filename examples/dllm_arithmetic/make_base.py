"""Makes what both trainings of the demo start from: a small Llama that answers most questions, and the questions.

    python -m examples.dllm_arithmetic.make_base --out DIR [--seed 0] [--steps N]

Trained by plain next-token loss on worked answers, in plain torch with Muon (as the SPD demo's target): a model from
scratch is no matter of fine-tuning. OUT/model is the model, OUT/*.parquet are the questions (corpus.py).
"""

from __future__ import annotations

import argparse
import random
import shutil
from collections.abc import Callable
from pathlib import Path

from examples.dllm_arithmetic import corpus
from examples.running import make_progress
from examples.spd_arithmetic import train_models
from examples.spd_arithmetic.model import Shape
from examples.spd_arithmetic.train_pair import publish

STEPS = 500


def draw_row(rng: random.Random, ids: dict[str, int]) -> train_models.Row:
    """Instruction and worked answer; the answer and its EOS count."""
    problem = corpus.problems.sample_problem(rng)
    asked = [ids[word] for word in corpus.instruction_of(problem).split()]
    said = [ids[word] for word in [*corpus.worked_answer(problem).split(), corpus.EOS]]
    return asked + said, [train_models.IGNORED] * len(asked) + said


def write_base(directory: Path, seed: int, steps: int, on_step: Callable[[int, float], None]) -> None:
    """0.9 M parameters: 4 layers of width 128."""
    ids = corpus.vocabulary()
    config = train_models.TrainConfig(Shape(len(ids), dim=128, layers=4, heads=4, ff=384), steps)
    trained = train_models.train(config, lambda rng: draw_row(rng, ids), seed, on_step)
    shutil.rmtree(directory, ignore_errors=True)  # of an earlier run
    publish(trained, directory)
    corpus.build_tokenizer().save_pretrained(directory)


def main(argv: list[str] | None = None) -> None:
    """Write model and questions."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--steps", type=int, default=STEPS)
    args = parser.parse_args(argv)
    args.out.mkdir(parents=True, exist_ok=True)
    with make_progress(counted=True) as progress:
        task = progress.add_task("SFT of the base", total=args.steps)
        write_base(args.out / "model", args.seed, args.steps, lambda step, loss: progress.update(
            task, completed=step, description=f"SFT of the base, loss {loss:.3f}"
        ))  # fmt: skip
    corpus.main(["--out", str(args.out), "--seed", str(args.seed)])


if __name__ == "__main__":
    main()
