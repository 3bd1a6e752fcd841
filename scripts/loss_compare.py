"""Compares the metrics of two versions of the tree, run with the same seeds: python scripts/loss_compare.py OLD NEW.

OLD and NEW are commits (checked out into temporary worktrees) or folders. Each version trains by the commands that a
user would type: GRPO (10 steps, vLLM), the SPD scorer (10 steps, vLLM server), iterative refinement and SFT (20 steps
each, torchrun). Models and data are made once, by OLD. Every metric is compared except durations, memory and
throughput. Prints the largest difference of each training, expected 0; exit code 1 if there is any other.

    python scripts/loss_compare.py HEAD~1 .                       # the last commit against the working tree
    python scripts/loss_compare.py HEAD . --only sft refinement
    python scripts/loss_compare.py HEAD HEAD --only grpo          # the noise of a training itself
"""

import argparse
import json
import math
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

import psutil

ROOT = Path(__file__).resolve().parents[1]
SKIPPED = ("timing_s/", "timing_per_token_ms/", "perf/", "train/time(s)")  # depend on the machine
# spd/store/mib: the size of the SQLite file depends on when it merges its write-ahead log
SKIPPED_PARTS = ("_seconds", "seconds_", "throughput", "memory", "latency", "/time", "spd/store/mib")


def settings(**keys: object) -> list[str]:
    """`key=value` words; two underscores in a keyword stand for a dot."""
    return [f"{key.replace('__', '.')}={value}" for key, value in keys.items()]


def trainer_settings(run: Path, steps: int) -> list[str]:
    return settings(
        trainer__device="cpu", trainer__n_gpus_per_node=1, trainer__total_training_steps=steps, trainer__logger="[]",
        trainer__default_local_dir=run, trainer__report="false",
    )  # fmt: skip


def make_grpo(folder: Path) -> list[list[str]]:
    make = "examples.grpo_arithmetic.make_start"
    return [[sys.executable, "-m", make, "--out", str(folder / "start"), "--sft-steps", "60"]]


def train_grpo(folder: Path, run: Path) -> list[str]:
    start = folder / "start"
    actor, rollout = "actor_rollout_ref__actor__", "actor_rollout_ref__rollout__"
    return [sys.executable, "-m", "verl.trainer.main_ppo", *trainer_settings(run, 10), *settings(
        algorithm__adv_estimator="grpo", data__train_files=start / "train.parquet",
        data__val_files=start / "val.parquet", data__val_max_samples=64, data__train_batch_size=16,
        data__max_prompt_length=96, data__max_response_length=48, data__seed=0, data__dataloader_num_workers=0,
        custom_reward_function__path="examples/grpo_arithmetic/reward.py",
        actor_rollout_ref__model__path=start / "model",
        actor_rollout_ref__model__enable_gradient_checkpointing="false",
        **{f"{rollout}name": "vllm", f"{rollout}n": 4, f"{rollout}dtype": "float32", f"{rollout}max_num_seqs": 256,
           f"{rollout}calculate_log_probs": "true", f"{rollout}log_prob_micro_batch_size_per_gpu": 64,
           f"{actor}share_prompt_forward": "true", f"{actor}fsdp_config__dtype": "float32", f"{actor}optim__lr": "2e-4",
           f"{actor}ppo_mini_batch_size": 8, f"{actor}ppo_micro_batch_size_per_gpu": 32},
        trainer__total_epochs=1000, trainer__test_freq=5, trainer__save_freq=-1,
    )]  # fmt: skip


def make_spd(folder: Path) -> list[list[str]]:
    counts = {
        "n-train-questions": 120, "n-val-questions": 40, "n-test-questions": 40, "n-train-blocks": 400,
        "n-val-blocks": 60, "n-harm-blocks": 20, "target-steps": 120, "draft-steps": 60, "max-new-tokens": 96,
    }  # fmt: skip
    words = [word for name, count in counts.items() for word in (f"--{name}", str(count))]
    make = "examples.spd_arithmetic.prepare_blocks"
    return [[sys.executable, "-m", make, "--out", str(folder / "testbed"), *words]]


def train_spd(folder: Path, run: Path) -> list[str]:
    testbed = folder / "testbed"
    return [
        sys.executable, "train_spd_scorer.py", "--model", str(testbed / "target"), "--output-dir", str(run),
        "--blocks", str(testbed / "blocks_train.parquet"), "--metadata", str(testbed / "metadata_train.parquet"),
        "--val-blocks", str(testbed / "blocks_val.parquet"), "--val-metadata", str(testbed / "metadata_val.parquet"),
        *settings(
            spd__rollout__store_path=run / "completions.sqlite3", trainer__total_training_steps=10,
            trainer__test_freq=5, data__seed=0, spd__seed=0, data__train_batch_size=32,
            actor_rollout_ref__rollout__n=4, trainer__device="cpu", trainer__total_epochs=1000,
            spd__rollout__max_tokens=96, trainer__logger="[]", trainer__report="false",
        ),
    ]  # fmt: skip


def make_pairs(folder: Path) -> list[list[str]]:
    return [[sys.executable, "-m", "examples.dllm_arithmetic.make_base", "--out", str(folder), "--steps", "60"]]


def pair_settings(folder: Path, run: Path) -> list[str]:
    return [*trainer_settings(run, 20), *settings(
        data__train_files=folder / "train.parquet", data__val_files=folder / "val.parquet", data__max_length=160,
        data__train_batch_size=8, data__micro_batch_size_per_gpu=4, data__dataloader_num_workers=0,
        data__prompt_key="instruction", data__response_key="output", model__partial_pretrain=folder / "model",
        model__enable_gradient_checkpointing="false", model__fsdp_config__dtype="float32", optim__lr="1e-3",
        trainer__test_freq=10, trainer__seed=0,
    )]  # fmt: skip


LAUNCHER = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node=1", "-m"]


def train_refinement(folder: Path, run: Path) -> list[str]:
    return [
        *LAUNCHER, "dllm_reasoning.train_iterative_refine", *pair_settings(folder, run), *settings(
            iterative__noise_pattern="packed", iterative__block_length=8, iterative__windows_per_sample=4,
            iterative__num_iterations=2, iterative__ar_loss_weight=1.0, iterative__noise_seed=0,
        ),
    ]  # fmt: skip


def train_sft(folder: Path, run: Path) -> list[str]:
    return [*LAUNCHER, "verl.trainer.fsdp_sft_trainer", *pair_settings(folder, run)]


@dataclass(frozen=True)
class Training:
    """Commands that make models and data in a folder (shared by name), and the command of a run in another folder."""

    inputs: str
    make: Callable[[Path], list[list[str]]]
    train: Callable[[Path, Path], list[str]]


TRAININGS = {
    "grpo": Training("grpo", make_grpo, train_grpo),
    "spd": Training("spd", make_spd, train_spd),
    "refinement": Training("pairs", make_pairs, train_refinement),
    "sft": Training("pairs", make_pairs, train_sft),
}


def read_metrics(run: Path) -> dict[tuple[int, str], float]:
    """{(step, metric): value} of a run's metrics.jsonl, without what depends on the machine."""
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return {
        (row["step"], name): value
        for row in rows
        for name, value in row["data"].items()
        if not name.startswith(SKIPPED) and not any(part in name for part in SKIPPED_PARTS)
    }


def difference(
    old: Mapping[tuple[int, str], float], new: Mapping[tuple[int, str], float]
) -> tuple[int, float, list[tuple[int, str]], list[str]]:
    """Compared values, the largest absolute difference, the positions that differ (by step), metrics of one side only.

    Two NaN values are equal; NaN against a number is an infinite difference.
    """
    shared = sorted(old.keys() & new.keys())
    largest, positions = 0.0, []
    for position in shared:
        a, b = old[position], new[position]
        if a == b or (math.isnan(a) and math.isnan(b)):
            continue
        positions.append(position)
        largest = math.inf if math.isnan(a) or math.isnan(b) else max(largest, abs(a - b))
    return len(shared), largest, positions, sorted({name for _, name in old.keys() ^ new.keys()})


@contextmanager
def checked_out(version: str, name: str, work: Path) -> Iterator[Path]:
    """The folder of a version: itself, or a temporary worktree of a commit."""
    if Path(version).is_dir():
        yield Path(version).resolve()
        return
    tree = work / name
    subprocess.run(["git", "worktree", "add", "--quiet", "--detach", str(tree), version], cwd=ROOT, check=True)
    try:
        yield tree
    finally:
        subprocess.run(["git", "worktree", "remove", "--force", str(tree)], cwd=ROOT, check=True)


def run(command: Sequence[str], tree: Path, log: Path, limit: float | None = None) -> None:
    """Run a command in a tree; SystemExit with the log's end if it fails, or takes longer than `limit` seconds."""
    environment = {
        **os.environ, "PYTHONPATH": str(tree), "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1",
        "TOKENIZERS_PARALLELISM": "false",
    }  # fmt: skip
    with open(log, "a") as out:
        started: list[psutil.Process] = []
        process = subprocess.Popen(command, cwd=tree, env=environment, stdout=out, stderr=subprocess.STDOUT)
        try:
            code = process.wait(limit)
            ended = f"failed with exit code {code}" if code else ""
        except subprocess.TimeoutExpired:
            ended = f"was stopped after {limit:g} seconds"
            started = psutil.Process(process.pid).children(recursive=True)
            process.terminate()
            with suppress(subprocess.TimeoutExpired):
                process.wait(60)
        finally:
            process.kill()
            process.wait()
            for child in started:
                with suppress(psutil.NoSuchProcess):
                    child.kill()
    if ended:
        sys.exit(f"{' '.join(command[:4])} ... in {tree} {ended}:\n{log.read_text()[-3000:]}")


def compare(name: str, old: Path, new: Path, work: Path) -> bool:
    """Train with both trees and print the result; whether nothing differs."""
    training = TRAININGS[name]
    inputs = work / training.inputs
    if not inputs.exists():
        inputs.mkdir()
        for command in training.make(inputs):
            run(command, old, work / f"{training.inputs}.log")
    metrics = []
    for side, tree in (("old", old), ("new", new)):
        folder = work / f"{name}-{side}"
        shutil.rmtree(folder, ignore_errors=True)
        run(training.train(inputs, folder), tree, work / f"{name}-{side}.log")
        metrics.append(read_metrics(folder))
    count, largest, positions, one_sided = difference(*metrics)
    print(f"{name}: {count} values compared, largest difference {largest:g}", flush=True)
    if positions:
        step, metric = positions[0]
        values = " and ".join(f"{side[positions[0]]!r}" for side in metrics)
        names = sorted({metric for _, metric in positions})
        print(f"  first at step {step}: {metric} is {values}; "
              f"{len(positions)} values differ, of {', '.join(names[:10])}")
    if one_sided:
        print(f"  only in one version: {', '.join(one_sided)}")
    return not positions and count > 0


def main(argv: Sequence[str] | None = None) -> int:
    """Compare; the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("old", help="commit or folder")
    parser.add_argument("new", help="commit or folder")
    parser.add_argument("--only", nargs="+", choices=TRAININGS, default=list(TRAININGS))
    parser.add_argument("--work", type=Path, help="folder that keeps models, data, runs and logs (default: temporary)")
    args = parser.parse_args(argv)
    temporary = tempfile.TemporaryDirectory(prefix="loss_compare-") if args.work is None else None
    work = Path(temporary.name) if temporary else args.work.resolve()
    work.mkdir(parents=True, exist_ok=True)
    with checked_out(args.old, "old-tree", work) as old, checked_out(args.new, "new-tree", work) as new:
        same = [compare(name, old, new, work) for name in args.only]
    if temporary:
        temporary.cleanup()
    return int(not all(same))


if __name__ == "__main__":
    sys.exit(main())
