"""Prepares drafted blocks, then trains the speculative-decoding scorer on them with GRPO.

    python train_spd_scorer.py --blocks blocks.parquet --metadata metadata.parquet --model TARGET_DIR --output-dir DIR

key=value settings after the options go to the trainer (recipe/spd/config/spd_trainer.yaml). MODEL_PATH,
TOKENIZER_PATH, ADAPTER_PATH, SPD_VLLM_URLS, SPD_SEP_TOKEN_ID, SPD_SAMPLE_TEMPERATURE, REWARD_ALPHA,
REWARD_PENALTY_BREAK, REWARD_USELESS, REWARD_CORRECT_BASE and LOGURU_LEVEL are read from the environment.
"""

from __future__ import annotations

import argparse
import os
import signal
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from loguru import logger
from omegaconf import DictConfig, OmegaConf

from recipe.spd.prepare import DataError, PreparedData, prepare_spd_data_from_real_source

ROOT = Path(__file__).resolve().parent
__all__ = ["DataError", "PreparedData", "main", "prepare_spd_data_from_real_source"]
# Also written into the config: the workers of a remote cluster do not get this process's environment.
REWARD_VARIABLES = {
    "REWARD_ALPHA": "spd.reward.alpha", "REWARD_PENALTY_BREAK": "spd.reward.penalty_break",
    "REWARD_USELESS": "spd.reward.useless", "REWARD_CORRECT_BASE": "spd.reward.correct_base",
    "SPD_SAMPLE_TEMPERATURE": "spd.sample_temperature",
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
    on_cpu = args.device == "cpu"
    settings: dict[str, Any] = {
        "data.train_files": train.path, "data.val_files": (val or train).path,
        "data.max_prompt_length": max(p.longest_input for p in (train, val) if p),
        "data.max_response_length": max(p.gamma for p in (train, val) if p),
        "data.seed": args.seed, "actor_rollout_ref.model.path": args.model,
        "actor_rollout_ref.model.lora_rank": args.lora_rank, "actor_rollout_ref.model.lora_alpha": args.lora_alpha,
        "actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu": args.micro_batch_size,
        "actor_rollout_ref.actor.fsdp_config.dtype": "float32" if on_cpu else "bfloat16",
        "spd.backbone": args.backbone, "spd.attention": args.attention,
        "spd.head_inputs": args.head_inputs, "spd.context_tokens": args.context_tokens,
        "spd.seed": args.seed, "spd.rollout.max_tokens": args.max_tokens, "trainer.device": args.device,
        "trainer.n_gpus_per_node": args.ranks, "trainer.total_epochs": args.epochs,
        "trainer.default_local_dir": args.output_dir, "trainer.save_freq": args.save_freq,
        "trainer.test_freq": args.test_freq, "trainer.val_before_train": bool(val),
    }  # fmt: skip
    optional = {
        "actor_rollout_ref.model.tokenizer_path": args.tokenizer, "spd.adapter_path": args.adapter,
        "spd.target_path": args.target, "spd.rollout.store_path": args.store,
        "trainer.total_training_steps": args.steps, "data.train_batch_size": args.batch_size,
        "actor_rollout_ref.actor.ppo_mini_batch_size": args.mini_batch_size,
        "actor_rollout_ref.actor.optim.lr": args.lr, "actor_rollout_ref.rollout.n": args.n,
    }  # fmt: skip
    for variable, key in REWARD_VARIABLES.items():
        option = getattr(args, variable.lower())
        optional[key] = option if option is not None else os.environ.get(variable) or None
    optional["spd.rollout.servers"] = os.environ.get("SPD_VLLM_URLS") or None
    settings.update({key: value for key, value in optional.items() if value is not None})
    return [*(f"{key}={_hydra_text(value)}" for key, value in settings.items()), *args.overrides]


def _hydra_text(value: Any) -> str:
    """A value in Hydra's syntax: paths with unusual characters are quoted."""
    if isinstance(value, bool):
        return str(value).lower()
    text = str(value)
    plain = all(c.isalnum() or c in "._-/~+" for c in text)
    return text if plain else "'" + text.replace("\\", "\\\\").replace("'", "\\'") + "'"


def set_training_environment(args: argparse.Namespace) -> None:
    """Put into this process's environment what the rollout and Ray's workers read there; options win over it."""
    given = {"MODEL_PATH": args.model, "TOKENIZER_PATH": args.tokenizer, "ADAPTER_PATH": args.adapter}
    given.update({variable: getattr(args, variable.lower()) for variable in REWARD_VARIABLES})
    os.environ.update({variable: str(value) for variable, value in given.items() if value is not None})
    # Ray's workers import spd_scorer by name.
    os.environ["PYTHONPATH"] = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    for variable in ("VERL_FILE_LOGGER_ROOT", "TENSORBOARD_DIR"):
        os.environ.setdefault(variable, str(Path(args.output_dir) / "logs"))
    os.environ.setdefault("LOGURU_LEVEL", "INFO")
    shown = [*given, "SPD_SEP_TOKEN_ID", "SPD_VLLM_URLS", "LOGURU_LEVEL"]
    logger.debug("training environment: {}", {name: os.environ[name] for name in shown if name in os.environ})


def compose_config(overrides: Sequence[str]) -> tuple[DictConfig, DictConfig]:
    """The training config, and the same tree without the overrides; raises HydraException for a malformed setting."""
    from hydra import compose, initialize_config_module

    from verl.planning.config_check import known_tree
    from verl.utils.config import forced_override

    forced = [forced_override(setting) for setting in overrides]
    with initialize_config_module("recipe.spd.config", version_base=None):
        return compose("spd_trainer", forced), known_tree("spd_trainer", forced)


@contextmanager
def local_server(config: DictConfig, known: DictConfig) -> Iterator[None]:
    """Run a vLLM server during the block; it loads while Ray and the ranks start, which find it by LOCAL_VARIABLE.

    No server starts if the config names some, for a cluster, several nodes, a dry run, or a config that the trainer
    refuses.
    """
    from recipe.spd.server import LOCAL_VARIABLE, server_of
    from recipe.spd.settings import SPDSettings
    from verl.planning.config_check import find_problems
    from verl.planning.problems import ConfigError, raise_if_any
    from verl.trainer.dry_run_checks import refuse_bad_input

    try:
        raise_if_any(find_problems(config, known=known))
        refuse_bad_input(config)
        refused = False
    except ConfigError:  # the trainer reports it
        refused = True
    elsewhere = os.environ.get("RAY_ADDRESS") or config.trainer.nnodes > 1 or config.spd.rollout.servers
    if refused or elsewhere or config.trainer.dry_run:
        yield
        return
    settings = SPDSettings.from_custom(OmegaConf.to_container(config.spd, resolve=True))
    server = server_of(settings, config.data.max_prompt_length, config.data.max_response_length)
    os.environ[LOCAL_VARIABLE] = server.handle()
    try:
        yield
    finally:
        del os.environ[LOCAL_VARIABLE]
        server.stop()


def run_training(config: DictConfig, known: DictConfig) -> None:
    """Train in this process; exits as `run_ppo` does. SIGHUP stops it as SIGTERM does."""
    from verl.trainer.main_ppo import run_ppo

    signal.signal(signal.SIGHUP, lambda number, frame: signal.raise_signal(signal.SIGTERM))
    with local_server(config, known):
        run_ppo(config, known=known)


def parse_args(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """Options, with the trainer's key=value settings in `overrides`."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--blocks", required=True, help="generated blocks (parquet or jsonl)")
    parser.add_argument("--metadata", required=True, help="questions with ground truth and baseline correctness")
    parser.add_argument("--val-blocks", help="blocks of held-out questions")
    parser.add_argument("--val-metadata", help="their questions (default: --metadata)")
    parser.add_argument("--output-dir", required=True, help="checkpoints, metrics, report, prepared data")
    model = os.environ.get("MODEL_PATH")
    parser.add_argument("--model", default=model, help="the target, or the own backbone (MODEL_PATH)")
    parser.add_argument("--tokenizer", default=os.environ.get("TOKENIZER_PATH"), help="default: the model's")
    parser.add_argument("--adapter", default=os.environ.get("ADAPTER_PATH"), help="saved scorer to start from")
    parser.add_argument("--target", help="the target that completes, where --model is another model")
    parser.add_argument("--store", help="file of completions, may be shared between runs")
    parser.add_argument("--backbone", choices=("target", "own"), default="target")
    parser.add_argument("--attention", choices=("causal", "spd", "hybrid"), default="causal")
    parser.add_argument("--head-inputs", choices=("state", "pair"), default="state", help="of an own backbone's head")
    parser.add_argument("--context-tokens", type=int, default=0, help="of the context, for an own backbone; 0: all")
    parser.add_argument("--lora-rank", type=int, default=0)
    parser.add_argument("--lora-alpha", type=int, default=16)
    parser.add_argument("--batch-size", type=int, help="blocks a step (default: the recipe's, as for what follows)")
    parser.add_argument("--mini-batch-size", type=int, help="blocks an update (default: the whole step)")
    parser.add_argument("--micro-batch-size", type=int, default=1024, help="samples a forward on one rank")
    parser.add_argument("--n", type=int, help="samples a block")
    parser.add_argument("--epochs", type=int, default=30)
    parser.add_argument("--steps", type=int, help="stop after so many steps")
    parser.add_argument("--lr", type=float)
    parser.add_argument("--max-tokens", type=int, default=256, help="longest completion")
    parser.add_argument("--seed", type=int, default=42)
    parser.add_argument("--ranks", type=int, default=1, help="GPUs, or CPU ranks, of a node")
    parser.add_argument("--device", choices=("cuda", "cpu"), default=None)
    parser.add_argument("--save-freq", type=int, default=-1)
    parser.add_argument("--test-freq", type=int, default=-1)
    for name in ("alpha", "penalty-break", "useless", "correct-base"):
        parser.add_argument(f"--reward-{name}", type=float)
    parser.add_argument("--sample-temperature", type=float, dest="spd_sample_temperature")
    args, overrides = parser.parse_known_args(argv)
    for text in overrides:
        if text.startswith("-") or "=" not in text:
            parser.error(f"unknown option {text!r}; settings of the trainer read key=value")
    args.overrides = overrides
    if not args.model:
        parser.error("name the target model: --model DIR or MODEL_PATH")
    if args.val_metadata and not args.val_blocks:
        parser.error("--val-metadata is given without --val-blocks")
    for name in ("output_dir", "store", "adapter", "target", "model", "tokenizer"):
        value = getattr(args, name)
        if value is not None and (name in ("output_dir", "store") or Path(value).expanduser().exists()):
            setattr(args, name, str(Path(value).expanduser().resolve()))
    return args


def _prepared(args: argparse.Namespace) -> tuple[list[PreparedData | None], list[Exception]]:
    """Training and validation data (None without), and every error that prevents preparing them."""
    from verl.trainer.dry_run_checks import load_model_part
    from verl.utils.tokenizer import hf_tokenizer

    options = ("blocks", "metadata", "val_blocks", "val_metadata")
    given = {f"--{option.replace('_', '-')}": getattr(args, option) for option in options}
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
            prepared[-1] = prepare_spd_data_from_real_source(blocks, metadata, folder / f"{split}.parquet", tokenizer)
        except (ValueError, OSError) as error:
            errors.append(error)
    return prepared, errors


def _config_errors(args: argparse.Namespace) -> list[str]:
    """Errors in the settings themselves, reported next to data that could not be prepared."""
    from hydra.errors import HydraException

    from verl.planning.config_check import find_problems
    from verl.planning.problems import WRONG

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

    from recipe.spd.server import sees_gpu
    from verl.trainer.dry_run_checks import ModelError

    if args.device is None:
        args.device = "cuda" if sees_gpu() else "cpu"
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
    overrides = training_overrides(args, train, val)
    try:
        config, known = compose_config(overrides)
    except HydraException as error:
        sys.exit(str(error))
    set_training_environment(args)
    logger.info("training with recipe/spd/config/spd_trainer.yaml and {}", " ".join(overrides))
    run_training(config, known)
    return 0


def _plans_only(overrides: Sequence[str]) -> bool:
    """Whether trainer.dry_run is set to one of yaml's spellings of true."""
    pairs = (text.lstrip("+").partition("=") for text in overrides)
    values = [value for key, _, value in pairs if key == "trainer.dry_run"]
    return bool(values) and values[-1].lower() in ("true", "yes", "on", "1")


if __name__ == "__main__":
    sys.exit(main())
