"""Compares the prompts for GSM8K on training questions, before any training.

    python -m examples.pretrained.gsm8k.select --gsm8k DIR [--model DIR] [--out FILE]

Samples an answer of each question with each of the prompts in questions.CANDIDATES, as a training does. OUT has shares
of the answers for each prompt: right by the reward and by the last number, with the marker, cut at the limit; means of
tokens, and the prompts themselves.
"""

import argparse
import json
import time
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from statistics import mean
from tempfile import TemporaryDirectory
from typing import Any

import pandas as pd
from rich.table import Table

from examples.demo_runner import console
from examples.pretrained import fetch
from examples.pretrained.dllm.answers import engine
from examples.pretrained.gsm8k.questions import CANDIDATES, CHOSEN, MODEL, Prompt, messages, write
from examples.pretrained.gsm8k.reward import compute_score
from verl.utils.fs import output_file

SELECTION = Path(__file__).with_name("selection.json")
SHARES = ("right", "right_by_last_number", "with_marker", "cut")


def pass_rate(llm: Any, prompt: Prompt, rows: Sequence[dict[str, Any]], temperature: float) -> dict[str, Any]:
    """What a prompt gives on rows in the RL data format."""
    from vllm import SamplingParams

    # The engine has the seed: vLLM rewinds those of requests, which CPU generators cannot do.
    settings, begun = SamplingParams(temperature=temperature, max_tokens=prompt.limit), time.monotonic()
    conversations = [messages(prompt, row["extra_info"]["question"]) for row in rows]
    outputs = llm.chat(conversations, settings, use_tqdm=False)
    scores = [compute_score("", output.outputs[0].text, row["reward_model"]["ground_truth"], {"marker": prompt.marker})
              for output, row in zip(outputs, rows, strict=True)]  # fmt: skip
    return {
        "right": mean(score["acc"] for score in scores),
        "right_by_last_number": mean(score["last_number"] for score in scores),
        "with_marker": mean(score["answered"] for score in scores),
        "cut": mean(output.outputs[0].finish_reason == "length" for output in outputs),
        "answer_tokens": mean(len(output.outputs[0].token_ids) for output in outputs),
        "prompt_tokens": mean(len(output.prompt_token_ids) for output in outputs),
        "seconds": round(time.monotonic() - begun, 1), **asdict(prompt),
    }  # fmt: skip


def main(argv: list[str] | None = None) -> None:
    """Measure each prompt that the file does not have yet, and write the file after each."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    fetch.add_gsm8k(parser)
    add("--model", type=Path, help=f"a Hugging Face folder with a chat template (default: {MODEL}, fetched)")
    add("--questions", type=int, default=200, help="training questions, the first ones")
    add("--temperature", type=float, default=1.0)
    add("--out", type=output_file, default=str(SELECTION))
    args = parser.parse_args(argv)
    with TemporaryDirectory() as folder:
        write(fetch.gsm8k_folder(args.gsm8k), Path(folder), CANDIDATES[CHOSEN], {"train": args.questions})
        rows = pd.read_parquet(Path(folder) / "train.parquet").to_dict("records")
    llm = engine(str(fetch.model_folder(args.model, name=MODEL)), seed=0)
    record: dict[str, Any] = {"model": str(args.model or f"{fetch.SOURCES[MODEL].title}, {fetch.NOTE}"),
                              "questions": len(rows), "temperature": args.temperature, "prompts": {}}  # fmt: skip
    before = json.loads(args.out.read_text()) if args.out.exists() else {}
    if {**before, "prompts": {}} == record:  # a stopped command with the same settings
        record = before
    table = Table("", "right %", "by the last number %", "with the marker %", "cut %", "tokens", "s",
                  title=f"{len(rows)} training questions")  # fmt: skip
    for name, prompt in CANDIDATES.items():
        result = record["prompts"].get(name, {})
        if not asdict(prompt).items() <= result.items():  # not measured yet, or the prompt has changed since
            result = record["prompts"][name] = pass_rate(llm, prompt, rows, args.temperature)
            args.out.write_text(json.dumps(record, indent=1) + "\n")
        table.add_row(name, *(f"{100 * result[share]:.1f}" for share in SHARES), f"{result['answer_tokens']:.0f}",
                      f"{result['seconds']:.0f}")  # fmt: skip
    console.print(table)
    best = max(record["prompts"], key=lambda name: record["prompts"][name]["right"])
    console.print(f"most right answers: {best}; make demo-gsm8k uses {CHOSEN} unless PROMPT names another")


if __name__ == "__main__":
    main()
