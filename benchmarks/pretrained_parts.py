"""Seconds of what a GRPO step cannot do without: vLLM generates, transformers computes a loss forward and backward.

    python -m benchmarks.pretrained_parts MODEL TRAIN.parquet OUT.json

The process holds nothing else. Each prompt is forwarded once for its samples: a row is a prompt and its answers, which
do not see each other.
"""

import json
import os
import sys
import time
from pathlib import Path
from statistics import mean

import pandas as pd
import torch
from torch import Tensor

PROMPTS, SAMPLES, LIMIT, WARM_UP, STEPS = 8, 8, 32, 1, 4


def generate(llm, batch: list[list[dict]]) -> tuple[list[tuple[list[int], list[list[int]]]], float]:
    """Token ids of each prompt and of its answers, and the seconds taken."""
    from vllm import SamplingParams

    begun = time.perf_counter()
    outputs = llm.chat(batch, SamplingParams(n=SAMPLES, max_tokens=LIMIT), use_tqdm=False)
    taken = time.perf_counter() - begun
    return [(out.prompt_token_ids, [list(sample.token_ids) for sample in out.outputs]) for out in outputs], taken


def packed(prompt: list[int], answers: list[list[int]]) -> dict[str, Tensor]:
    """One row of T tokens: ids [1, T], positions [1, T], a mask bool [1, 1, T, T], and where answers are predicted.

    `at` [A] are the positions whose logits predict the answers' tokens `labels` [A].
    """
    ids, positions, owner, at, labels = list(prompt), list(range(len(prompt))), [0] * len(prompt), [], []
    for number, answer in enumerate(answers, start=1):
        at += [len(prompt) - 1, *range(len(ids), len(ids) + len(answer) - 1)]
        labels += answer
        positions += range(len(prompt), len(prompt) + len(answer))
        owner += [number] * len(answer)
        ids += answer
    whose = torch.tensor(owner)
    seen = (whose[:, None] == whose[None]) | (whose[None] == 0)
    return {"ids": torch.tensor([ids]), "positions": torch.tensor([positions]), "mask": seen.tril()[None, None],
            "at": torch.tensor(at), "labels": torch.tensor(labels)}  # fmt: skip


def learn(model, groups: list[tuple[list[int], list[list[int]]]]) -> float:
    """Seconds of a forward and backward of every group, one at a time."""
    begun = time.perf_counter()
    for prompt, answers in groups:
        row = packed(prompt, answers)
        logits = model(input_ids=row["ids"], position_ids=row["positions"], attention_mask=row["mask"],
                       logits_to_keep=row["at"], use_cache=False).logits[0]  # fmt: skip
        torch.nn.functional.cross_entropy(logits.float(), row["labels"]).backward()
    taken = time.perf_counter() - begun
    model.zero_grad(set_to_none=True)
    return taken


def main() -> None:
    """Write the means over STEPS batches: seconds of both parts and of their sum, tokens of an answer."""
    folder, data, out = map(Path, sys.argv[1:])
    os.environ |= {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_CPU_OMP_THREADS_BIND": "nobind"}
    from transformers import AutoModelForCausalLM
    from vllm import LLM

    from verl.utils.accelerator import default_dtype

    dtype = default_dtype("cpu")
    llm = LLM(str(folder), dtype=dtype, enforce_eager=True, max_model_len=1024, block_size=32,
              max_num_seqs=PROMPTS * SAMPLES, kv_cache_memory_bytes=2**30)  # fmt: skip
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype, attn_implementation="sdpa").train()
    prompts = [list(prompt) for prompt in pd.read_parquet(data)["prompt"]]
    measured: dict[str, list[float]] = {"generation": [], "forward_backward": [], "seconds": [], "tokens": []}
    for step in range(WARM_UP + STEPS):
        groups, generated = generate(llm, prompts[PROMPTS * step : PROMPTS * (step + 1)])
        learned = learn(model, groups)
        if step >= WARM_UP:
            measured["generation"].append(generated)
            measured["forward_backward"].append(learned)
            measured["seconds"].append(generated + learned)
            measured["tokens"].append(mean(len(answer) for _, answers in groups for answer in answers))
    out.write_text(json.dumps({name: mean(values) for name, values in measured.items()}))


if __name__ == "__main__":
    main()
