"""Checks of a supervised run before it starts, and its dry run."""

import dataclasses
import os
from collections.abc import Mapping
from functools import partial
from typing import Any

from loguru import logger
from rich.console import Console

from verl.config import sft_engine
from verl.config.batch_sizes import divides_ranks, rank_count, sharding_ranks, splits_ranks
from verl.config.compose import with_values
from verl.config.model import LOGITS_CHUNK
from verl.config.sft import SFTConfig
from verl.data.sft_dataset import get_sft_dataset_class
from verl.planning import checks, machine
from verl.planning.config_check import resume_problems
from verl.planning.dry_run import Entry, count_text, memory_table, print_rows
from verl.planning.memory_estimate import PROCESS, PROCESS_BYTES, measure_model, training_memory
from verl.utils.import_utils import import_external_libs
from verl.utils.problems import ABSENT, WRONG, ConfigError, Problem, wrong

TENSOR_PARALLEL = "model.fsdp_config.tensor_parallel_size"
NEEDED = ("input_ids", "attention_mask", "position_ids", "loss_mask")


def ranks_of(config: SFTConfig) -> int:
    """Ranks of this torchrun job; outside of one those that trainer.nnodes and trainer.n_gpus_per_node plan."""
    return int(os.environ["WORLD_SIZE"]) if "WORLD_SIZE" in os.environ else rank_count(config)


def data_parallel_groups(config: SFTConfig, ranks: int) -> int:
    """Groups of these ranks whose members compute on the same rows; at least 1, also for sizes that do not divide."""
    shared = config.ulysses_sequence_parallel_size * config.model.fsdp_config.tensor_parallel_size
    return max(1, ranks // shared)


def sft_entry(trainer_class: type[Any], ranks: int | None = None) -> Entry:
    """The checks and the dry run of FSDPSFTTrainer or a subclass; `ranks`: those that checks count (None: ranks_of)."""

    def rules(config: SFTConfig, problems: list[Problem]) -> list[Problem]:
        return [] if problems else _tree_problems(config, ranks or ranks_of(config))

    def check_model(config: SFTConfig, findings: checks.Findings) -> None:
        model = dataclasses.replace(sft_engine.model_settings(config), custom_chat_template=config.data.chat_template)
        checks.check_models(model, findings, "model", "model.partial_pretrain", template_key="data.chat_template")
        findings.problems += checks.check_tensor_parallel(config, findings, TENSOR_PARALLEL)
        findings.problems += checks.check_liger(config, "model", TENSOR_PARALLEL)
        findings.problems += trainer_class.problems(config, findings)

    def start_problems(config: SFTConfig) -> list[Problem]:
        findings = checks.Findings(to_start=True)
        check_model(config, findings)
        findings.problems += checks.check_outputs(config.trainer)
        if config.trainer.device == "cuda":
            import torch

            if not torch.cuda.is_available():
                rule = "trainer.device=cuda, but this machine has no GPU. Set trainer.device=cpu."
                findings.problems.append(wrong("trainer.device", rule))
        return findings.problems

    def plan(console: Console, config: SFTConfig, problems: list[Problem]) -> list[Problem]:
        findings = checks.Findings()
        check_model(config, findings)
        data, tokenizer = config.data, findings.tokenizer

        def make(files: list[str], split: str) -> Any:
            build = trainer_class.build_dataset if split == "train" else trainer_class.build_val_dataset
            return build(files, config, tokenizer, data[f"{split}_max_samples"])

        find_class = partial(get_sft_dataset_class, data)
        checks.check_splits(data, findings, checks.ROWS_CHECKED, find_class, make, _missing_columns, _learns)
        checks.check_fills_a_batch(findings, "samples", {"data.train_batch_size": data.train_batch_size})
        _print_plan(console, config, findings, trainer_class)
        return [*findings.problems, *checks.check_machine(config.trainer)]

    return Entry(trainer_class.config_type, rules, plan, start_problems)


def _tree_problems(config: SFTConfig, ranks: int) -> list[Problem]:
    """Rules between keys: shares of the ranks, resume, plug-ins, optimizer."""
    problems, key, size = [], "data.train_batch_size", config.data.train_batch_size
    if size % ranks:
        rule = f"{key}={size} cannot be shared evenly by {ranks} ranks. Use a multiple of {ranks}."
        problems.append(wrong(key, rule))
    engine, sequences = config.model.fsdp_config, config.ulysses_sequence_parallel_size
    problems += divides_ranks("model.fsdp_config.fsdp_size", engine, ranks)
    problems += divides_ranks("ulysses_sequence_parallel_size", config, ranks)
    problems += splits_ranks("model.fsdp_config", engine, ranks, sequences)
    problems += resume_problems(config.trainer)
    try:
        sft_engine.samples_per_forward(config.data, data_parallel_groups(config, ranks))
    except ValueError as e:
        problems.append(wrong("data.micro_batch_size", str(e)))
    try:
        import_external_libs(config.model.external_lib)
        sft_engine.engine_parts(config, None, 1)  # raises for what the engine's settings refuse
    except ImportError as e:
        rule = f"model.external_lib={config.model.external_lib} cannot be imported: {e}."
        problems.append(wrong("model.external_lib", rule))
    except ValueError as e:  # names the engine's keys without `model`
        problems.append(wrong("optim", str(e).replace("fsdp_config.", "model.fsdp_config.")))
    return problems


def refuse_bad_rows(dataset: Any, key: str, warn: bool = True) -> None:
    """Raise one ConfigError for bad rows at the start of the files of `key`; `warn`: log rows that train nothing."""
    problems = list(checks.row_problems(dataset, key, checks.ROWS_AT_START, _missing_columns, _learns))
    if fatal := [p for p in problems if p.kind in (WRONG, ABSENT)]:
        raise ConfigError(fatal)
    for problem in problems if warn else ():
        logger.warning("{}", problem.message)


def _learns(row: Mapping[str, Any]) -> bool:
    """Whether a token of the row is trained."""
    return bool(row["loss_mask"][1:].any())  # no position comes before the first token


def _missing_columns(row: Mapping[str, Any]) -> str | None:
    missing = [name for name in NEEDED if name not in row]
    return f"a sample has no {', '.join(missing)} (it has {', '.join(sorted(row))})." if missing else None


def _print_plan(console: Console, config: SFTConfig, findings: checks.Findings, trainer_class: type[Any]) -> None:
    """Print the run's numbers and a rank's memory; `findings` gets what this machine lacks."""
    console.rule("Plan")
    data, run, ranks = config.data, config.trainer, ranks_of(config)
    size, groups = data.train_batch_size, data_parallel_groups(config, ranks)
    micro = sft_engine.samples_per_forward(data, groups)
    samples = findings.train_prompts
    epoch = samples // size if samples is not None and samples >= size else None  # steps; None: unknown
    steps = run.total_training_steps or (None if epoch is None else epoch * run.total_epochs)
    warm_up = config.optim.lr_warmup_steps
    if warm_up < 0:
        warm_up = int((steps or 0) * config.optim.lr_warmup_steps_ratio)
    if data.packing:
        micro_batches = f"of at most {sft_engine.tokens_per_forward(data, micro):,} tokens"
    else:
        micro_batches = f"{-(-(size // groups) // micro):,} of {micro:,} samples"
    print_rows(console, {
        "samples for training": count_text(samples),
        "samples for validation": count_text(findings.val_prompts),
        "ranks": str(ranks),
        "samples a step": count_text(size),
        "samples a step and rank": count_text(size // ranks),
        "micro-batches a step and rank": micro_batches,
        "steps per epoch": count_text(epoch),
        "steps in all": count_text(steps),
        "warm-up steps": count_text(None if steps is None else warm_up),
    })
    if findings.hf_config is None:
        console.print("No memory estimate: it needs the model's config.")
    else:
        _print_memory(console, config, findings, trainer_class, epoch, steps)


def _print_memory(
    console: Console, config: SFTConfig, findings: checks.Findings, trainer_class: type[Any], epoch: int | None,
    steps: int | None,
) -> None:
    """Print a rank's memory by part; `findings` gets what this machine lacks, memory and disk space.

    `epoch` and `steps` are the steps of an epoch and of the run; None: unknown.
    """
    from verl.planning.memory_trace import MicroBatch, trace_if_possible  # slow

    data, run, ranks = config.data, config.trainer, ranks_of(config)
    groups = data_parallel_groups(config, ranks)
    micro = sft_engine.samples_per_forward(data, groups)
    tokens = sft_engine.tokens_per_forward(data, micro) if data.packing else micro * data.max_length

    model, engine, optimizer, checkpoint = sft_engine.engine_parts(config, None, steps or 1)
    measured = measure_model(findings.hf_config, model.lora_rank)
    # A prompt of one token: the loss covers the rest of the row.
    several = data.packing or data.train_batch_size // groups > micro
    batch = MicroBatch(micro, 1, data.max_length - 1, adds_to_gradients=several)
    on_gpu, processes = run.device == "cuda", run.n_gpus_per_node
    checkpointed = model.enable_gradient_checkpointing
    if not on_gpu:
        checkpointed = machine.checkpoints_layers(checkpointed, findings.hf_config, tokens, engine.dtype, processes)
        model = dataclasses.replace(model, enable_gradient_checkpointing=checkpointed)
    traced = None
    if trainer_class.has_plain_loss():
        traced = trace_if_possible(findings.hf_config, model, engine, optimizer, batch, ranks, on_gpu)
    parts = traced
    if parts is None:
        shards, logits = sharding_ranks(engine, ranks), min(tokens, LOGITS_CHUNK)
        parts = training_memory(measured, engine, shards, tokens, logits, checkpointed)
    one = machine.checkpoint_bytes(measured, engine, checkpoint.save_contents)
    if not on_gpu:
        parts = parts | {PROCESS: PROCESS_BYTES}
        if copied := machine.copied_bytes(checkpoint, measured, engine):
            parts[machine.SAVE_COPIES] = copied // ranks
        what = f"{processes} rank{'s' * (processes > 1)} (trainer.n_gpus_per_node)"
        remedies = _memory_remedies(config, checkpointed)
        findings.problems += machine.check_memory(processes * sum(parts.values()), what, remedies)
    # Frequencies that count epochs as steps; every step where the steps of an epoch are unknown.
    frequencies = sft_engine.steps_of_epochs(run, epoch or 1)
    counted = with_values(config, {f"trainer.{name}": every for name, every in frequencies.items()}).trainer
    findings.problems += machine.check_disk(counted, one, steps, "max_ckpt_to_keep", "trainer.checkpoint.save_contents")
    console.print(memory_table(measured, {"update": parts}, traced is not None))


def _memory_remedies(config: SFTConfig, checkpointed: bool) -> dict[str, str]:
    """What lowers the memory of CPU ranks: key -> what to do with it."""
    data, key = config.data, "model.enable_gradient_checkpointing"
    remedies = {} if checkpointed else {key: f"set {key}=true"}
    if data.packing and data.max_token_len_per_gpu:
        lowered = ["data.max_token_len_per_gpu"]
    else:
        lowered = ["data.micro_batch_size" if data.micro_batch_size else "data.micro_batch_size_per_gpu"]
    if config.trainer.n_gpus_per_node > 1:
        lowered.append("trainer.n_gpus_per_node")
    return remedies | {name: f"lower {name}" for name in lowered}
