"""A scorer on questions unlike those that it was trained on: longer chains, other operations, other wordings.

    python -m benchmarks.run spd_transfer

Takes the test bed of `make demo`. For each split of the questions, one scorer is trained on blocks of one side of it
and one on as many blocks of both sides. Each one's threshold is chosen on validation questions like those of its
training; test questions of both sides are measured.
"""

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pandas as pd

from benchmarks.harness import Row, say
from examples.demo_runner import ROOT, run_logged
from examples.spd_arithmetic.corpus import ITEMS
from examples.spd_arithmetic.demo import (
    DTYPE,
    HARMLESS_SHARES,
    LIMIT,
    MAX_VAL_DROP,
    STEPS,
    saved_scorer,
    training_command,
)
from verl.utils.jsonl import read_objects

BED = ROOT / "outputs" / "spd_arithmetic" / "testbed"
OUT = ROOT / "outputs" / "spd_transfer"


def _steps(text: str) -> int:
    return text.count(" .") + ("together" in text)


def _item(text: str) -> str:
    return text.split("how many ")[1].split()[0]


SIDES: dict[str, Callable[[str], bool]] = {
    "chains of up to 3 steps": lambda text: _steps(text) <= 3,
    "no sharing and halving": lambda text: not {"gives", "gets", "half"} & set(text.split()),
    "half of the items": lambda text: _item(text) in ITEMS[::2],  # the draft leaves the target's wording at some only
}
"""Which questions belong to the side that the scorer is trained on, by their text."""


def trained(folder: Path, blocks: pd.DataFrame, metadata: pd.DataFrame) -> Path:
    """A scorer trained by GRPO on these blocks, or the one that an earlier run left."""
    scorer = saved_scorer(folder / "run", STEPS)
    if not scorer.exists():
        folder.mkdir(parents=True, exist_ok=True)
        blocks.to_parquet(folder / "blocks_train.parquet", write_page_checksum=True)
        metadata.to_parquet(folder / "metadata_train.parquet", write_page_checksum=True)
        for model in ("target", "draft"):
            if not (folder / model).exists():
                (folder / model).symlink_to((BED / model).resolve(), target_is_directory=True)
        command = training_command(folder, folder / "run", OUT / "completions.sqlite3", STEPS, 0)
        run_logged(command, folder / "training.log")
    return scorer


def evaluated(folder: Path, scorer: Path, side: str, validation: list[dict], test: list[dict]) -> dict[str, Any]:
    """Rows of the evaluation by rule: `scorer` at the threshold that the validation questions choose, and `exact`."""
    out = folder / side
    out.mkdir(parents=True, exist_ok=True)
    for name, questions in (("validation", validation), ("test", test)):
        (out / f"{name}.jsonl").write_text("".join(json.dumps(question) + "\n" for question in questions))
    known = {question["question_id"] for question in validation}
    labels = [label for _, label in read_objects(BED / "harm_labels_val.jsonl") if label["question_id"] in known]
    (out / "labels.jsonl").write_text("".join(json.dumps(label) + "\n" for label in labels))
    run_logged([
        sys.executable, "scripts/eval_spd_scorer.py", "--target", str(BED / "target"), "--draft", str(BED / "draft"),
        "--scorer", str(scorer), "--questions", str(out / "test.jsonl"),
        "--val-questions", str(out / "validation.jsonl"), "--val-harm-labels", str(out / "labels.jsonl"),
        "--harm-labels", str(BED / "harm_labels.jsonl"), "--out", str(out),
        "--max-new-tokens", str(LIMIT), "--dtype", DTYPE, "--max-val-drop", MAX_VAL_DROP, "--margins", "4",
        "--typicals", "0.045", "--harmless-shares", *HARMLESS_SHARES["target"],
    ], out / "evaluation.log")  # fmt: skip
    return {row["rule"]: row for row in json.loads((out / "evaluation.json").read_text())["rows"]}


def run() -> list[Row]:
    """For each split, scorer and side of the test questions: accepted tokens over exact match's, and the drop."""
    if not (BED / "testbed.json").exists():
        sys.exit(f"{BED} is not there: `make demo` makes the test bed that this benchmark takes")
    fingerprint = json.loads((BED / "testbed.json").read_text())["fingerprint"]
    blocks, metadata = (pd.read_parquet(BED / f"{kind}_train.parquet") for kind in ("blocks", "metadata"))
    text_of = dict(zip(metadata["question_id"], metadata["question"], strict=True))
    validation, test = (
        [question for _, question in read_objects(BED / f"questions_{split}.jsonl")] for split in ("val", "test")
    )
    rows = []
    for name, inside in SIDES.items():
        mine = blocks[blocks["question_id"].map(lambda q, inside=inside: inside(text_of[q]))]
        like = [question for question in validation if inside(question["question"])]
        say(f"{name}: {len(mine)} of {len(blocks)} blocks, {len(like)} of {len(validation)} validation questions")
        for scorer, chosen, asked in (("narrow", mine, like), ("mixed", blocks.sample(len(mine), random_state=0),
                                                               validation)):  # fmt: skip
            # Scorers of another test bed are not reused.
            folder = OUT / fingerprint[:12] / name.replace(" ", "_") / scorer
            saved = trained(folder, chosen, metadata)
            for side, questions in (("inside", [q for q in test if inside(q["question"])]),
                                    ("outside", [q for q in test if not inside(q["question"])])):  # fmt: skip
                rules = evaluated(folder, saved, side, asked, questions)
                gain = rules["scorer"]["accepted_per_forward"] / rules["exact"]["accepted_per_forward"]
                for kind, value, error, unit in (
                    ("gain", gain, 0.0, "times exact match's accepted tokens"),
                    ("drop", 100 * rules["scorer"]["drop"], 196 * rules["scorer"]["drop_se"], "points"),
                ):
                    label, unit = f"{name}: {scorer} scorer, {side}, {kind}", f"{unit}, {len(questions)} questions"
                    rows.append(Row(label, value, unit, value - error, value + error, 1))
    return rows
