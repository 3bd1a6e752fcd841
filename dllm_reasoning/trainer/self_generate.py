"""Own-answer data: the starting model's greedy answers to the training instructions, those kept that are right."""

from __future__ import annotations

import hashlib
import json
import os
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from loguru import logger
from omegaconf import DictConfig, OmegaConf

from dllm_reasoning.inference.generator import iterative_generate, trained_window
from dllm_reasoning.trainer.sft_dataset import IterativeSFTDataset
from verl.utils.device import get_device_id
from verl.utils.distributed import initialize_global_process_group
from verl.utils.fs import copy_to_local
from verl.utils.import_utils import load_extern_object
from verl.utils.model import create_huggingface_actor, torch_dtype_of

FOLDER = "self_generated"


def own_answers(config: DictConfig, dataset: IterativeSFTDataset) -> Path:
    """A parquet file with the kept answers of all ranks, made once: a resumed run finds it by its fingerprint."""
    folder = Path(config.trainer.default_local_dir).expanduser().absolute() / FOLDER
    file = folder / f"{_fingerprint(config, dataset)}.parquet"
    if file.is_file():
        logger.info("own answers of an earlier start: {}", file)
        return file
    if "RANK" in os.environ:
        initialize_global_process_group()
    ranks, rank = (dist.get_world_size(), dist.get_rank()) if dist.is_initialized() else (1, 0)
    limit = config.iterative.self_generate.max_prompts
    items = range(len(dataset) if limit < 0 else min(limit, len(dataset)))
    mine = _answer(config, dataset, list(items)[rank::ranks])
    shares = [mine]
    if ranks > 1:
        shares = [None] * ranks
        dist.all_gather_object(shares, mine)
    rows = sorted((row for share in shares for row in share), key=lambda row: row[0])
    if not rows:
        raise ValueError(
            f"iterative.self_generate kept none of {len(items)} answers: reward_function scored none above 0. Start "
            "from a model that answers some rightly, or look at the reward function."
        )
    if rank == 0:
        _write(file, dataset, rows)
        logger.info("own answers: {} of {} kept, in {}", len(rows), len(items), file)
    if ranks > 1:
        dist.barrier()
    return file


def _fingerprint(config: DictConfig, dataset: IterativeSFTDataset) -> str:
    section = OmegaConf.to_container(config.iterative.self_generate, resolve=True)
    facts = [section, str(config.model.partial_pretrain), list(map(str, dataset.data_files)), len(dataset)]
    return hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()[:16]


def _answer(config: DictConfig, dataset: IterativeSFTDataset, items: list[int]) -> list[tuple[int, str]]:
    """(item, answer) of the items that were answered rightly."""
    wanted, tokenizer = config.iterative.self_generate, dataset.tokenizer
    score = load_extern_object(wanted.reward_function.path, wanted.reward_function.name)
    dtype = torch_dtype_of(config.model.fsdp_config.dtype, "model.fsdp_config.dtype")
    model = create_huggingface_actor(copy_to_local(config.model.partial_pretrain), automodel_kwargs={
        "dtype": dtype, "trust_remote_code": config.model.trust_remote_code})  # fmt: skip
    device = torch.device("cuda", get_device_id()) if config.trainer.device == "cuda" else torch.device("cpu")
    model.to(device)
    # Token by token, unless the model was trained to be fast: both give its greedy answer.
    mode: dict[str, Any] = {"add_eos_length": 0}
    if trained_window(model.config.to_dict()) is not None:
        mode = {"refine_iter": "slide"}
    items = sorted(items, key=lambda item: len(dataset.instruction_ids(item)))
    kept = []
    for start in range(0, len(items), wanted.batch_size):
        batch = items[start : start + wanted.batch_size]
        prompts = [dataset.instruction_ids(item) for item in batch]
        found = iterative_generate(model, prompts, tokenizer.eos_token_id, tokenizer.pad_token_id,
                                   max_new_tokens=wanted.max_new_tokens, **mode)  # fmt: skip
        for item, tokens in zip(batch, found.tokens, strict=True):
            text = tokenizer.decode(tokens, skip_special_tokens=True)
            ended = tokens[-1] == tokenizer.eos_token_id
            if ended and text.strip() and score(*_facts(config, dataset, item, text)) > 0:
                kept.append((item, text))
    return kept


def _facts(config: DictConfig, dataset: IterativeSFTDataset, item: int, text: str) -> tuple[str, str, Any, dict]:
    """(data_source, solution_str, ground_truth, extra_info) for the reward function."""
    row, key = dataset.rows[item], config.iterative.self_generate.ground_truth_key
    truth = dataset.text_of(item, "response") if key is None else dataset.column(
        item, key, "iterative.self_generate.ground_truth_key")  # fmt: skip
    return str(row["data_source"]) if "data_source" in row else "", text, truth, dict(row)


def _write(file: Path, dataset: IterativeSFTDataset, rows: list[tuple[int, str]]) -> None:
    """The rows with their response exchanged, other columns as they are."""
    import pandas as pd

    prompt, response = dataset.setting("prompt_key"), dataset.setting("response_key")
    table = [{prompt: dataset.text_of(item, "prompt"), response: text} for item, text in rows]
    file.parent.mkdir(parents=True, exist_ok=True)
    partial = file.with_suffix(".tmp")
    pd.DataFrame(table).to_parquet(partial)
    os.replace(partial, file)
