"""Seconds of sampling answers with one model by different rollouts, which take turns on one thread.

    python -m examples.refine_rl_arithmetic.generation --model DIR --draft DIR --questions FILE --out FILE

Batches of 1, 4, 16 and 64 questions, and a tail: 64 questions with the beginning of their answers, so that what is left
to generate differs 8-fold in length. OUT: {rollout: {batch: {"seconds": a list, one number per repetition, "tokens",
"same": share of the answers that equal those of rollout hf, and the rollout's metrics}}}.
"""

import argparse
import json
from functools import partial
from pathlib import Path
from statistics import mean
from typing import Any

import pandas as pd
import torch
from transformers import AutoTokenizer

from benchmarks.harness import alternate
from benchmarks.rl_rollout import engine_of, one_rank
from verl.config.rollout import RolloutConfig, SpeculativeConfig
from verl.protocol import DataProto
from verl.rollout import get_rollout_class
from verl.training.policy import get_policy
from verl.utils.fs import output_file

LIMIT, REPETITIONS = 128, 3
CALLS = {"1": 8, "4": 4, "16": 2, "64": 1, "tail": 1}  # questions of a batch -> batches
ROWS, SHORTEST, LONGEST = 64, 10, 80  # of the tail: questions, and tokens that are left of their answers
# Several engines share the machine's memory.
VLLM = {"name": "vllm", "engine_kwargs": {"vllm": {"kv_cache_memory_bytes": 2**28}}}
ROLLOUTS: dict[str, dict[str, Any]] = {
    "hf": {"name": "hf"},
    "refine": {"name": "refine"},
    "refine, slide": {"name": "refine", "custom": {"mode": "slide"}},
    "refine, verify": {"name": "refine", "custom": {"mode": "verify"}},
    "vllm": VLLM,
    "vllm, draft": VLLM,  # last: vLLM's counters are those of the engine that started last
}


def batches_of(questions: pd.DataFrame, directory: Path) -> dict[str, list[DataProto]]:
    """Requests for one sample per question, by the names of CALLS."""
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
    texts = list(questions["instruction"])
    made = {"tail": [request(begun)]}
    for name, calls in CALLS.items():
        if name != "tail":
            rows = int(name)
            made[name] = [request(texts[rows * call : rows * (call + 1)]) for call in range(calls)]
    return made


def measure(model: Path, draft: Path, questions: pd.DataFrame) -> dict[str, Any]:
    """The content of OUT."""
    engine, results = engine_of(model), {name: {} for name in ROLLOUTS}
    made = {}
    for name, settings in ROLLOUTS.items():
        settings = {"mode": "sync", "prompt_length": LIMIT, "response_length": LIMIT, "dtype": "float32", **settings}
        if name == "vllm, draft":
            settings["speculative"] = SpeculativeConfig(method="draft_model", draft_path=str(draft))
        config = RolloutConfig(**settings)
        made[name] = get_rollout_class(config.name, "sync")(config, engine.model_config, engine.mesh)
        made[name].bind_actor(engine, get_policy("causal_lm"))
        made[name].update_weights(engine.get_per_tensor_param())
    for batch, requests in batches_of(questions, model).items():
        answers = {}

        def generate(name: str, requests: list[DataProto] = requests, answers: dict[str, Any] = answers) -> None:
            answers[name] = [made[name].generate_sequences(request) for request in requests]

        seconds = alternate({name: partial(generate, name) for name in ROLLOUTS}, REPETITIONS)
        rows = {
            name: [row for part in parts for row in part.batch["responses"].tolist()] for name, parts in answers.items()
        }
        for name, parts in answers.items():
            metrics = [part.meta_info.get("metrics", {}) for part in parts]
            results[name][batch] = {
                "seconds": seconds[name],
                "tokens": sum(int(part.batch["response_mask"].sum()) for part in parts),
                "same": mean(a == b for a, b in zip(rows[name], rows["hf"], strict=True)),
                **{key: mean(float(each[key][0]) for each in metrics) for key in metrics[0]},
            }
    for name in ROLLOUTS:
        made[name].close()
    return results


def main(argv: list[str] | None = None) -> None:
    """Measure and write OUT."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--draft", type=Path, required=True, help="a smaller model with the same vocabulary")
    parser.add_argument("--questions", type=Path, required=True, help="parquet: instruction, output")
    parser.add_argument("--out", type=output_file, required=True)
    args = parser.parse_args(argv)
    torch.set_num_threads(1)
    with one_rank():
        results = measure(args.model, args.draft, pd.read_parquet(args.questions))
    args.out.write_text(json.dumps(results, indent=1))


if __name__ == "__main__":
    main()
