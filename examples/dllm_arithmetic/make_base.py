"""Makes the start of both trainings: a small Llama that answers most questions, and the questions.

    python -m examples.dllm_arithmetic.make_base --out DIR [--seed 0] [--steps N]

Trained by plain next-token loss on worked answers, in plain torch with Muon (as the SPD demo's target): the trainers
fine-tune, this is a model from scratch. OUT/model is the model, OUT/*.parquet are the questions (corpus.py); those of
val.parquet and test.parquet are excluded from its training.
"""

import argparse
import random
import shutil
from collections.abc import Callable, Mapping, Set
from pathlib import Path

import pandas as pd

from examples.demo_runner import make_progress
from examples.dllm_arithmetic import corpus
from examples.spd_arithmetic import train_models
from examples.spd_arithmetic.model import Shape
from examples.spd_arithmetic.train_pair import publish
from verl.utils.fs import output_folder

STEPS = 350


def draw_row(rng: random.Random, ids: dict[str, int], held_out: Set[str]) -> train_models.Row:
    """Instruction, none of `held_out`, and worked answer; the answer and its EOS count."""
    problem = corpus.problems.sample_problem(rng)
    while corpus.instruction_of(problem) in held_out:
        problem = corpus.problems.sample_problem(rng)
    question = [ids[word] for word in corpus.instruction_of(problem).split()]
    answer = [ids[word] for word in [*corpus.worked_answer(problem).split(), corpus.EOS]]
    return question + answer, [train_models.IGNORED] * len(question) + answer


def questions_of(tables: Mapping[str, pd.DataFrame], *splits: str) -> frozenset[str]:
    """The instructions of these splits."""
    return frozenset(question for split in splits for question in tables[split]["instruction"])


def write_base(
    directory: Path, seed: int, steps: int, held_out: Set[str], on_step: Callable[[int, float], None]
) -> None:
    """0.9 M parameters with 4 layers, of width 128."""
    ids = corpus.vocabulary()
    config = train_models.TrainConfig(Shape(len(ids), dim=128, layers=4, heads=4, ff=384), steps)
    trained = train_models.train(config, lambda rng: draw_row(rng, ids, held_out), seed, on_step)
    shutil.rmtree(directory, ignore_errors=True)  # of an earlier run
    publish(trained, directory)
    corpus.build_tokenizer().save_pretrained(directory)


def main(argv: list[str] | None = None) -> None:
    """Write model and questions."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=output_folder, required=True)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--steps", type=int, default=STEPS)
    args = parser.parse_args(argv)
    tables = corpus.draw(corpus.COUNTS, args.seed)
    held_out = questions_of(tables, "val", "test")
    with make_progress(counted=True) as progress:
        task = progress.add_task("SFT of the base", total=args.steps)
        write_base(args.out / "model", args.seed, args.steps, held_out, lambda step, loss: progress.update(
            task, completed=step, description=f"SFT of the base, loss {loss:.3f}"
        ))  # fmt: skip
    corpus.write(tables, args.out)


if __name__ == "__main__":
    main()
