"""Prepares drafted blocks, then trains the speculative-decoding scorer on them with GRPO.

    python train_spd_scorer.py --blocks blocks.parquet --metadata metadata.parquet --model TARGET_DIR --output-dir DIR

key=value settings after the options go to the trainer (recipe/spd/config/spd_trainer.yaml). MODEL_PATH,
TOKENIZER_PATH, ADAPTER_PATH, SPD_VLLM_URLS, SPD_SEP_TOKEN_ID, SPD_SAMPLE_TEMPERATURE, REWARD_ALPHA,
REWARD_PENALTY_BREAK, REWARD_USELESS, REWARD_CORRECT_BASE and LOGURU_LEVEL are read from the environment.
"""

import argparse
import os
import shlex
import signal
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from loguru import logger
from omegaconf import DictConfig

from recipe.spd.data.prepare import DataError, PreparedData, prepare_spd_data_from_real_source
from recipe.spd.scorer.auto import SCORERS
from recipe.spd.settings import ATTENTIONS, BACKBONES, HEAD_INPUTS, VARIABLES, SPDSettings
from verl.utils.accelerator import default_dtype

ROOT = Path(__file__).resolve().parent
__all__ = ["DataError", "PreparedData", "main", "prepare_spd_data_from_real_source"]
# Also written into the config: the workers of a remote cluster do not get this process's environment.
REWARD_VARIABLES = {variable: f"spd.reward.{name}" for variable, name in VARIABLES.items()} | {
    "SPD_SAMPLE_TEMPERATURE": "spd.sample_temperature"
}
# Option -> the trainer's keys that it sets (none: read here), and its argparse settings. Without a value (None) the
# recipe's default applies.
PATIENCE = 10  # epochs
OPTIONS: dict[str, tuple[str, dict[str, Any]]] = {
    "--blocks": ("", {"required": True, "help": "generated blocks (parquet or jsonl)"}),
    "--metadata": ("", {"required": True, "help": "questions with ground truth and baseline correctness"}),
    "--val-blocks": ("", {"help": "blocks of held-out questions"}),
    "--val-metadata": ("", {"help": "their questions (default: --metadata)"}),
    "--output-dir": ("trainer.default_local_dir", {"required": True, "help": "checkpoints, metrics, report, data"}),
    "--model": ("actor_rollout_ref.model.path", {"help": "the target, or the own backbone (MODEL_PATH)"}),
    "--tokenizer": ("actor_rollout_ref.model.tokenizer_path", {"help": "default: the model's"}),
    "--adapter": ("spd.adapter_path", {"help": "saved scorer to start from"}),
    "--target": ("spd.target_path", {"help": "the target that completes, where --model is another model"}),
    "--draft": ("spd.rollout.draft_path", {"help": "draft model of the blocks: a server of the scorer checks it"}),
    "--store": ("spd.rollout.store_path", {"help": "file of completions, may be shared between runs"}),
    "--backbone": ("spd.backbone", {"choices": BACKBONES[::-1]}),
    "--attention": ("spd.attention", {"choices": ATTENTIONS}),
    "--head-inputs": ("spd.head_inputs", {"choices": HEAD_INPUTS, "help": "what the head reads"}),
    "--context-tokens": ("spd.context_tokens", {"type": int, "help": "of the context, for an own backbone; 0: all"}),
    "--lora-rank": ("actor_rollout_ref.model.lora_rank", {"type": int}),
    "--lora-alpha": ("actor_rollout_ref.model.lora_alpha", {"type": int}),
    "--batch-size": ("data.train_batch_size", {"type": int, "help": "blocks a step"}),
    "--mini-batch-size": ("actor_rollout_ref.actor.ppo_mini_batch_size", {"type": int, "help": "blocks an update"}),
    "--micro-batch-size": ("actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu", {"type": int, "help": "samples"}),
    "--n": ("actor_rollout_ref.rollout.n", {"type": int, "help": "samples a block"}),
    "--epochs": ("trainer.total_epochs", {"type": int}),
    "--steps": ("trainer.total_training_steps", {"type": int, "help": "stop after so many steps"}),
    "--lr": ("actor_rollout_ref.actor.optim.lr", {"type": float}),
    "--max-tokens": ("spd.rollout.max_tokens", {"type": int, "help": "longest answer, from the question's end"}),
    "--seed": ("data.seed spd.seed", {"type": int, "default": 42}),
    "--ranks": ("trainer.n_gpus_per_node", {"type": int, "default": 1, "help": "GPUs, or CPU ranks, of a node"}),
    "--device": ("trainer.device", {"choices": ("cuda", "cpu")}),
    "--save-freq": ("trainer.save_freq", {"type": int}),
    "--test-freq": ("trainer.test_freq", {"type": int}),
    **{f"--{variable.lower().removeprefix('spd_').replace('_', '-')}": (key, {"type": float})
       for variable, key in REWARD_VARIABLES.items()},
}  # fmt: skip


def setup_loguru_rank0(level: str | None = None) -> None:
    """Log to standard error at `level` (else LOGURU_LEVEL, else INFO) on rank 0; warnings and errors on the others."""
    chosen = level or os.environ.get("LOGURU_LEVEL") or "INFO"
    rank = int(os.environ.get("RANK", "0"))
    logger.remove()
    try:
        logger.add(sys.stderr, level=chosen if rank == 0 else "WARNING")
    except ValueError as error:
        raise ValueError(f"LOGURU_LEVEL={chosen!r} is not a level; use DEBUG, INFO, WARNING or ERROR.") from error


def training_overrides(args: argparse.Namespace, train: PreparedData, val: PreparedData | None) -> list[str]:
    """The key=value settings of the trainer that differ from the recipe's yaml."""
    settings: dict[str, Any] = {
        "data.train_files": train.path, "data.val_files": (val or train).path,
        "data.max_prompt_length": max(p.longest_input for p in (train, val) if p),
        "data.max_response_length": max(p.gamma for p in (train, val) if p),
        "actor_rollout_ref.actor.fsdp_config.dtype": default_dtype(args.device),
        "trainer.val_before_train": bool(val), "spd.rollout.servers": os.environ.get("SPD_VLLM_URLS") or None,
    }  # fmt: skip
    if SCORERS[_backbone(args)].trains_backbone and args.device != "cpu":
        # Each forward reads whole contexts: memory is bounded by tokens, and padding is not read.
        switches = ("model.enable_gradient_checkpointing", "model.use_remove_padding", "actor.use_dynamic_bsz")
        settings |= {f"actor_rollout_ref.{name}": True for name in switches}
    for name, (keys, _) in OPTIONS.items():
        settings |= dict.fromkeys(keys.split(), getattr(args, name[2:].replace("-", "_")))
    for variable, key in REWARD_VARIABLES.items():
        if settings[key] is None:
            settings[key] = os.environ.get(variable) or None
    overrides = [f"{key}={_hydra_text(value)}" for key, value in settings.items() if value is not None]
    return [*overrides, *args.overrides]


def build_training_command(args: argparse.Namespace, train: PreparedData, val: PreparedData | None) -> list[str]:
    """The command that trains on prepared data without this script."""
    recipe = ["--config-path", "pkg://recipe.spd.config", "--config-name", "spd_trainer"]
    return [sys.executable, "-m", "verl.trainer.main_ppo", *recipe, *training_overrides(args, train, val)]


def _hydra_text(value: Any) -> str:
    """A value in Hydra's syntax: paths with unusual characters are quoted."""
    if isinstance(value, bool):
        return str(value).lower()
    text = str(value)
    plain = all(c.isalnum() or c in "._-/~+" for c in text)
    return text if plain else "'" + text.replace("\\", "\\\\").replace("'", "\\'") + "'"


def _create_training_env(args: argparse.Namespace) -> dict[str, str]:
    """The variables that the rollout and Ray's workers read: the environment, overridden by the options."""
    env = dict(os.environ)
    given = {"MODEL_PATH": args.model, "TOKENIZER_PATH": args.tokenizer, "ADAPTER_PATH": args.adapter}
    given.update({variable: getattr(args, variable.lower().removeprefix("spd_")) for variable in REWARD_VARIABLES})
    env.update({variable: str(value) for variable, value in given.items() if value is not None})
    # Ray's workers import spd_scorer by name.
    env["PYTHONPATH"] = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
    env["TOKENIZERS_PARALLELISM"] = "false"
    for variable in ("VERL_FILE_LOGGER_ROOT", "TENSORBOARD_DIR"):
        env.setdefault(variable, str(Path(args.output_dir) / "logs"))
    env.setdefault("LOGURU_LEVEL", "INFO")
    shown = [*given, "SPD_SEP_TOKEN_ID", "SPD_VLLM_URLS", "LOGURU_LEVEL"]
    logger.debug("training environment: {}", {name: env[name] for name in shown if name in env})
    return env


def compose_config(overrides: Sequence[str]) -> tuple[DictConfig, DictConfig]:
    """The training config, and the same tree without the overrides; raises HydraException for a malformed setting."""
    from hydra import compose, initialize_config_module

    from verl.config.compose import forced_override
    from verl.planning.config_check import known_tree

    forced = [forced_override(setting) for setting in overrides]
    with initialize_config_module("recipe.spd.config", version_base=None):
        return compose("spd_trainer", forced), known_tree("spd_trainer", forced)


def run_training(config: DictConfig, known: DictConfig) -> None:
    """Train in this process; exits as `run_ppo` does. SIGHUP stops it as SIGTERM does."""
    from recipe.spd.rollout.server import local_server
    from verl.trainer.main_ppo import run_ppo

    signal.signal(signal.SIGHUP, lambda number, frame: signal.raise_signal(signal.SIGTERM))
    run_ppo(config, known=known, services=local_server)


def parse_args(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """Options, with the trainer's key=value settings in `overrides`."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    defaults = {"model": "MODEL_PATH", "tokenizer": "TOKENIZER_PATH", "adapter": "ADAPTER_PATH"}
    for name, (_, settings) in OPTIONS.items():
        parser.add_argument(name, **settings)
    parser.set_defaults(**{name: os.environ.get(variable) for name, variable in defaults.items()})
    parser.add_argument("--supervised", action="store_true", help="no GRPO: cross-entropy on labels of single "
        "mismatches, into OUTPUT_DIR/supervised, which --adapter starts GRPO from")
    parser.add_argument("--label-budget", type=int, help="completions that these labels may use (default: no limit)")
    parser.add_argument("--patience", type=int, default=PATIENCE, help="epochs without a lower cross-entropy on "
        "--val-blocks after which a supervised training ends before its --steps; 0: never")
    args, overrides = parser.parse_known_args(argv)
    for text in overrides:
        if text.startswith("-") or "=" not in text:
            parser.error(f"unknown option {text!r}; settings of the trainer read key=value")
    args.overrides = overrides
    if not args.model:
        parser.error("name the target model: --model DIR or MODEL_PATH")
    if args.label_budget is not None and not args.supervised:
        parser.error("--label-budget is for --supervised")
    if args.val_metadata and not args.val_blocks:
        parser.error("--val-metadata is given without --val-blocks")
    for name in ("output_dir", "store", "adapter", "target", "draft", "model", "tokenizer"):
        value = getattr(args, name)
        if value is not None and (name in ("output_dir", "store") or Path(value).expanduser().exists()):
            setattr(args, name, str(Path(value).expanduser().resolve()))
    return args


def _prepared(args: argparse.Namespace) -> tuple[list[PreparedData | None], list[Exception]]:
    """Training and validation data (None without), and every error that prevents preparing them."""
    from verl.planning.checks import load_model_part
    from verl.utils.tokenizer import hf_tokenizer

    given = {"--blocks": args.blocks, "--metadata": args.metadata, "--val-blocks": args.val_blocks,
             "--val-metadata": args.val_metadata}  # fmt: skip
    errors: list[Exception] = [
        FileNotFoundError(f"{option} {path}: the file does not exist.")
        for option, path in given.items() if path and not Path(path).is_file()
    ]  # fmt: skip
    option, tokenizer = "--tokenizer" if args.tokenizer else "--model", None
    try:
        tokenizer = load_model_part(option, args.tokenizer or args.model, hf_tokenizer)
    except (ValueError, OSError) as error:
        errors.append(error)
    prepared: list[PreparedData | None] = []
    folder = Path(args.output_dir) / "data"
    for split, blocks, metadata in (
        ("train", args.blocks, args.metadata), ("val", args.val_blocks, args.val_metadata or args.metadata),
    ):  # fmt: skip
        prepared.append(None)
        if tokenizer is None or not blocks or not (Path(blocks).is_file() and Path(metadata).is_file()):
            continue
        try:
            output = folder / f"{split}.parquet"
            prepared[-1] = prepare_spd_data_from_real_source(blocks, metadata, output, tokenizer, _backbone(args))
        except (ValueError, OSError) as error:
            errors.append(error)
    return prepared, errors


def _config_errors(args: argparse.Namespace) -> list[str]:
    """Errors in the settings themselves, reported next to data that could not be prepared."""
    from hydra.errors import HydraException

    from verl.planning.config_check import find_problems
    from verl.utils.problems import WRONG

    unknown = PreparedData(Path(args.blocks), rows=0, skipped_matches=0, longest_input=1024, gamma=8)
    try:
        config, known = compose_config(training_overrides(args, unknown, None))
    except HydraException as error:
        return [str(error)]
    return [problem.message for problem in find_problems(config, known=known) if problem.kind == WRONG]


def main(argv: Sequence[str] | None = None) -> int:
    """Prepare the data, then train; the exit code."""
    args = parse_args(argv)
    from hydra.errors import HydraException

    from verl.planning.checks import ModelError

    available = "cuda" if torch.cuda.is_available() else "cpu"
    args.device = _given(args.overrides, "trainer.device") or args.device or available
    try:
        setup_loguru_rank0()
    except ValueError as error:
        sys.exit(str(error))
    (train, val), errors = _prepared(args)
    if errors:
        settings = _config_errors(args)
        sys.stderr.write("".join(f"{error}\n" for error in [*errors, *settings]))
        absent = all(isinstance(error, ModelError) and error.problem.kind == "absent" for error in errors)
        return 0 if absent and not settings and _plans_only(args.overrides) else 1
    try:
        config, known = compose_config(training_overrides(args, train, val))
    except HydraException as error:
        sys.exit(str(error))
    os.environ.update(_create_training_env(args))
    if args.supervised:
        from recipe.spd.supervised import train_supervised
        from verl.trainer.main_ppo import dry_run, exit_if_wrong

        if config.trainer.dry_run:
            return dry_run(config, known=known)
        exit_if_wrong(config, known)
        logger.info("supervised scorer: {}", train_supervised(config, args.label_budget, args.patience))
    else:
        command = shlex.join(build_training_command(args, train, val))
        logger.info("training in this process; the same as: {}", command)
        run_training(config, known)
    return 0


def _plans_only(overrides: Sequence[str]) -> bool:
    """Whether trainer.dry_run is set to one of yaml's spellings of true."""
    return _given(overrides, "trainer.dry_run").lower() in ("true", "yes", "on", "1")


def _backbone(args: argparse.Namespace) -> str:
    """spd.backbone of the settings; the default where they name an unknown one, which the checks report."""
    given = _given(args.overrides, "spd.backbone") or args.backbone
    return given if given in BACKBONES else SPDSettings.backbone


def _given(overrides: Sequence[str], key: str) -> str:
    """The value of a key among key=value settings; empty without one."""
    pairs = (text.lstrip("+").partition("=") for text in overrides)
    return ([""] + [value for name, _, value in pairs if name == key])[-1]


if __name__ == "__main__":
    sys.exit(main())
