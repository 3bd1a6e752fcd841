"""Prepares drafted blocks, then trains the speculative-decoding scorer on them by GRPO.

    python train_spd_scorer.py --blocks blocks.parquet --metadata metadata.parquet --model TARGET_DIR --output-dir DIR

What follows the options as key=value goes to the trainer (recipe/spd/config/spd_trainer.yaml). MODEL_PATH,
TOKENIZER_PATH, ADAPTER_PATH, SPD_VLLM_URLS, SPD_SEP_TOKEN_ID, SPD_SAMPLE_TEMPERATURE, REWARD_ALPHA,
REWARD_PENALTY_BREAK, REWARD_USELESS, REWARD_CORRECT_BASE and LOGURU_LEVEL are read from the environment.
"""

from __future__ import annotations

import argparse
import os
import signal
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from loguru import logger
from omegaconf import DictConfig, OmegaConf

ROOT = Path(__file__).resolve().parent
# Options that are written into the config too: the environment does not travel to the workers of a remote cluster.
REWARD_VARIABLES = {
    "REWARD_ALPHA": "spd.reward.alpha", "REWARD_PENALTY_BREAK": "spd.reward.penalty_break",
    "REWARD_USELESS": "spd.reward.useless", "REWARD_CORRECT_BASE": "spd.reward.correct_base",
    "SPD_SAMPLE_TEMPERATURE": "spd.sample_temperature",
}  # fmt: skip


class DataError(ValueError):
    """A block or metadata file cannot be used; the text names the file, the row and the mend."""


@dataclass(frozen=True)
class PreparedData:
    """What `prepare_spd_data_from_real_source` wrote, in rows and tokens."""

    path: Path
    rows: int
    skipped_matches: int  # blocks that exact match accepts whole (or up to the end token): nothing to learn
    longest_input: int
    gamma: int


def setup_loguru_rank0(level: str | None = None) -> None:
    """Log to standard error at `level` (else LOGURU_LEVEL, else INFO) on rank 0; warnings and errors on the others."""
    chosen = level or os.environ.get("LOGURU_LEVEL") or "INFO"
    rank = int(os.environ.get("RANK", "0"))
    logger.remove()
    try:
        logger.add(sys.stderr, level=chosen if rank == 0 else "WARNING")
    except ValueError as error:
        raise ValueError(f"LOGURU_LEVEL={chosen!r} is no level; use DEBUG, INFO, WARNING or ERROR.") from error


def prepare_spd_data_from_real_source(
    blocks_path: str | Path, metadata_path: str | Path, output_path: str | Path, tokenizer: Any
) -> PreparedData:
    """Write the training parquet from generated blocks and the questions' metadata (parquet or jsonl).

    Blocks: question_id, context_ids, draft_ids, target_ids, optionally is_correct_baseline, baseline_length (tokens of
    the target's own completion of the context) and question_len (tokens of the context before the answer begins).
    Metadata: question_id, question, ground_truth, is_correct_baseline.
    """
    import pyarrow as pa
    import pyarrow.parquet as pq

    from recipe.spd.dataset import build_spd_input, resolve_sep_token_id
    from verl.utils.dataset.rl_dataset import read_rows

    questions = _read_metadata(metadata_path, read_rows(metadata_path))
    blocks = read_rows(blocks_path)
    sep, eos = resolve_sep_token_id(tokenizer), tokenizer.eos_token_id
    rows, skipped = [], 0
    for number, block in enumerate(blocks):
        where = f"{blocks_path}, row {number}"
        _check_block(where, block, questions, len(tokenizer), metadata_path)
        context, draft, target = (list(block[name]) for name in ("context_ids", "draft_ids", "target_ids"))
        if _nothing_to_learn(draft, target, eos):
            skipped += 1
            continue
        meta = questions[block["question_id"]]
        ids, offsets = build_spd_input(context, draft, target, sep)
        baseline = block.get("is_correct_baseline")
        extra = {
            "index": len(rows), "question_id": str(block["question_id"]), **offsets,
            "context_ids": context, "draft_ids": draft, "target_ids": target,
            "is_correct_baseline": int(meta["is_correct_baseline"] if baseline is None else baseline),
            **{name: _whole(block.get(name)) for name in ("baseline_length", "question_len")},
        }  # fmt: skip
        rows.append(
            {
                "data_source": "spd_scorer", "prompt": meta["question"], "input_ids": ids, "extra_info": extra,
                "reward_model": {"style": "rule", "ground_truth": str(meta["ground_truth"])},
                "rollout_info": dict(offsets),
            }
        )  # fmt: skip
    if not rows:
        raise DataError(f"{blocks_path}: none of its {len(blocks)} blocks has a mismatch to judge; draft more blocks.")
    output = Path(output_path)
    output.parent.mkdir(parents=True, exist_ok=True)
    partial = output.with_suffix(".tmp")
    pq.write_table(pa.Table.from_pylist(rows), partial, write_page_checksum=True)
    os.replace(partial, output)
    logger.info("{}: {} blocks to judge; {} without a mismatch are skipped", output, len(rows), skipped)
    longest, gamma = max(len(row["input_ids"]) for row in rows), max(row["extra_info"]["draft_len"] for row in rows)
    return PreparedData(output, len(rows), skipped, longest, gamma)


def _read_metadata(path: str | Path, rows: Sequence[Mapping[str, Any]]) -> dict[Any, Mapping[str, Any]]:
    """The rows by question_id; one that lacks something, holds what it must not, or comes twice is refused."""
    from recipe.spd.dataset import facts_error, truth_error

    found: dict[Any, Mapping[str, Any]] = {}
    for number, row in enumerate(rows):
        where = f"{path}, row {number}"
        _refuse_missing(where, row, ("question_id", "question", "ground_truth", "is_correct_baseline"))
        if not isinstance(row["question"], str):
            raise DataError(f"{where}: question must be a text, not {str(row['question'])[:80]}.")
        if wrong := facts_error(row) or truth_error(row["ground_truth"]):
            raise DataError(f"{where}: {wrong}")
        if row["question_id"] in found:
            raise DataError(f"{where}: question_id {row['question_id']!r} stands there twice; keep one.")
        found[row["question_id"]] = row
    return found


def _refuse_missing(where: str, row: Mapping[str, Any], needed: Sequence[str]) -> None:
    """Every needed column must hold something, and question_id what can be looked up."""
    if missing := [name for name in needed if row.get(name) is None]:
        raise DataError(f"{where}: lacks {', '.join(missing)}; it has {', '.join(map(str, row))}. Add or rename it.")
    if not isinstance(row["question_id"], str | int):
        raise DataError(f"{where}: question_id must be a text or a whole number, not {str(row['question_id'])[:80]}.")


def _check_block(
    where: str, block: Mapping[str, Any], questions: Mapping[Any, Any], vocabulary: int, metadata_path: str | Path
) -> None:
    """Refuse a block with missing, empty or impossible ids, or of an unknown question."""
    from recipe.spd.dataset import IDS, facts_error, ids_error, spelling_error

    _refuse_missing(where, block, ("question_id", *IDS))
    if block["question_id"] not in questions:
        raise DataError(f"{where}: question_id {block['question_id']!r} is not in {metadata_path}; add it there.")
    wrong = [ids_error(name, block[name], vocabulary) for name in IDS]
    if told := next(filter(None, [*wrong, facts_error(block), spelling_error(tuple(block))]), ""):
        raise DataError(f"{where}: {told}")
    if (block.get("question_len") or 0) > len(block["context_ids"]):
        raise DataError(
            f"{where}: question_len is {block['question_len']}, but the context has {len(block['context_ids'])} ids."
        )
    if len(block["target_ids"]) != len(block["draft_ids"]) + 1:
        raise DataError(
            f"{where}: {len(block['target_ids'])} target_ids for {len(block['draft_ids'])} draft_ids; one more "
            "target id (the bonus token) is needed."
        )


def _whole(number: int | float | None) -> int | None:
    return None if number is None else int(number)


def _nothing_to_learn(draft: Sequence[int], target: Sequence[int], eos: int | None) -> bool:
    """Whether draft == target[:-1], or they agree up to an end token, behind which nothing is written."""
    for drafted, wanted in zip(draft, target, strict=False):
        if drafted != wanted:
            return False
        if drafted == eos:
            return True
    return True


def build_training_command(args: argparse.Namespace, train: PreparedData, val: PreparedData | None) -> list[str]:
    """The trainer's command line with every hyper-parameter that differs from the recipe's yaml."""
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
    command = [sys.executable, "-m", "verl.trainer.main_ppo"]
    command += ["--config-path", "pkg://recipe.spd.config", "--config-name", "spd_trainer"]
    command += [f"{key}={_hydra_text(value)}" for key, value in settings.items()]
    return [*command, *args.overrides]


def _hydra_text(value: Any) -> str:
    """A value as hydra's command line reads it: paths with unusual characters quoted."""
    if isinstance(value, bool):
        return str(value).lower()
    text = str(value)
    plain = all(c.isalnum() or c in "._-/~+" for c in text)
    return text if plain else "'" + text.replace("\\", "\\\\").replace("'", "\\'") + "'"


def _create_training_env(args: argparse.Namespace) -> dict[str, str]:
    """The environment of the training process: this one, with what the options say over it."""
    env = dict(os.environ)
    given = {"MODEL_PATH": args.model, "TOKENIZER_PATH": args.tokenizer, "ADAPTER_PATH": args.adapter}
    given.update({variable: getattr(args, variable.lower()) for variable in REWARD_VARIABLES})
    env.update({variable: str(value) for variable, value in given.items() if value is not None})
    # Ray's workers import spd_scorer by name.
    env["PYTHONPATH"] = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
    env["TOKENIZERS_PARALLELISM"] = "false"
    for variable in ("VERL_FILE_LOGGER_ROOT", "TENSORBOARD_DIR"):
        env.setdefault(variable, str(Path(args.output_dir) / "logs"))
    env.setdefault("LOGURU_LEVEL", "INFO")
    shown = [*given, "SPD_SEP_TOKEN_ID", "SPD_VLLM_URLS", "LOGURU_LEVEL"]
    logger.debug("environment of the training: {}", {name: env[name] for name in shown if name in env})
    return env


@contextmanager
def local_server(command: Sequence[str], env: Mapping[str, str]) -> Iterator[dict[str, str]]:
    """`env` for the training, with a vLLM server of ours in it that loads while Ray and the ranks start.

    It ends with the block. No server where some are named, for a cluster, several nodes, a dry run, or a config that
    the trainer is going to refuse.
    """
    from recipe.spd.server import LOCAL_VARIABLE, server_of
    from recipe.spd.settings import SPDSettings

    config = None if env.get("SPD_VLLM_URLS") or env.get("RAY_ADDRESS") else _sound_config(command)
    if config is None or config.spd.rollout.servers or config.trainer.nnodes > 1 or config.trainer.dry_run:
        yield dict(env)
        return
    settings = SPDSettings.from_custom(OmegaConf.to_container(config.spd, resolve=True))
    server = server_of(settings, config.data.max_prompt_length, config.data.max_response_length)
    try:
        yield {**env, LOCAL_VARIABLE: server.handle()}
    finally:
        server.stop()


def _sound_config(command: Sequence[str]) -> DictConfig | None:
    """The config of a training command; None when the trainer will refuse it, and say why."""
    from hydra.errors import HydraException

    from verl.planning.config_check import find_problems
    from verl.planning.problems import ConfigError, raise_if_any
    from verl.trainer.dry_run_checks import refuse_bad_input

    try:
        config = _composed(command)
        raise_if_any(find_problems(config))
        refuse_bad_input(config)
    except (HydraException, ConfigError):
        return None
    return config


def _composed(command: Sequence[str]) -> DictConfig:
    """The config of a training command; HydraException where it has none."""
    from hydra import compose, initialize_config_module

    with initialize_config_module("recipe.spd.config", version_base=None):
        return compose("spd_trainer", list(command[command.index("--config-name") + 2 :]))


def _config_errors(args: argparse.Namespace) -> list[str]:
    """What is wrong with the settings themselves, told beside data that could not be prepared."""
    from hydra.errors import HydraException

    from verl.planning.config_check import find_problems
    from verl.planning.problems import WRONG

    unseen = PreparedData(Path(args.blocks), rows=0, skipped_matches=0, longest_input=1024, gamma=8)
    try:
        problems = find_problems(_composed(build_training_command(args, unseen, None)))
    except HydraException as error:
        return [str(error)]
    return [problem.message for problem in problems if problem.kind == WRONG]


def run_training(command: Sequence[str], env: Mapping[str, str]) -> int:
    """Run the trainer; SIGTERM, SIGHUP and Ctrl-C go on to it, once each: it saves and stops. Gives its exit code."""
    logger.info("starts {}", " ".join(command))
    from recipe.spd.supervisor import end_with_parent

    # In a group of its own: a terminal's Ctrl-C would reach it twice, and a second signal ends it without saving.
    # SIGTERM when this process is killed: it saves and stops.
    ending = {"process_group": 0, "preexec_fn": lambda: end_with_parent(signal.SIGTERM)}
    child = subprocess.Popen(list(command), env=dict(env), cwd=ROOT, **ending)
    previous = {}
    for sign in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        previous[sign] = signal.signal(sign, lambda number, frame: child.send_signal(signal.SIGTERM))
    try:
        return child.wait()
    finally:
        for sign, handler in previous.items():
            signal.signal(sign, handler)


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
    """Training and validation data (None without), and everything that keeps them from being made."""
    from verl.trainer.dry_run_checks import load_model_part
    from verl.utils.tokenizer import hf_tokenizer

    options = ("blocks", "metadata", "val_blocks", "val_metadata")
    given = {f"--{option.replace('_', '-')}": getattr(args, option) for option in options}
    errors: list[Exception] = [
        FileNotFoundError(f"{option} {path}: there is no such file.")
        for option, path in given.items() if path and not Path(path).is_file()
    ]  # fmt: skip
    option, tokenizer = "--tokenizer" if args.tokenizer else "--model", None
    try:
        tokenizer = load_model_part(option, args.tokenizer or args.model, hf_tokenizer)
    except (ValueError, OSError) as error:
        errors.append(error)
    found: list[PreparedData | None] = []
    folder = Path(args.output_dir) / "data"
    for split, blocks, metadata in (
        ("train", args.blocks, args.metadata), ("val", args.val_blocks, args.val_metadata or args.metadata),
    ):  # fmt: skip
        found.append(None)
        if tokenizer is None or not blocks or not (Path(blocks).is_file() and Path(metadata).is_file()):
            continue
        try:
            found[-1] = prepare_spd_data_from_real_source(blocks, metadata, folder / f"{split}.parquet", tokenizer)
        except (ValueError, OSError) as error:
            errors.append(error)
    return found, errors


def main(argv: Sequence[str] | None = None) -> int:
    """Prepare, train; gives the exit code."""
    args = parse_args(argv)
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
    command = build_training_command(args, train, val)
    with local_server(command, _create_training_env(args)) as env:
        return run_training(command, env)


def _plans_only(overrides: Sequence[str]) -> bool:
    """Whether trainer.dry_run is on, in any spelling of yaml's true."""
    pairs = (text.lstrip("+").partition("=") for text in overrides)
    said = [value for key, _, value in pairs if key == "trainer.dry_run"]
    return bool(said) and said[-1].lower() in ("true", "yes", "on", "1")


if __name__ == "__main__":
    sys.exit(main())
