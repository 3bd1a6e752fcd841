"""Completions that a training asks its server for: every distinct one once, in two epochs of the real command."""

import json
import os
import sys
import tempfile
from collections.abc import Iterable
from pathlib import Path

import pandas as pd

from benchmarks.harness import Row, say
from examples.demo_runner import ROOT, run_logged
from examples.spd_arithmetic.demo import LIMIT

TESTBED = ROOT / "outputs" / "spd_arithmetic" / "testbed"
SMALL_TESTBED = ROOT / "outputs" / "benchmarks" / "testbed"
# A pair trained for fewer steps than the demo's: it errs more, so that its blocks have more to ask for.
SMALL = {
    "target-steps": 200, "draft-steps": 140, "n-train-questions": 240, "n-val-questions": 20, "n-test-questions": 20,
    "n-train-blocks": 1000, "n-val-blocks": 20, "n-harm-blocks": 3,
}
BLOCKS, BATCH, EPOCHS = 960, 64, 2
# The run has a server, a start and a reward of its own, whatever this shell is set up for.
OTHERS = ("SPD_", "REWARD_", "ADAPTER_PATH", "TOKENIZER_PATH", "MODEL_PATH")


def testbed() -> Path:
    """The demo's test bed where it is there, else a small one, made here once."""
    if (TESTBED / "testbed.json").exists():
        return TESTBED
    make = [sys.executable, "-m", "examples.spd_arithmetic.prepare_blocks", "--out", str(SMALL_TESTBED)]
    make += [f"--{name}={value}" for name, value in SMALL.items()]
    say(f"{TESTBED} is not there: a small one is made in {SMALL_TESTBED}, which takes minutes the first time")
    run_logged([*make, f"--max-new-tokens={LIMIT}"], SMALL_TESTBED.with_suffix(".log"))
    return SMALL_TESTBED


def train(bed: Path, out: Path) -> list[str]:
    """Train an untrained scorer on some of the bed's blocks with an empty store; the lines of metrics.jsonl."""
    blocks = pd.read_parquet(bed / "blocks_train.parquet").sample(BLOCKS, random_state=0)
    blocks.to_parquet(out / "blocks.parquet")
    command = [sys.executable, "train_spd_scorer.py", "--model", str(bed / "target")]
    command += ["--blocks", str(out / "blocks.parquet"), "--metadata", str(bed / "metadata_train.parquet")]
    command += ["--output-dir", str(out / "run"), "trainer.device=cpu", f"trainer.total_epochs={EPOCHS}"]
    command += [f"data.train_batch_size={BATCH}", f"spd.rollout.max_tokens={LIMIT}", "data.seed=0", "spd.seed=0"]
    command += ["trainer.logger=[]", "trainer.report=false"]
    env = {name: value for name, value in os.environ.items() if not name.startswith(OTHERS)}
    run_logged(command, out / "train.log", env=env)
    return (out / "run" / "metrics.jsonl").read_text().splitlines()


def epoch_shares(lines: Iterable[str], epochs: int) -> list[tuple[float, list[float]]]:
    """Of each epoch: completions asked / samples (n x prompts), of the entire epoch and of each of its steps."""
    counted: list[list[tuple[float, float]]] = [[] for _ in range(epochs)]
    for line in lines:
        data = json.loads(line)["data"]
        if "spd/completions/asked" in data:
            pair = (data["spd/completions/asked"], data["training/requested_samples"])
            counted[data["training/epoch"]].append(pair)
    return [(sum(asked for asked, _ in steps) / sum(samples for _, samples in steps),
             [asked / samples for asked, samples in steps]) for steps in counted]


def run() -> list[Row]:
    """The shares of both epochs, and how often the test bed's target is right: degenerate answers would be no test."""
    bed = testbed()
    with tempfile.TemporaryDirectory() as scratch:
        shares = epoch_shares(train(bed, Path(scratch)), EPOCHS)
    accuracy = json.loads((bed / "testbed.json").read_text())["figures"]["target_accuracy"]
    unit = "of n x prompts, whole epoch; range: its steps"
    named = zip(("first", "second"), shares, strict=True)
    return [
        *(Row(f"completions_{name}_epoch", whole, unit, min(steps), max(steps), len(steps))
          for name, (whole, steps) in named),
        Row("completions_target_accuracy", accuracy, f"of {bed.relative_to(ROOT)}", accuracy, accuracy, 1),
    ]
