"""Blocks and questions of the stored labels, for training, evaluation and serving.

    python -m examples.pretrained.spd.blocks --labels DIR --gsm8k DIR --target DIR --out DIR

Reads train.parquet, val.parquet and test.parquet of examples.pretrained.spd.labels. Every labelled mismatch is a block
of one draft token: after accepted mismatches a scorer judges in the same way as after the target's own tokens. The
label is 0 if a right answer becomes wrong, 1 if a wrong one becomes right, and 1/2 otherwise, so that a scorer predicts
by how much a draft token changes the share of right answers. Longer answers take longer to decode: each token by which
the answer becomes longer lowers the label by LENGTH_COST.
"""

import argparse
import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pandas as pd
from transformers import AutoTokenizer

from examples.demo_runner import json_rows
from examples.pretrained.spd.labels import Row, drawn, prompts_of, read_rows
from examples.spd_arithmetic.questions import Question, write_questions
from recipe.spd.rollout.answers import final_answer
from verl.utils.fs import output_folder

SPLITS = {"train": "train.jsonl", "val": "train.jsonl", "test": "test.jsonl"}
LENGTH_COST = 0.002
LONGEST = 60  # tokens; a larger change of length counts as this one
HARM_LABELS = {"val": "harm_labels_val.jsonl", "test": "harm_labels.jsonl"}


def blocks_of(rows: Sequence[Row], prompts: dict[int, list[int]], split: str) -> Iterator[dict[str, Any]]:
    """A block for each labelled mismatch."""
    for number, row in enumerate(rows):
        if row["parent"] < 0:
            continue
        own, prompt, at = rows[row["parent"]], prompts[row["question"]], row["position"]
        longer = at + len(row["ids"]) - len(own["ids"])
        label = (1 + row["right"] - own["right"]) / 2 - LENGTH_COST * max(-LONGEST, min(longer, LONGEST))
        after = row["ids"][1] if len(row["ids"]) > 1 else row["ids"][0]  # an end token has nothing after it
        yield {
            "block_id": f"{split}-{number}", "question_id": f"{split}-{row['question']}",
            "context_ids": prompt + own["ids"][:at], "draft_ids": [row["ids"][0]],
            "target_ids": [own["ids"][at], after], "is_correct_baseline": int(own["right"]),
            "baseline_length": len(own["ids"]) - at, "question_len": len(prompt),
            "labels": [min(max(label, 0.0), 1.0)],
        }  # fmt: skip


def main(argv: Sequence[str] | None = None) -> None:
    """Write the files of all splits."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name in ("labels", "gsm8k", "target", "out"):
        parser.add_argument(f"--{name}", type=output_folder if name == "out" else Path, required=True)
    args = parser.parse_args(argv)
    args.out.mkdir(parents=True, exist_ok=True)
    tokenizer = AutoTokenizer.from_pretrained(args.target)
    for split, name in SPLITS.items():
        asked, rows = json_rows(args.gsm8k / name), read_rows(args.labels / f"{split}.parquet")
        numbers = list(dict.fromkeys(row["question"] for row in rows))
        if split == "test":
            labelled = {*numbers}
            numbers += [n for n in drawn(len(asked), 0, len(asked)) if n not in labelled]
        prompts = prompts_of(asked, numbers, tokenizer)
        own = {row["question"]: row["right"] for row in rows if row["parent"] < 0}
        blocks = list(blocks_of(rows, prompts, split))
        pd.DataFrame(blocks).to_parquet(args.out / f"blocks_{split}.parquet")
        pd.DataFrame([
            {"question_id": f"{split}-{n}", "question": asked[n]["question"], "ground_truth": asked[n]["answer"],
             "is_correct_baseline": right} for n, right in own.items()
        ]).to_parquet(args.out / f"metadata_{split}.parquet")  # fmt: skip
        in_right = sum(block["is_correct_baseline"] for block in blocks)
        changed = [row["right"] - rows[row["parent"]]["right"] for row in rows if row["parent"] >= 0]
        print(f"{split}: {len(numbers)} questions, {sum(own.values())} of {len(own)} own answers right; "
              f"{in_right} labelled mismatches in right answers, {changed.count(-1)} of them harmful; "
              f"{len(blocks) - in_right} in wrong answers, of which {changed.count(1)} repair the answer")
        if split not in HARM_LABELS:
            continue
        questions = [Question(f"{split}-{n}", asked[n]["question"], prompts[n], final_answer(asked[n]["answer"]))
                     for n in numbers]  # fmt: skip
        write_questions(args.out / f"questions_{split}.jsonl", questions)
        names = ("block_id", "question_id", "context_ids", "draft_ids", "target_ids")
        lines = ({**{name: block[name] for name in names}, "position": 0, "harmful": change < 0}
                 for block, change in zip(blocks, changed, strict=True) if block["is_correct_baseline"])  # fmt: skip
        (args.out / HARM_LABELS[split]).write_text("".join(json.dumps(line) + "\n" for line in lines))


if __name__ == "__main__":
    main()
