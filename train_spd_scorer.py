"""Prepares drafted blocks, then trains the speculative-decoding scorer on them with GRPO.

    python train_spd_scorer.py --blocks blocks.parquet --metadata metadata.parquet --model TARGET_DIR \\
        --output-dir DIR trainer.total_training_steps=400 key=value ...

key=value settings go to the trainer (recipe/spd/config/spd_trainer.yaml). MODEL_PATH, TOKENIZER_PATH, ADAPTER_PATH,
SPD_VLLM_URLS, SPD_SEP_TOKEN_ID, SPD_SAMPLE_TEMPERATURE, REWARD_ALPHA, REWARD_PENALTY_BREAK, REWARD_USELESS,
REWARD_CORRECT_BASE and LOGURU_LEVEL are read from the environment.
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
from recipe.spd.settings import BACKBONES, VARIABLES, SPDSettings
from verl.utils.fs import output_folder
from verl.utils.redact import redact_command

ROOT = Path(__file__).resolve().parent
__all__ = ["DataError", "PreparedData", "main", "prepare_spd_data_from_real_source"]
# Also written into the config: the workers of a remote cluster do not get this process's environment.
VARIABLES_OF_KEYS = {f"spd.reward.{name}": variable for variable, name in VARIABLES.items()} | {
    "spd.sample_temperature": "SPD_SAMPLE_TEMPERATURE", "spd.rollout.servers": "SPD_VLLM_URLS",
    "spd.adapter_path": "ADAPTER_PATH",
}  # fmt: skip
# Options that the preparation of the data reads too -> the trainer's key, which cannot be given as key=value.
KEYS = {
    "model": "actor_rollout_ref.model.path", "tokenizer": "actor_rollout_ref.model.tokenizer_path",
    "output_dir": "trainer.default_local_dir",
}  # fmt: skip
PATIENCE = 10  # epochs


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
    device = _given(args.overrides, "trainer.device") or ("cuda" if torch.cuda.is_available() else "cpu")
    settings: dict[str, Any] = {
        "data.train_files": train.path, "data.val_files": (val or train).path,
        "data.max_prompt_length": max(p.longest_input for p in (train, val) if p),
        "data.max_response_length": max(p.gamma for p in (train, val) if p),
        "trainer.device": device, "trainer.n_gpus_per_node": 1, "trainer.val_before_train": bool(val),
        **{key: getattr(args, name) for name, key in KEYS.items()},
        **{key: os.environ.get(variable) or None for key, variable in VARIABLES_OF_KEYS.items()},
    }  # fmt: skip
    if SCORERS[_backbone(args)].trains_backbone and device != "cpu":
        # Each forward reads whole contexts: memory is bounded by tokens, and padding is not read.
        switches = ("model.enable_gradient_checkpointing", "model.use_remove_padding", "actor.use_dynamic_bsz")
        settings |= {f"actor_rollout_ref.{name}": True for name in switches}
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
    """The environment that Ray's workers read."""
    env = dict(os.environ)
    # Ray's workers import spd_scorer by name.
    env["PYTHONPATH"] = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
    env["TOKENIZERS_PARALLELISM"] = "false"
    for variable in ("VERL_FILE_LOGGER_ROOT", "TENSORBOARD_DIR"):
        env.setdefault(variable, str(Path(args.output_dir) / "logs"))
    env.setdefault("LOGURU_LEVEL", "INFO")
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
    from recipe.spd.rollout.spd_rollout import local_server
    from verl.trainer.main_ppo import run_ppo

    signal.signal(signal.SIGHUP, lambda number, frame: signal.raise_signal(signal.SIGTERM))
    run_ppo(config, known=known, services=local_server)


def parse_args(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """Options, with the trainer's key=value settings in `overrides`."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add = parser.add_argument
    add("--blocks", required=True, help="generated blocks (parquet or jsonl)")
    add("--metadata", required=True, help="questions with ground truth and baseline correctness")
    add("--val-blocks", help="blocks of held-out questions")
    add("--val-metadata", help="their questions (default: --metadata)")
    add("--output-dir", required=True, type=output_folder, help="checkpoints, metrics, report, data")
    add("--model", default=os.environ.get("MODEL_PATH"), help="the target, or the own backbone (MODEL_PATH)")
    add("--tokenizer", default=os.environ.get("TOKENIZER_PATH"), help="default: the model's (TOKENIZER_PATH)")
    add("--supervised", action="store_true", help="no GRPO: cross-entropy on labels of single mismatches, into "
        "OUTPUT_DIR/supervised, which spd.adapter_path starts GRPO from")
    add("--label-budget", type=int, help="completions that these labels may use, or labels that --blocks have "
        "(default: no limit). Each block takes one for the target's own answer, and one for each of its labels")
    add("--patience", type=int, default=PATIENCE, help="epochs without a lower cross-entropy on --val-blocks after "
        "which a supervised training ends before its last step; 0: never")
    args, overrides = parser.parse_known_args(argv)
    for text in overrides:
        if text.startswith("-") or "=" not in text:
            parser.error(f"unknown option {text!r}; settings of the trainer read key=value")
    for name, key in KEYS.items():
        if _given(overrides, key):
            parser.error(f"{key} is set by --{name.replace('_', '-')}; leave it out")
    args.overrides = overrides
    if not args.model:
        parser.error("name the target model: --model DIR or MODEL_PATH")
    if args.label_budget is not None and not args.supervised:
        parser.error("--label-budget is for --supervised")
    if args.val_metadata and not args.val_blocks:
        parser.error("--val-metadata is given without --val-blocks")
    args.output_dir = str(args.output_dir.resolve())
    for name in ("model", "tokenizer"):
        value = getattr(args, name)
        if value is not None and Path(value).expanduser().exists():
            setattr(args, name, str(Path(value).expanduser().resolve()))
    return args


def _prepared(args: argparse.Namespace) -> tuple[list[PreparedData | None], list[Exception]]:
    """Training and validation data (None without), and every error that prevents preparing them."""
    from verl.planning.checks import load_model_part
    from verl.utils.tokenizer import hf_tokenizer

    given = {"--blocks": args.blocks, "--metadata": args.metadata, "--val-blocks": args.val_blocks,
             "--val-metadata": args.val_metadata}  # fmt: skip
    errors: list[Exception] = []
    for option, path in given.items():
        if path and not Path(path).is_file():
            errors.append(FileNotFoundError(f"{option} {path}: the file does not exist."))
    tokenizer, option = None, "--tokenizer" if args.tokenizer else "--model"
    try:
        tokenizer = load_model_part(option, args.tokenizer or args.model, hf_tokenizer)
    except (ValueError, OSError) as error:
        errors.append(error)
    files = {"train": (args.blocks, args.metadata), "val": (args.val_blocks, args.val_metadata or args.metadata)}
    prepared: dict[str, PreparedData | None] = dict.fromkeys(files)
    for split, (blocks, metadata) in files.items():
        if tokenizer is None or not blocks or not (Path(blocks).is_file() and Path(metadata).is_file()):
            continue
        output = Path(args.output_dir) / "data" / f"{split}.parquet"
        try:
            prepared[split] = prepare_spd_data_from_real_source(blocks, metadata, output, tokenizer, _backbone(args))
        except (ValueError, OSError) as error:
            errors.append(error)
    return list(prepared.values()), errors


def _config_errors(args: argparse.Namespace) -> tuple[list[str], bool]:
    """Errors in the settings, reported next to data that could not be prepared, and whether they are only planned."""
    from hydra.errors import HydraException

    from verl.planning.config_check import find_problems
    from verl.utils.problems import WRONG

    unknown = PreparedData(Path(args.blocks), rows=0, skipped_matches=0, longest_input=1024, gamma=8)
    try:
        config, known = compose_config(training_overrides(args, unknown, None))
    except HydraException as error:
        return [str(error)], False
    problems = [problem.message for problem in find_problems(config, known=known) if problem.kind == WRONG]
    return problems, config.trainer.dry_run is True


def main(argv: Sequence[str] | None = None) -> int:
    """Prepare the data, then train; the exit code."""
    args = parse_args(argv)
    from hydra.errors import HydraException

    from verl.planning.checks import ModelError

    try:
        setup_loguru_rank0()
    except ValueError as error:
        sys.exit(str(error))
    (train, val), errors = _prepared(args)
    if errors:
        settings, plans_only = _config_errors(args)
        sys.stderr.write("".join(f"{error}\n" for error in [*errors, *settings]))
        absent = all(isinstance(error, ModelError) and error.problem.kind == "absent" for error in errors)
        return 0 if absent and not settings and plans_only else 1
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
        command = shlex.join(redact_command(build_training_command(args, train, val)))
        logger.info("training in this process; the same as: {}", command)
        run_training(config, known)
    return 0


def _backbone(args: argparse.Namespace) -> str:
    """spd.backbone of the settings; the default where they name an unknown one, which the checks report."""
    given = _given(args.overrides, "spd.backbone")
    return given if given in BACKBONES else SPDSettings.backbone


def _given(overrides: Sequence[str], key: str) -> str:
    """The value of a key among key=value settings; empty without one."""
    values = dict(text.lstrip("+").split("=", 1) for text in overrides)  # of a repeated key the last one counts
    return values.get(key, "")


if __name__ == "__main__":
    sys.exit(main())
