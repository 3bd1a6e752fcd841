"""Rollouts with drafts: times of generation by the refined model of `make demo-dllm`, which runs first if it has not
been run.

All rollouts take turns on one thread, on batches of 1, 4, 16 and 64 questions, and a tail: 64 questions with the
beginning of their answers, so that what is left to generate differs 8-fold in length.
"""

import subprocess
import sys
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from statistics import mean
from typing import Any

import pandas as pd
import torch
from transformers import AutoTokenizer

from benchmarks.harness import Row, alternate, ratios, row, say
from benchmarks.rl_rollout import engine_of, one_rank
from examples.demo_runner import ROOT
from verl.config.rollout import RolloutConfig
from verl.protocol import DataProto
from verl.rollout import get_rollout_class
from verl.training.policy import get_policy

DEMO = ROOT / "outputs" / "dllm"
LIMIT, REPETITIONS = 128, 3
CALLS = {"1": 8, "4": 4, "16": 2, "64": 1}  # questions of a batch -> batches
ROWS, SHORTEST, LONGEST = 64, 10, 80  # of the tail: questions, and tokens that are left of their answers
WALL = {"1": 2.5, "4": 2.5, "16": 1.7, "64": 1.2, "tail": 1.4}  # least speed of rollout refine over hf, by batch
ROLLOUTS: dict[str, dict[str, Any]] = {
    "hf": {"name": "hf"},
    "refine": {"name": "refine"},
    "refine_slide": {"name": "refine", "custom": {"mode": "slide"}},
    "refine_verify": {"name": "refine", "custom": {"mode": "verify"}},
    "vllm": {"name": "vllm", "engine_kwargs": {"vllm": {"kv_cache_memory_bytes": 2**28}}},
}


def batches_of(questions: pd.DataFrame, directory: Path) -> dict[str, list[DataProto]]:
    """Requests for one sample per question, by the names of WALL."""
    tokenizer = AutoTokenizer.from_pretrained(directory)

    def request(texts: list[str]) -> DataProto:
        encoded = tokenizer(texts, add_special_tokens=False, padding=True, return_tensors="pt")
        mask = encoded["attention_mask"]
        tensors = {"input_ids": encoded["input_ids"], "attention_mask": mask,
                   "position_ids": (mask.cumsum(-1) - 1).clamp(min=0)}  # fmt: skip
        meta = {"eos_token_id": tokenizer.eos_token_id, "pad_token_id": tokenizer.pad_token_id, "global_steps": 1}
        return DataProto.from_dict(tensors=tensors, meta_info=meta)

    long = questions[questions["output"].str.split().str.len() >= LONGEST - 1][:ROWS]
    left = torch.linspace(SHORTEST, LONGEST, len(long)).long().tolist()
    begun = [" ".join([row.instruction, *row.output.split()[: 1 - count]])
             for row, count in zip(long.itertuples(), left, strict=True)]  # fmt: skip
    texts, made = list(questions["instruction"]), {"tail": [request(begun)]}
    for name, calls in CALLS.items():
        rows = int(name)
        made[name] = [request(texts[rows * call : rows * (call + 1)]) for call in range(calls)]
    return made


def measure(model: Path, batches: Mapping[str, list[DataProto]]) -> list[Row]:
    """Speed and tokens per forward of each rollout on each batch, and the least share of answers that are hf's."""
    engine, made, rows, same = engine_of(model), {}, [], []
    for name, settings in ROLLOUTS.items():
        sizes = {"mode": "sync", "prompt_length": LIMIT, "response_length": LIMIT, "dtype": "float32"}
        config = RolloutConfig(**sizes | settings)
        made[name] = get_rollout_class(config.name, "sync")(config, engine.model_config, engine.mesh)
        made[name].bind_actor(engine, get_policy("causal_lm"))
        made[name].update_weights(engine.get_per_tensor_param())
    for batch, requests in batches.items():
        answers: dict[str, list[DataProto]] = {}

        def generate(name: str, requests: list[DataProto] = requests, answers: dict[str, Any] = answers) -> None:
            answers[name] = [made[name].generate_sequences(request) for request in requests]

        seconds = alternate({name: partial(generate, name) for name in ROLLOUTS}, REPETITIONS)
        times = ratios(seconds["hf"], seconds["refine"])
        rows.append(row(f"refine_wall_{batch}", times, "times the speed of rollout hf"))
        texts = {name: [ids for part in parts for ids in part.batch["responses"].tolist()]
                 for name, parts in answers.items()}  # fmt: skip
        for name, parts in answers.items():
            tokens = sum(int(part.batch["response_mask"].sum()) for part in parts)
            rows.append(row(f"tokens_per_second_{name}_{batch}", [tokens / s for s in seconds[name]], "tokens / s"))
            if name.startswith("refine"):
                counted = [float(part.meta_info["metrics"]["rollout/tokens_per_forward"][0]) for part in parts]
                rows.append(row(f"tokens_per_forward_{name}_{batch}", [mean(counted)], "tokens per forward"))
                same.append(mean(a == b for a, b in zip(texts[name], texts["hf"], strict=True)))
    for rollout in made.values():
        rollout.close()
    return [*rows, row("refine_same_samples", [min(same)], "share of the answers that equal those of hf, least")]


def run() -> list[Row]:
    """Times have a value per repetition."""
    model, questions = DEMO / "refined", DEMO / "base" / "test.parquet"
    if not model.is_dir():
        subprocess.run([sys.executable, "-m", "examples.dllm_arithmetic.demo"], cwd=ROOT, check=True)
    say(f"rollouts of {model}")
    torch.set_num_threads(1)
    with one_rank():
        return measure(model, batches_of(pd.read_parquet(questions), model))
