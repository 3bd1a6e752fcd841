"""Preparation of drafted blocks: vLLM against the loop over plain batches; 100,000 blocks in the driver.

The pair is that of the test bed that `make demo` leaves, else of a small one (benchmarks/spd_completions.py).
"""

import json
import time
from collections.abc import Sequence

import torch

from benchmarks import spd_blocks
from benchmarks.harness import REPETITIONS, Row, ratios, row
from benchmarks.spd_completions import testbed
from examples.spd_arithmetic import blocks
from examples.spd_arithmetic.demo import LIMIT
from examples.spd_arithmetic.pair import Pair, PairFiles, open_pair
from examples.spd_arithmetic.questions import Question
from examples.spd_arithmetic.tokenizer import Encoder
from examples.spd_arithmetic.train_pair import DRIFT_MARGIN
from examples.spd_arithmetic.workers import Workers

QUESTIONS, BLOCKS, GAMMA, BATCH = 400, 2000, 8, 200  # five blocks a question, half of them drifted, as in the demo
OFFSETS = 8


def prepare(pair: Pair, questions: Sequence[Question]) -> list[blocks.DraftedBlock]:
    """The blocks of a train split."""
    nothing = lambda *_: None  # noqa: E731
    own = blocks.own_path(pair, questions, BLOCKS // 2, 0, nothing, OFFSETS).blocks
    return own + blocks.drifted_blocks(pair, questions, DRIFT_MARGIN, BLOCKS // 2, 0, nothing, OFFSETS)


def run() -> list[Row]:
    """Interleaved preparations by both engines, one process each, and how many blocks are the same."""
    torch.set_num_threads(1)
    bed = testbed()
    lines = (bed / "questions_train.jsonl").read_text().splitlines()[:QUESTIONS]
    questions = [Question(**json.loads(line)) for line in lines]
    longest = max(len(q.prompt_ids) for q in questions)
    seconds: dict[str, list[float]] = {"hf": [], "vllm": []}
    made = {}
    with Workers(1) as loop, Workers(1) as engines:
        pairs = {}
        for engine, workers in (("hf", loop), ("vllm", engines)):
            files = PairFiles(bed, "cpu", 1, GAMMA, LIMIT, BATCH if engine == "hf" else QUESTIONS, engine, longest)
            pairs[engine] = open_pair(files, Encoder().decode, workers)
            prepare(pairs[engine], questions[:20])  # models loaded, first calls done
        for _ in range(REPETITIONS):
            for engine, pair in pairs.items():
                started = time.perf_counter()
                made[engine] = prepare(pair, questions)
                seconds[engine].append(time.perf_counter() - started)
    same = sum(a == b for a, b in zip(made["hf"], made["vllm"], strict=True)) / len(made["hf"])
    unit = f"{len(questions)} questions, {BLOCKS} blocks"
    return [
        row("prepare_speedup", ratios(seconds["hf"], seconds["vllm"]), "times, questions per second, vLLM / loop"),
        *(row(f"prepare_{engine}", [len(questions) / s for s in taken], f"questions per second, {unit}")
          for engine, taken in seconds.items()),
        Row("prepare_same_blocks", same, "share of the blocks that are equal in every field", same, same, 1),
        *spd_blocks.run(),
    ]
