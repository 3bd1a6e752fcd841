"""Own-answer data: the starting model's greedy answers to the training instructions, those kept that are right."""

from __future__ import annotations

import hashlib
import importlib.util
import json
import os
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from loguru import logger
from omegaconf import DictConfig

from dllm_reasoning.inference.generator import iterative_generate, trained_window
from dllm_reasoning.trainer.sft_dataset import IterativeSFTDataset
from dllm_reasoning.utils.attention import rolling_problem
from recipe.spd.store import model_dir_fingerprint
from verl.grading.pool import ExternFunction, Failure, GradingPool
from verl.planning.problems import Problem, one_line, wrong
from verl.utils.device import get_device_id
from verl.utils.distributed import initialize_global_process_group
from verl.utils.fs import copy_to_local
from verl.utils.import_utils import load_extern_object
from verl.utils.model import create_huggingface_actor, torch_dtype_of

FOLDER = "self_generated"
KEY = "iterative.self_generate"
Answer = tuple[int, str]
"""Number of a row of the data set, and the text that the model answers it with."""


def own_answers(config: DictConfig, dataset: IterativeSFTDataset) -> Path:
    """A parquet file with the kept answers of all ranks, made once: a resumed run finds it by its fingerprint.

    Where a rank's reward function raises, every rank ends with the ValueError that names its row.
    """
    folder = Path(config.trainer.default_local_dir).expanduser().absolute() / FOLDER
    limit = config.iterative.self_generate.max_prompts
    items = range(len(dataset) if limit < 0 else min(limit, len(dataset)))
    file = folder / f"{_fingerprint(config, dataset, items)}.parquet"
    if file.is_file():
        logger.info("own answers of an earlier start: {}", file)
        return file
    if "RANK" in os.environ:
        initialize_global_process_group()
    ranks, rank = (dist.get_world_size(), dist.get_rank()) if dist.is_initialized() else (1, 0)
    rows, counts = _gathered(lambda: _answer(config, dataset, items[rank::ranks]), ranks)
    told = ", ".join(f"{count} {why}" for why, count in counts.items())
    if not rows:
        raise ValueError(f"{KEY} kept none of {len(items)} answers ({told}). Start from a model that answers some "
                         "rightly, or look at the reward function.")  # fmt: skip
    if rank == 0:
        _write(file, dataset, rows)
        logger.info("own answers: {} of {} kept{}, in {}", len(rows), len(items), f" ({told})" if told else "", file)
    if ranks > 1:
        dist.barrier()
    return file


def check_reward(function: DictConfig) -> Iterator[Problem]:
    """Whether iterative.self_generate.reward_function is there."""
    try:
        load_extern_object(function.path, function.name)
    except (AttributeError, ImportError, OSError, RuntimeError, ValueError) as error:
        yield wrong(f"{KEY}.reward_function", f"{KEY}.reward_function: {error}")


def _gathered(make: Any, ranks: int) -> tuple[list[Answer], Counter]:
    """Answers of all ranks in the order of the rows, and why others were not kept; what one rank raises, all raise."""
    try:
        mine: Any = make()
    except ValueError as error:
        mine = error
    shares = [mine]
    if ranks > 1:
        shares = [None] * ranks
        dist.all_gather_object(shares, mine)
    for share in shares:
        if isinstance(share, ValueError):
            raise share
    return sorted(row for rows, _ in shares for row in rows), sum((counts for _, counts in shares), Counter())


def _fingerprint(config: DictConfig, dataset: IterativeSFTDataset, items: Sequence[int]) -> str:
    """Of all that the file hangs on: rows and how they are read, the model, limits, the reward function's file."""
    wanted, model = config.iterative.self_generate, copy_to_local(config.model.partial_pretrain)
    weights = model_dir_fingerprint(model) if Path(model).expanduser().is_dir() else model
    names = ("prompt_key", "response_key", "prompt_dict_keys", "response_dict_keys", "max_length")
    facts = [weights, config.model.fsdp_config.dtype, [dataset.setting(name) for name in names], wanted.max_new_tokens,
             wanted.ground_truth_key, wanted.reward_function.name, dataset.tokenizer.eos_token]  # fmt: skip
    digest = hashlib.sha256(json.dumps(facts).encode())
    digest.update(_source(wanted.reward_function.path).read_bytes())
    for item in items:  # chat template, truncation and the like stand in the ids
        digest.update(f"{dataset.instruction_ids(item)} {dataset.rows[item]}".encode())
    return digest.hexdigest()[:16]


def _source(path: str) -> Path:
    """The file of a reward function."""
    if path.startswith("pkg://"):
        return Path(importlib.util.find_spec(path.removeprefix("pkg://")).origin)
    return Path(path.removeprefix("file://")).expanduser()


def _answer(config: DictConfig, dataset: IterativeSFTDataset, items: Sequence[int]) -> tuple[list[Answer], Counter]:
    """The items that were answered rightly, and how many were not kept for what reason."""
    wanted, tokenizer = config.iterative.self_generate, dataset.tokenizer
    pool = GradingPool(ExternFunction(wanted.reward_function.path, wanted.reward_function.name), 1, wanted.item_timeout)
    model = _model(config)
    # Token by token, unless the model was trained to be fast: both give its greedy answer.
    mode: dict[str, Any] = {"add_eos_length": 0}
    if trained_window(model.config.to_dict()) is not None:
        mode = {"refine_iter": "slide"}
    mode["use_cache"] = rolling_problem(model) is None
    kept, counts = [], Counter()
    items = sorted(items, key=lambda item: len(dataset.instruction_ids(item)))
    try:
        for start in range(0, len(items), wanted.batch_size):
            batch = items[start : start + wanted.batch_size]
            prompts = [dataset.instruction_ids(item) for item in batch]
            found = iterative_generate(model, prompts, tokenizer.eos_token_id, tokenizer.pad_token_id,
                                       max_new_tokens=wanted.max_new_tokens, max_length=dataset.max_length,
                                       **mode)  # fmt: skip
            whole = []
            for item, tokens in zip(batch, found.tokens, strict=True):
                text = tokenizer.decode(tokens, skip_special_tokens=True)
                if why := _unfit(dataset, item, text, tokens):
                    counts[why] += 1
                else:
                    whole.append((item, text))
            kept += _right(config, dataset, pool, whole, counts)
    finally:
        pool.close()
    return kept, counts


def _model(config: DictConfig) -> torch.nn.Module:
    dtype = torch_dtype_of(config.model.fsdp_config.dtype, "model.fsdp_config.dtype")
    model = create_huggingface_actor(copy_to_local(config.model.partial_pretrain), automodel_kwargs={
        "dtype": dtype, "trust_remote_code": config.model.trust_remote_code})  # fmt: skip
    return model.to(torch.device("cuda", get_device_id()) if config.trainer.device == "cuda" else "cpu")


def _unfit(dataset: IterativeSFTDataset, item: int, text: str, tokens: list[int]) -> str | None:
    """Why an answer cannot be a response; None where it can."""
    if tokens[-1] != dataset.tokenizer.eos_token_id:
        return f"without an end within {KEY}.max_new_tokens and data.max_length"
    if not text.strip():
        return "empty"
    if dataset.length_with(item, text) > dataset.max_length:  # a text may be cut into other tokens than were generated
        return "longer than data.max_length"
    return None


def _right(
    config: DictConfig, dataset: IterativeSFTDataset, pool: GradingPool, answers: list[Answer], counts: Counter
) -> list[Answer]:
    """Those that the reward function scores above 0; an answer that took it too long is counted, not kept."""
    found = []
    graded = pool.map([_facts(config, dataset, *answer) for answer in answers])
    for (item, text), result in zip(answers, graded, strict=True):
        score = result if isinstance(result, Failure) else _score(result)
        if not isinstance(score, Failure):
            if score > 0:
                found.append((item, text))
            counts["scored 0 or less"] += score <= 0
        elif score.kind == "timeout":
            counts[f"that the reward function took longer than {KEY}.item_timeout for"] += 1
        else:
            raise dataset.error(item, f"{KEY}.reward_function {score.text.rstrip('.')}.")
    return found


def _score(result: Any) -> float | Failure:
    """The number that a reward function gave, by itself or as 'score' of a dict."""
    value = result["score"] if isinstance(result, dict) and "score" in result else result
    try:
        return float(value)
    except (TypeError, ValueError):
        return Failure("error", f"gave {one_line(value)}; a number, or a dict with a number as 'score', is needed")


def _facts(config: DictConfig, dataset: IterativeSFTDataset, item: int, text: str) -> dict[str, Any]:
    """The reward function's arguments."""
    row, key = dataset.rows[item], config.iterative.self_generate.ground_truth_key
    truth = dataset.text_of(item, "response") if key is None else dataset.column(item, key, f"{KEY}.ground_truth_key")
    source = str(row["data_source"]) if "data_source" in row else ""
    return {"data_source": source, "solution_str": text, "ground_truth": truth, "extra_info": dict(row)}


def _write(file: Path, dataset: IterativeSFTDataset, answers: list[Answer]) -> None:
    """Instructions and answers, nothing else, under the keys that the data set reads its own by."""
    import pandas as pd

    table = []
    for item, text in answers:
        row: dict[str, Any] = {}
        for kind, said in (("prompt", dataset.text_of(item, "prompt")), ("response", text)):
            *path, last = [dataset.setting(f"{kind}_key"), *(dataset.setting(f"{kind}_dict_keys") or [])]
            inner = row
            for key in path:
                inner = inner.setdefault(key, {})
            inner[last] = said
        table.append(row)
    file.parent.mkdir(parents=True, exist_ok=True)
    partial = file.with_suffix(".tmp")
    pd.DataFrame(table).to_parquet(partial)
    os.replace(partial, file)
