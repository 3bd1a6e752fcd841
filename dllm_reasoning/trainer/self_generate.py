"""Own-answer data: the starting model's greedy answers to the training instructions, filtered by a reward function."""

import hashlib
import importlib.util
import json
import os
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch.distributed as dist
from loguru import logger

from dllm_reasoning.config.iterative import IterativeRefineConfig, SelfGenerateConfig
from dllm_reasoning.inference.generator import iterative_generate
from dllm_reasoning.inference.settings import trained_window
from dllm_reasoning.trainer.sft_dataset import IterativeSFTDataset
from dllm_reasoning.utils.attention import rolling_problem
from verl.data.chat_template import answer_text
from verl.data.fingerprint import model_dir_fingerprint
from verl.data.sft_dataset import encode_segments
from verl.models.loading import create_huggingface_actor, torch_dtype_of
from verl.reward.pool import ExternFunction, Failure, GradingPool
from verl.trainer.run.ranks import all_gather_object
from verl.utils.distributed import host_barrier, initialize_global_process_group
from verl.utils.fs import copy_to_local
from verl.utils.problems import one_line
from verl.utils.tokenizer import stop_ids

FOLDER = "self_generated"
KEY = "iterative.self_generate"
Answer = tuple[int, str]
"""(Item, the text of the model's answer to it). An item is the number of a row of the data set."""


def own_answers(config: IterativeRefineConfig, dataset: IterativeSFTDataset) -> Path:
    """A parquet file with the kept answers of all ranks; a later start reuses it if its fingerprint is the same.

    If a rank's reward function raises, every rank raises the ValueError that names its row.
    """
    folder = Path(config.trainer.default_local_dir).expanduser().absolute() / FOLDER
    max_prompts = config.iterative.self_generate.max_prompts
    items = range(len(dataset) if max_prompts < 0 else min(max_prompts, len(dataset)))
    file = folder / f"{_fingerprint(config, dataset, items)}.parquet"
    if file.is_file():
        logger.info("reusing own answers: {}", file)
        return file
    if "RANK" in os.environ:
        initialize_global_process_group()
    ranks, rank = (dist.get_world_size(), dist.get_rank()) if dist.is_initialized() else (1, 0)
    try:
        share: Any = _kept_answers(config, dataset, items[rank::ranks])
    except ValueError as error:  # raised below, on every rank
        share = error
    shares = all_gather_object(share)
    for share in shares:
        if isinstance(share, ValueError):
            raise share
    rows = sorted(row for answers, _ in shares for row in answers)
    counts = sum((counts for _, counts in shares), Counter())
    dropped = ", ".join(f"{count} {reason}" for reason, count in counts.items())
    if not rows:
        raise ValueError(f"{KEY} kept none of {len(items)} answers ({dropped}). Start from a model that answers some "
                         "correctly, or check the reward function.")  # fmt: skip
    if rank == 0:
        _write(file, dataset, rows)
        logger.info(
            "own answers: {} of {} kept{}, in {}", len(rows), len(items), f" ({dropped})" if dropped else "", file
        )
    host_barrier()
    return file


def _fingerprint(config: IterativeRefineConfig, dataset: IterativeSFTDataset, items: Sequence[int]) -> str:
    """A hash of everything the file depends on: rows and their keys, the model, limits, the reward function's file."""
    settings, model = config.iterative.self_generate, copy_to_local(config.model.partial_pretrain)
    weights = model_dir_fingerprint(model) if Path(model).expanduser().is_dir() else model
    names = ("prompt_key", "response_key", "prompt_dict_keys", "response_dict_keys", "max_length")
    facts = [
        weights, config.model.fsdp_config.dtype, [dataset.settings[name] for name in names], settings.max_new_tokens,
        settings.item_timeout, settings.ground_truth_key, settings.reward_function.name, dataset.tokenizer.eos_token,
    ]  # fmt: skip
    digest = hashlib.sha256(json.dumps(facts).encode())
    path = settings.reward_function.path
    if path.startswith("pkg://"):
        path = importlib.util.find_spec(path.removeprefix("pkg://")).origin
    digest.update(Path(path.removeprefix("file://")).expanduser().read_bytes())
    for item in items:  # the ids reflect the chat template and truncation
        digest.update(f"{dataset.instruction_ids(item)} {dataset.rows[item]}".encode())
    return digest.hexdigest()[:16]


def _kept_answers(
    config: IterativeRefineConfig, dataset: IterativeSFTDataset, items: Sequence[int]
) -> tuple[list[Answer], Counter]:
    """The kept answers to these items, and the number of dropped ones by reason."""
    settings, tokenizer = config.iterative.self_generate, dataset.tokenizer
    dtype = torch_dtype_of(config.model.fsdp_config.dtype, "model.fsdp_config.dtype")
    model = create_huggingface_actor(copy_to_local(config.model.partial_pretrain), automodel_kwargs={
        "dtype": dtype, "trust_remote_code": config.model.trust_remote_code})  # fmt: skip
    model.to(config.trainer.device)
    generation = {"max_new_tokens": settings.max_new_tokens, "max_length": dataset.max_length}
    generation["use_cache"] = rolling_problem(model) is None
    # Several tokens a forward where the model was trained on windows, else token by token. Both give its greedy answer.
    generation |= {"add_eos_length": 0} if trained_window(model.config) is None else {"refine_iter": "slide"}
    ends = stop_ids(tokenizer, config.model.partial_pretrain)
    items = sorted(items, key=lambda item: len(dataset.instruction_ids(item)))
    function = ExternFunction(settings.reward_function.path, settings.reward_function.name)
    pool = GradingPool(function, 1, settings.item_timeout)
    kept, counts = [], Counter()
    try:
        for start in range(0, len(items), settings.batch_size):
            batch = items[start : start + settings.batch_size]
            prompts = [dataset.instruction_ids(item) for item in batch]
            result = iterative_generate(model, prompts, ends, tokenizer.pad_token_id, return_details=True, **generation)
            answers = []
            for item, tokens in zip(batch, result.tokens, strict=True):
                text = answer_text(tokenizer, tokens)
                if reason := _why_unusable(dataset, item, text, ended=tokens[-1] in ends):
                    counts[reason] += 1
                else:
                    answers.append((item, text))
            kept += _scored_above_zero(settings, dataset, pool, answers, counts)
    finally:
        pool.close()
    return kept, counts


def _why_unusable(dataset: IterativeSFTDataset, item: int, text: str, ended: bool) -> str | None:
    """Why training leaves out an answer, or None; `ended`: its last token is one that ends answers."""
    if not ended:
        return f"without an end within {KEY}.max_new_tokens and data.max_length"
    if not text.strip():
        return "empty"
    # tokenised again, a text may have more tokens than were generated
    is_longer = len(encode_segments(dataset.tokenizer, dataset.segments(item, text))[0]) > dataset.max_length
    return "longer than data.max_length" if is_longer else None


def _scored_above_zero(
    settings: SelfGenerateConfig, dataset: IterativeSFTDataset, pool: GradingPool, answers: list[Answer],
    counts: Counter,
) -> list[Answer]:
    """Answers that the reward function scores above 0; others, and those that time out, are added to `counts`."""
    kept, arguments = [], []
    key, key_name = settings.ground_truth_key, f"{KEY}.ground_truth_key"
    for item, text in answers:
        row = dataset.rows[item]
        truth = dataset.text_of(item, "response") if key is None else dataset.column(item, key, key_name)
        source = str(row["data_source"]) if "data_source" in row else ""
        arguments.append({"data_source": source, "solution_str": text, "ground_truth": truth, "extra_info": dict(row)})
    for (item, text), result in zip(answers, pool.map(arguments), strict=True):
        if isinstance(result, Failure):
            if result.kind != "timeout":
                raise dataset.error(item, f"{KEY}.reward_function {result.text.rstrip('.')}.")
            counts[f"for which the reward function took longer than {KEY}.item_timeout"] += 1
            continue
        value = result["score"] if isinstance(result, dict) and "score" in result else result
        try:
            score = float(value)
        except (TypeError, ValueError) as error:
            raise dataset.error(item, f"{KEY}.reward_function returned {one_line(value)}; it must return a number, or "
                                "a dict with a number as 'score'.") from error  # fmt: skip
        if score > 0:
            kept.append((item, text))
        else:  # NaN, too
            counts["scored 0 or less"] += 1
    return kept


def _write(file: Path, dataset: IterativeSFTDataset, answers: list[Answer]) -> None:
    """A parquet file of instructions and answers only, under the data set's own keys (nested, where those are)."""
    import pandas as pd

    table = []
    for item, text in answers:
        row: dict[str, Any] = {}
        for kind, value in (("prompt", dataset.text_of(item, "prompt")), ("response", text)):
            *path, last = [dataset.settings[f"{kind}_key"], *(dataset.settings[f"{kind}_dict_keys"] or [])]
            inner = row
            for key in path:
                inner = inner.setdefault(key, {})
            inner[last] = value
        table.append(row)
    file.parent.mkdir(parents=True, exist_ok=True)
    partial = file.with_suffix(".tmp")
    pd.DataFrame(table).to_parquet(partial)
    os.replace(partial, file)
