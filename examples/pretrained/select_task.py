"""Measures how often the model solves candidate tasks under five prompts; the demo's task was chosen by these figures.

    python -m examples.pretrained.select_task [--model DIR] [--tasks NAME ...] [--prompts NAME ...] [--questions 32]

Questions are drawn from the training seed, never from that of validation. Every pair is added to selection.json, which
is next to this file, as soon as it is measured. Wanted: 10 to 40 % right, at least 90 % in the asked format, short
prompts and answers.
"""

import argparse
import json
import os
import time
from collections import Counter
from pathlib import Path
from statistics import mean
from typing import Any

from examples.pretrained import fetch
from examples.pretrained.questions import PROMPTS, TASK, TRAIN, Prompt, Task, answer_of, messages

FILE = Path(__file__).with_name("selection.json")
TEMPERATURE, SAMPLES, LIMIT = 0.8, 4, 48
CANDIDATES = {
    "chain_sum, 2 terms of 1 or 2 digits": TASK,
    "chain_sum, 2 or 3 terms of 1 digit": Task("chain_sum", {"max_terms": 3, "max_digits": 1}),
    "number_filtering, 2 or 3 integers": Task("number_filtering", {
        "min_numbers": 2, "max_numbers": 3, "max_decimals": 0, "min_value": 0.0, "max_value": 100.0,
    }),
    "number_filtering, 3 to 5 integers": Task("number_filtering", {"max_numbers": 5, "max_decimals": 0}),
    "simple_equations, 2 terms": Task("simple_equations", {"max_terms": 2, "max_value": 20}),
    "number_format, 2 or 3 numbers": Task("number_format", {"max_num_candidates": 3, "max_n": 10000}),
    "letter_counting, 3 to 8 words": Task("letter_counting", {"min_words": 3, "max_words": 8}),
    "products, 1 or 2 digits": Task("products", {"max_digits": 2}),
    "gcd, up to 60": Task("gcd", {"max_value": 60}),
    "spell_backward, 3 or 4 letters": Task("spell_backward", {"min_word_len": 3, "max_word_len": 4}),
    "word_sorting, 2 or 3 words": Task("word_sorting", {"min_words": 2, "max_words": 3, "max_word_length": 5}),
}  # fmt: skip


def measure(llm: Any, task: Task, prompt: Prompt, questions: int) -> dict[str, Any]:
    """Shares of the answers that are right and in the format; mean tokens; the share that one constant answer gets."""
    from vllm import SamplingParams

    data = task.items(TRAIN, questions)
    items, sampling = list(data), SamplingParams(n=SAMPLES, temperature=TEMPERATURE, max_tokens=LIMIT)
    begun = time.monotonic()
    outputs = llm.chat([messages(task, prompt, item["question"]) for item in items], sampling, use_tqdm=False)
    samples = [(item, sample) for item, output in zip(items, outputs, strict=True) for sample in output.outputs]
    answers = [answer_of(sample.text) for _, sample in samples]
    return {
        "right": mean(answer is not None and data.score_answer(answer, item) >= 1
                      for answer, (item, _) in zip(answers, samples, strict=True)),
        "in_format": mean(answer is not None for answer in answers),
        "answer_tokens": mean(len(sample.token_ids) for _, sample in samples),
        "prompt_tokens": mean(len(output.prompt_token_ids) for output in outputs),
        "constant": Counter(str(item["answer"]) for item in items).most_common(1)[0][1] / questions,
        "samples": len(samples), "temperature": TEMPERATURE, "seconds": round(time.monotonic() - begun, 1),
    }  # fmt: skip


def main(argv: list[str] | None = None) -> None:
    """Measure the named pairs, all by default."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path)
    parser.add_argument("--tasks", nargs="+", choices=CANDIDATES, default=list(CANDIDATES))
    parser.add_argument("--prompts", nargs="+", choices=PROMPTS, default=list(PROMPTS))
    parser.add_argument("--questions", type=int, default=32)
    args = parser.parse_args(argv)
    os.environ |= {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_CPU_OMP_THREADS_BIND": "nobind",
                   "VLLM_LOGGING_LEVEL": "ERROR"}  # fmt: skip
    from vllm import LLM

    from verl.utils.accelerator import default_dtype

    llm = LLM(str(args.model or fetch.main([])), dtype=default_dtype("cpu"), enforce_eager=True, max_model_len=1024,
              max_num_seqs=128, block_size=32, kv_cache_memory_bytes=2**30)  # fmt: skip
    for name in args.tasks:
        for prompt in args.prompts:
            measured = json.loads(FILE.read_text()) if FILE.exists() else {}
            measured.setdefault(name, {})[prompt] = measure(llm, CANDIDATES[name], PROMPTS[prompt], args.questions)
            FILE.write_text(json.dumps(measured, indent=1) + "\n")
            print(name, prompt, measured[name][prompt], flush=True)


if __name__ == "__main__":
    main()
