"""Seconds of a GRPO step's two large parts without this project: answers of vLLM, and a forward and backward of
transformers over them. A prompt and its answers are one row: the prompt is computed once, and an answer also attends to
the answers before it. The process holds nothing else.
"""

import argparse
import json
import os
import time
from pathlib import Path
from statistics import median

import pandas as pd
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

REPETITIONS = 3  # after one that is left out


def generated(args: argparse.Namespace, prompts: list[list[int]]) -> tuple[list[list[int]], list[float]]:
    """Tokens of all answers to each prompt, of the last repetition; seconds of each repetition."""
    os.environ |= {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_CPU_OMP_THREADS_BIND": "nobind"}
    from vllm import LLM, SamplingParams, TokensPrompt

    longest = max(map(len, prompts)) + args.limit
    llm = LLM(str(args.model), dtype=args.dtype, max_model_len=longest, enforce_eager=True, kv_cache_memory_bytes=2**30,
              enable_prefix_caching=False)  # fmt: skip
    sampling = SamplingParams(n=args.samples, temperature=args.temperature, max_tokens=args.limit)
    seconds, outputs = [], []
    for _ in range(REPETITIONS + 1):
        begun = time.perf_counter()
        outputs = llm.generate([TokensPrompt(prompt_token_ids=ids) for ids in prompts], sampling, use_tqdm=False)
        seconds.append(time.perf_counter() - begun)
    answers = [[token for answer in output.outputs for token in answer.token_ids] for output in outputs]
    return answers, seconds[1:]


def updated(args: argparse.Namespace, texts: list[list[int]]) -> list[float]:
    """Seconds of a forward and backward of all texts, one after the other, for each repetition."""
    model = AutoModelForCausalLM.from_pretrained(args.model, dtype=args.dtype)
    seconds = []
    for _ in range(REPETITIONS + 1):
        begun = time.perf_counter()
        for text in texts:
            ids = torch.tensor([text])
            model(input_ids=ids, labels=ids, use_cache=False).loss.backward()
        seconds.append(time.perf_counter() - begun)
        model.zero_grad()
    return seconds[1:]


def main() -> None:
    """Write {"generation", "update": median seconds, "answer_tokens": mean of an answer} to --out."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model", type=Path)
    parser.add_argument("data", type=Path, help="prompts in the RL data format")
    parser.add_argument("--out", type=Path, required=True)
    for name in ("prompts", "samples", "limit"):
        parser.add_argument(f"--{name}", type=int, required=True)
    parser.add_argument("--temperature", type=float, required=True)
    parser.add_argument("--dtype", required=True)
    args = parser.parse_args()
    tokenizer = AutoTokenizer.from_pretrained(args.model)
    conversations = pd.read_parquet(args.data)["prompt"][: args.prompts]
    prompts = [tokenizer.apply_chat_template(list(turns), add_generation_prompt=True, return_dict=True)["input_ids"]
               for turns in conversations]  # fmt: skip
    answers, generation = generated(args, prompts)
    update = updated(args, [prompt + answer for prompt, answer in zip(prompts, answers, strict=True)])
    mean_length = sum(map(len, answers)) / len(prompts) / args.samples
    taken = {"generation": median(generation), "update": median(update), "answer_tokens": mean_length}
    args.out.write_text(json.dumps(taken))


if __name__ == "__main__":
    main()
