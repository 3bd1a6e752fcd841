"""Makes the demo's start: a small causal LM tuned on answers of two kinds (SFT), and questions (parquet).

    python -m examples.grpo_arithmetic.make_start --out DIR [--seed 0] [--sft-steps N]

The model is trained in plain torch. Some training answers are the bare result, the others show their work: it mostly
guesses, and is more often correct when it shows its work. A start that the same arguments made before is reused.
"""

import argparse
import hashlib
import json
import os
import random
import shutil
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pandas as pd
from loguru import logger

from examples.demo_runner import make_progress
from examples.spd_arithmetic import corpus, train_models, train_pair
from examples.spd_arithmetic.questions import draw_questions
from examples.spd_arithmetic.tokenizer import EOS, Encoder, build_tokenizer
from verl.utils.fs import output_folder

SFT_STEPS = 460
# Of the answers. Batches group rows by length, so that a short row's tokens weigh more: the model guesses more often.
BARE_SHARE = 0.35
DRILL_SHARE = 0.15  # of the rows: plain calculations
COUNTS = {"train": 8000, "val": 400, "test": 0}
CHAT_TEMPLATE = "{% for message in messages %}{{ message['content'] }}{% endfor %}"  # the model knows questions only
DATA_SOURCE = "word_problems"
OnStep = Callable[[int, float], None]
"""Called with the number of a training step and its loss."""


def parse(argv: list[str] | None, doc: str = __doc__, sft_steps: int = SFT_STEPS) -> argparse.Namespace:
    """The command-line options of a script that makes a demo's start."""
    parser = argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=output_folder, required=True)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--sft-steps", type=int, default=sft_steps)
    return parser.parse_args(argv)


def main(argv: list[str] | None = None) -> Path:
    """Make the start unless it exists; returns its folder."""
    args = parse(argv)

    def write(folder: Path, on_step: OnStep) -> None:
        write_model(folder / "model", args.seed, args.sft_steps, on_step)
        write_questions(folder, args.seed)

    return make_once(args, [train_pair.HERE / "questions.py"], write)


def make_once(args: argparse.Namespace, code: Sequence[Path], write: Callable[[Path, OnStep], None]) -> Path:
    """Write a start by `write` to --out, unless it was made there with the same arguments and code; returns its folder.

    `code`: files that it depends on besides this one and those that train models.
    """
    digest = hashlib.sha256(f"{args.seed} {args.sft_steps}".encode())
    for file in (*(train_pair.HERE / name for name in train_pair.CODE), *code, Path(__file__)):
        digest.update(file.read_bytes())
    key, record = digest.hexdigest()[:16], args.out / "start.json"
    if record.exists() and json.loads(record.read_text())["fingerprint"] == key:
        logger.info("{} was made with the same arguments and code: reused", args.out)
        return args.out
    unfinished = args.out.with_name(args.out.name + ".partial")
    shutil.rmtree(unfinished, ignore_errors=True)
    unfinished.mkdir(parents=True)
    with make_progress(counted=True) as progress:
        task = progress.add_task("SFT of the start", total=args.sft_steps)
        write(unfinished, lambda step, _: progress.update(task, completed=step))
    (unfinished / "start.json").write_text(json.dumps({"fingerprint": key, "sft_steps": args.sft_steps}))
    shutil.rmtree(args.out, ignore_errors=True)
    os.replace(unfinished, args.out)
    return args.out


def write_model(directory: Path, seed: int, steps: int, on_step: OnStep) -> None:
    """0.7 M parameters (4 layers, width 128), with the tokenizer and a chat template."""
    encoder = Encoder()
    config = train_models.target_config(len(encoder.tokens), steps)
    model = train_models.train(config, lambda rng: training_row(rng, encoder), seed, on_step)
    train_pair.publish(model, directory)
    tokenizer = build_tokenizer()
    tokenizer.chat_template = CHAT_TEMPLATE
    tokenizer.save_pretrained(directory)


def training_row(rng: random.Random, encoder: Encoder) -> train_models.Row:
    """A question with a bare or a worked answer, or now and then plain calculations."""
    if rng.random() < DRILL_SHARE:
        return train_models.drill_row(rng, encoder)
    problem = corpus.sample_problem(rng)
    if rng.random() < BARE_SHARE:
        words = ["the", "answer", "is", str(corpus.solve(problem))]
    else:
        words, _ = corpus.render(corpus.answer_slots(problem), corpus.house_style)
    question, answer = encoder.encode(corpus.question_text(problem).split()), encoder.encode([*words, EOS])
    return question + answer, [train_models.IGNORED] * len(question) + answer


def rl_row(source: str, split: str, index: int, question: str, truth: str) -> dict[str, Any]:
    """A question in the RL data format."""
    return {
        "data_source": source, "ability": "math", "prompt": [{"role": "user", "content": question}],
        "reward_model": {"style": "rule", "ground_truth": truth}, "extra_info": {"index": index, "split": split},
    }  # fmt: skip


def write_questions(folder: Path, seed: int, counts: Mapping[str, int] = COUNTS) -> None:
    """train.parquet and val.parquet in the RL data format; no question is in both."""
    for split, questions in draw_questions(counts, seed, build_tokenizer()).items():
        rows = [rl_row(DATA_SOURCE, split, i, q.question, q.ground_truth) for i, q in enumerate(questions)]
        if rows:
            pd.DataFrame(rows).to_parquet(folder / f"{split}.parquet")


if __name__ == "__main__":
    main()
