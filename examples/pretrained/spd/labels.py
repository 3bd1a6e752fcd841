"""Labels of mismatches: the target's answers to questions, and what it answers if a differing draft token is accepted.

    python -m examples.pretrained.spd.labels --questions train.jsonl --skip 300 --count 1500 --target DIR --draft DIR \
        --out labels/train.parquet [--wrong]

Each row of OUT is an answer of the target: its own one to a question (`parent` -1), or the one that it gives if the
draft's token stands at `position` of the answer in row `parent`. A mismatch in a right answer is harmless if the answer
after it is right too. Answers that OUT holds are not asked for again: the command resumes, and goes on where another
machine stopped.
"""

import argparse
import json
import os
import random
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
from transformers import AutoTokenizer

from examples.demo_runner import json_rows
from examples.spd_arithmetic import vllm_tasks
from examples.spd_arithmetic.pair import PairFiles, end_tokens
from examples.spd_arithmetic.questions import PromptStyle, is_right
from verl.data.fingerprint import model_dir_fingerprint
from verl.utils.accelerator import default_dtype, get_device_name
from verl.utils.fs import output_file

SYSTEM = ("You solve math word problems. Be brief: write at most five short lines of calculation, then end with "
          "'The answer is N.' where N is a number.")
FEW_SHOT = Path(__file__).with_name("few_shot.jsonl")
LIMIT = 200  # tokens of an answer
PART = 100  # questions that are asked again when the command is killed
SCHEMA = pa.schema([
    ("question", pa.int32()), ("parent", pa.int32()), ("position", pa.int16()), ("ids", pa.list_(pa.int32())),
    ("draft_ids", pa.list_(pa.int32())), ("right", pa.bool_()),
])  # fmt: skip
"""question: its line in the file of questions, from 0. ids: token ids of the answer from `position` on, the draft's
first. draft_ids: the draft's most likely token in place of each of them; empty for answers after a mismatch."""
MODELS = "models.json"  # next to OUT: the fingerprints of the models that made the labels

Row = dict[str, Any]


def drawn(count: int, skip: int, lines: int) -> list[int]:
    """`count` of the file's lines, after the first `skip` of an order that is the same in every run."""
    return random.Random(0).sample(range(lines), lines)[skip : skip + count]


def prompts_of(asked: Sequence[dict[str, str]], numbers: Sequence[int], tokenizer: Any) -> dict[int, list[int]]:
    """Prompt ids of the lines of these numbers."""
    texts = [asked[n]["question"].strip() for n in numbers]
    return dict(zip(numbers, PromptStyle("", SYSTEM, FEW_SHOT).prompts(texts, tokenizer), strict=True))


def read_rows(file: Path) -> list[Row]:
    """The rows of a file of labels; none if it does not exist."""
    return pq.read_table(file).to_pylist() if file.exists() else []


def unlabelled(rows: Sequence[Row], wrong: bool) -> list[int]:
    """The rows of own answers whose mismatches are to be labelled and are not; of wrong answers only if `wrong`."""
    above = {row["parent"] for row in rows}
    return [n for n, row in enumerate(rows) if row["parent"] < 0 and n not in above and (row["right"] or wrong)
            and row["ids"] != row["draft_ids"]]  # fmt: skip


@dataclass(frozen=True)
class Labeller:
    """The pair in vLLM, and the questions' prompts and answers."""

    files: PairFiles
    prompts: dict[int, list[int]]
    truths: dict[int, str]
    decode: Callable[[Sequence[int]], str]

    def after_mismatches(self, rows: Sequence[Row], parents: Sequence[int]) -> list[Row]:
        """What the target answers after each mismatch of the answers in these rows."""
        ends = end_tokens(self.files.folder)
        asked = [(n, row["question"], at, [*row["ids"][:at], d]) for n, row in ((n, rows[n]) for n in parents)
                 for at, (t, d) in enumerate(zip(row["ids"], row["draft_ids"], strict=True)) if t != d]  # fmt: skip
        more = vllm_tasks.continued(
            self.files, "target", [self.prompts[question] + text for _, question, _, text in asked],
            [0 if text[-1] in ends else LIMIT - len(text) for *_, text in asked],
        )  # fmt: skip
        whole = [text + ids for (*_, text), ids in zip(asked, more, strict=True)]
        return [
            {"question": question, "parent": n, "position": at, "ids": ids[at:], "draft_ids": [],
             "right": is_right(ids, self.truths[question], self.decode, ends)}
            for (n, question, at, _), ids in zip(asked, whole, strict=True)
        ]  # fmt: skip

    def own_answers(self, questions: Sequence[int]) -> list[Row]:
        """The target's own answers, with the draft's predictions along them."""
        ends, prompts = end_tokens(self.files.folder), [self.prompts[q] for q in questions]
        answers = vllm_tasks.continued(self.files, "target", prompts, [LIMIT] * len(prompts))
        # Of prompts in the prefix cache no log-probs are computed.
        vllm_tasks.continued(self.files, "draft", prompts, [1] * len(prompts))
        predicted = vllm_tasks.predictions(self.files, "draft", list(zip(prompts, answers, strict=True)))
        return [{"question": q, "parent": -1, "position": 0, "ids": ids, "draft_ids": drafted[: len(ids)],
                 "right": is_right(ids, self.truths[q], self.decode, ends)}
                for q, ids, (drafted, _) in zip(questions, answers, predicted, strict=True)]  # fmt: skip


def write_rows(rows: Sequence[Row], file: Path) -> None:
    """Replace the file by one with these rows."""
    pq.write_table(pa.Table.from_pylist(rows, SCHEMA), file.with_suffix(".partial"), compression="zstd")
    os.replace(file.with_suffix(".partial"), file)


def made_by(folder: Path, target: Path, draft: Path) -> bool | None:
    """Whether these models made the labels in the folder; None where there are none."""
    file = folder / MODELS
    return json.loads(file.read_text()) == fingerprints(target, draft) if file.exists() else None


def fingerprints(target: Path, draft: Path) -> dict[str, str]:
    """What MODELS holds."""
    return {"target": model_dir_fingerprint(target), "draft": model_dir_fingerprint(draft)}


def check_models(folder: Path, target: Path, draft: Path) -> None:
    """Record the models of the folder's labels; SystemExit if other models made those that are there."""
    if made_by(folder, target, draft) is False:
        raise SystemExit(f"the labels in {folder} are of other models: name another folder with --out")
    (folder / MODELS).write_text(json.dumps(fingerprints(target, draft), indent=1) + "\n")


def main(argv: Sequence[str] | None = None) -> None:
    """Label the questions that OUT lacks."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    for name in ("target", "draft"):
        add(f"--{name}", type=Path, required=True)
    add("--questions", type=Path, required=True, help="jsonl in GSM8K's format")
    add("--out", type=output_file, required=True)
    add("--skip", type=int, default=0, help="questions to leave out, such as those of another split")
    add("--count", type=int, required=True, help="questions")
    add("--wrong", action="store_true", help="label mismatches in wrong answers too")
    args = parser.parse_args(argv)
    args.out.parent.mkdir(parents=True, exist_ok=True)
    check_models(args.out.parent, args.target, args.draft)
    tokenizer = AutoTokenizer.from_pretrained(args.target)
    asked, rows = json_rows(args.questions), read_rows(args.out)
    known, half_done = {row["question"] for row in rows}, {rows[n]["question"] for n in unlabelled(rows, args.wrong)}
    numbers = [n for n in drawn(args.count, args.skip, len(asked)) if n not in known or n in half_done]
    prompts, truths = prompts_of(asked, numbers, tokenizer), {n: asked[n]["answer"] for n in numbers}
    with tempfile.TemporaryDirectory() as folder:
        for name in ("target", "draft"):
            (Path(folder) / name).symlink_to(getattr(args, name).resolve())
        device = get_device_name()
        files = PairFiles(Path(folder), device, len(os.sched_getaffinity(0)), 8, LIMIT, PART, "vllm",
                          max(map(len, prompts.values()), default=0), dtype=default_dtype(device))  # fmt: skip
        labeller = Labeller(files, prompts, truths, lambda ids: tokenizer.decode(ids, skip_special_tokens=True))
        begun = time.monotonic()
        for first in range(0, len(numbers), PART):
            part = numbers[first : first + PART]
            rows += labeller.own_answers([n for n in part if n not in known])
            parents = [n for n in unlabelled(rows, args.wrong) if rows[n]["question"] in part]
            rows += labeller.after_mismatches(rows, parents)
            write_rows(rows, args.out)
            done = min(first + PART, len(numbers))
            left = (time.monotonic() - begun) / done * (len(numbers) - done)
            print(f"{done} of {len(numbers)} questions, {left / 60:.0f} minutes left", flush=True)
    own = [row for row in rows if row["parent"] < 0]
    after = [row["right"] for row in rows if row["parent"] >= 0 and rows[row["parent"]]["right"]]
    print(f"{sum(row['right'] for row in own)} of {len(own)} answers are right; {len(after)} labelled mismatches in "
          f"them, {sum(after) / max(1, len(after)):.3f} harmless")  # fmt: skip


if __name__ == "__main__":
    main()
