"""Greedy answers of a model to questions of reasoning-gym, each with what the task's verifier says of it.

    python -m examples.pretrained.dllm.answers --model DIR --out answers.jsonl --counts '{"val": 150}' --split val

A killed command resumes after the last finished part.
"""

import argparse
import json
import os
import time
from collections import Counter
from pathlib import Path
from typing import Any

from examples.pretrained.dllm import tasks
from recipe.spd.rollout.answers import final_answer
from verl.utils.fs import output_file

PART = 100  # questions that are lost when the command is killed


def engine(model: str, seed: int) -> Any:
    """vLLM in this process."""
    os.environ |= {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_CPU_OMP_THREADS_BIND": "nobind",
                   "VLLM_LOGGING_LEVEL": "ERROR"}  # fmt: skip
    from vllm import LLM

    from verl.utils.accelerator import default_dtype, get_device_name

    return LLM(model, dtype=default_dtype(get_device_name()), enforce_eager=True, max_model_len=1024, max_num_seqs=128,
               seed=seed, block_size=32, kv_cache_memory_bytes=2**30)  # fmt: skip


def answers(llm: Any, asked: list[tasks.Asked], limit: int) -> list[dict[str, Any]]:
    """A row per question: `ended` if the answer is not cut at the limit, `right` as the verifier says, if it ended."""
    from vllm import SamplingParams

    settings = SamplingParams(temperature=0, max_tokens=limit)
    rows = []
    for a, output in zip(asked, llm.chat([tasks.messages(a.question) for a in asked], settings, use_tqdm=False),
                         strict=True):  # fmt: skip
        text, ended = output.outputs[0].text.strip(), output.outputs[0].finish_reason == "stop"
        rows.append({"task": a.task, "question": a.question, "answer": text, "ground_truth": a.answer, "ended": ended,
                     "right": ended and a.is_right(final_answer(text))})  # fmt: skip
    return rows


def main(argv: list[str] | None = None) -> None:
    """Answer the parts that OUT lacks."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--model", required=True)
    add("--out", type=output_file, required=True)
    add("--counts", type=json.loads, required=True, help="questions of each split, as JSON")
    add("--split", choices=tasks.SEEDS, default="train")
    add("--limit", type=int, help="only the first N questions of the split")
    add("--gsm8k", type=Path, help="folder with GSM8K's train.jsonl and test.jsonl: a further task")
    add("--max-new-tokens", type=int, default=tasks.LIMIT)
    add("--seed", type=int, default=0)
    args = parser.parse_args(argv)
    asked = tasks.draw(args.counts, seed=args.seed, gsm8k=args.gsm8k)[args.split][: args.limit]
    rows = [json.loads(line) for line in args.out.read_text().splitlines()] if args.out.exists() else []
    done = 1 + max((row["part"] for row in rows), default=-1)
    parts = [asked[i : i + PART] for i in range(0, len(asked), PART)]
    llm = engine(args.model, args.seed + done) if done < len(parts) else None
    for number in range(done, len(parts)):
        begun = time.monotonic()
        given = answers(llm, parts[number], args.max_new_tokens)
        rows += [{"part": number, **row} for row in given]
        partial = args.out.with_suffix(".partial")
        partial.write_text("".join(json.dumps(row) + "\n" for row in rows))
        os.replace(partial, args.out)
        print(f"part {number + 1} of {len(parts)}: {sum(row['right'] for row in given)} of {len(given)} answers "
              f"right, {time.monotonic() - begun:.0f} s", flush=True)  # fmt: skip
    for task, count in Counter(row["task"] for row in rows).items():
        print(f"{task}: {sum(row['right'] for row in rows if row['task'] == task)} of {count} answers right")


if __name__ == "__main__":
    main()
