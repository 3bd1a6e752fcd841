"""What a supervised run would do, and everything that stands in its way, told before it starts."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from loguru import logger
from omegaconf import DictConfig, OmegaConf
from rich.console import Console

from verl.planning.batch_arithmetic import divides_ranks, rank_count
from verl.planning.config_check import resume_problems, select, tree_problems
from verl.planning.config_effect import unread
from verl.planning.memory_estimate import LOGITS_CHUNK, measure_model, training_memory
from verl.planning.problems import ABSENT, WRONG, ConfigError, Problem, raise_if_any, wrong
from verl.trainer.dry_run import figure, memory_table, present, print_rows, unless_wrong
from verl.trainer.dry_run_checks import (
    ROWS_AT_START,
    ROWS_CHECKED,
    Findings,
    check_fills_a_batch,
    check_machine,
    check_models,
    check_splits,
    row_problems,
)
from verl.trainer.sft.settings import engine_parts, model_settings
from verl.utils.dataset.sft_dataset import get_sft_dataset_class
from verl.utils.import_utils import import_external_libs

if TYPE_CHECKING:
    from verl.trainer.sft.trainer import FSDPSFTTrainer

NEEDED = ("input_ids", "attention_mask", "position_ids", "loss_mask")
# Pattern of a key -> what is done instead.
NOT_READ = {
    "data.micro_batch_size": "data.micro_batch_size_per_gpu decides",
    "data.balance_dp_token": "every rank gets as many samples; data.packing evens their lengths out",
    "model.use_liger": "the model's own layers run, and logits are always taken in chunks",
    "ulysses_sequence_parallel_size": "each rank keeps whole sequences, which takes more memory for the same loss",
    "trainer.default_hdfs_dir": "checkpoints stay in trainer.default_local_dir",
    "trainer.checkpoint.async_save": "saving is finished before the next step",
    "trainer.use_legacy_worker_impl": "there is one worker implementation",
}


def ranks_of(config: Mapping[str, Any]) -> int:
    """Ranks of this torchrun job; outside of one those that trainer.nnodes and trainer.n_gpus_per_node plan."""
    return int(os.environ["WORLD_SIZE"]) if "WORLD_SIZE" in os.environ else rank_count(config)


def find_problems(config: DictConfig, config_type: type, ranks: int | None, known: DictConfig | None) -> list[Problem]:
    """Everything wrong with the tree itself. `ranks`: None takes those of `ranks_of`."""
    found, plain = tree_problems(config, {"": config_type}, known=known)
    if plain is None or found:
        return found
    ranks, key, size = ranks or ranks_of(plain), "data.train_batch_size", plain["data"]["train_batch_size"]
    if size % ranks:
        rule = f"{key}={size} cannot be shared evenly by {ranks} ranks. Use a multiple of {ranks}."
        found.append(wrong(key, rule))
    found += divides_ranks("model.fsdp_config.fsdp_size", plain["model"]["fsdp_config"], ranks)
    found += resume_problems(plain["trainer"])
    try:
        import_external_libs(plain["model"]["external_lib"])
        engine_parts(config, None, 1)
    except ImportError as e:
        rule = f"model.external_lib={plain['model']['external_lib']} cannot be imported ({e})."
        found.append(wrong("model.external_lib", f"{rule} Put its folder on PYTHONPATH."))
    except ValueError as e:
        found.append(wrong("optim", str(e)))
    return found


def refuse_bad_input(config: DictConfig, trainer_class: type[FSDPSFTTrainer]) -> None:
    """Raise one ConfigError with whatever of config, model and machine would stop this run; the first rank warns of
    settings without effect."""
    ranks = int(os.environ.get("WORLD_SIZE", "1"))
    raise_if_any(find_problems(config, trainer_class.config_type, ranks, None))
    if int(os.environ.get("RANK", "0")) == 0:
        for problem in without_effect(config, trainer_class):
            logger.warning("{}", problem.message)
    found = Findings(to_start=True)
    check_models(model_settings(config), found, "model", "model.partial_pretrain")
    found.problems += trainer_class.problems(config, found)
    if config.trainer.device == "cuda":
        import torch

        if not torch.cuda.is_available():
            rule = "trainer.device=cuda, but this machine has no GPU. Set trainer.device=cpu."
            found.problems.append(wrong("trainer.device", rule))
    if found.problems:
        raise ConfigError(found.problems)


def without_effect(config: DictConfig, trainer_class: type[FSDPSFTTrainer]) -> list[Problem]:
    """One sentence for each key that is set to another value than its default and is not read."""
    default = trainer_class.config_type()
    return unread(config, {**NOT_READ, **trainer_class.not_read}, lambda key: select(default, key, None))


def refuse_bad_rows(dataset: Any, key: str) -> None:
    """Raise one ConfigError with what is wrong in the first rows of a data set; `key` names its files."""
    if fatal := [p for p in row_problems(dataset, key, ROWS_AT_START, _lacks) if p.kind in (WRONG, ABSENT)]:
        raise ConfigError(fatal)


def _lacks(row: Mapping[str, Any]) -> str | None:
    lost = [name for name in NEEDED if name not in row]
    return f"a sample has no {', '.join(lost)} (it has {', '.join(sorted(row))})." if lost else None


def dry_run(config: DictConfig, trainer_class: type[FSDPSFTTrainer], *, known: DictConfig | None = None) -> int:
    """Print config, plan and problems; 1 if anything is wrong on every machine, else 0. `known`: see find_problems."""
    problems = find_problems(config, trainer_class.config_type, None, known)
    if not any(p.kind == WRONG for p in problems):
        problems += without_effect(config, trainer_class)

    def look(console: Console, problems: list[Problem]) -> None:
        found = Findings()
        check_models(model_settings(config), found, "model", "model.partial_pretrain")
        found.problems += trainer_class.problems(config, found)
        data, tokenizer = config.data, found.tokenizer

        def make(files: list[str], split: str) -> Any:
            build = trainer_class.build_dataset if split == "train" else trainer_class.build_val_dataset
            return build(files, config, tokenizer, data[f"{split}_max_samples"])

        if check_splits(data, found, ROWS_CHECKED, lambda: get_sft_dataset_class(data), make, _lacks):
            check_fills_a_batch(found, data.train_batch_size, "samples")
        problems += [*found.problems, *check_machine(config)]
        _print_plan(console, config, found)

    return present(config, problems, unless_wrong(problems, look))


def _print_plan(console: Console, config: DictConfig, found: Findings) -> None:
    console.rule("Plan")
    plain = OmegaConf.to_container(config, resolve=True)
    data, run, ranks = plain["data"], plain["trainer"], ranks_of(plain)
    size, micro, samples = data["train_batch_size"], data["micro_batch_size_per_gpu"], found.train_prompts
    epoch = samples // size if samples is not None and samples >= size else None
    steps = run["total_training_steps"] or (epoch and epoch * run["total_epochs"])
    budget = micro * data["max_length"]
    rows = f"{-(-(size // ranks) // micro):,} of {micro:,} samples"
    print_rows(
        console,
        {
            "samples for training": figure(samples),
            "samples for validation": figure(found.val_prompts),
            "ranks": str(ranks),
            "samples a step": figure(size),
            "samples a step and rank": figure(size // ranks),
            "micro-batches a step and rank": f"of at most {budget:,} tokens" if data["packing"] else rows,
            "steps per epoch": figure(epoch),
            "steps in all": figure(steps),
            "warm-up steps": figure(steps and int(steps * plain["optim"]["lr_warmup_steps_ratio"])),
        },
    )
    if found.hf_config is None:
        console.print("No memory estimate: it needs the model's config.")
        return
    model = plain["model"]
    measured, engine = measure_model(found.hf_config, model["lora_rank"]), model["fsdp_config"]
    shards = ranks if engine["fsdp_size"] == -1 else engine["fsdp_size"]
    checkpointed = model["enable_gradient_checkpointing"]
    parts = training_memory(measured, engine, shards, budget, min(budget, LOGITS_CHUNK), checkpointed)
    console.print(memory_table(measured, parts))

