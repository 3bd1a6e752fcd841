"""Rates of an asynchronous run, from small steps of it on its own ranks, and the split of the GPUs that suits them."""

import statistics
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from rich.console import Console

from verl.config.batch_sizes import plan_batches
from verl.config.ppo import PPOConfig
from verl.planning.async_run import Rates, Schedule, Spread, Workload
from verl.planning.async_simulation import print_splits, splits, synchronous
from verl.planning.calibration import OF_RESPONSES, PROMPTS, RESPONSE, small_run
from verl.utils.jsonl import read_objects

#: Small steps in which each side waits for the other, so that a server runs all samples of a step at once.
IN_TURN = {
    "async_training.trigger_parameter_sync_step": 1, "async_training.staleness_threshold": 0,
    "rollout.total_rollout_steps": None, "rollout.test_freq": -1,
}  # fmt: skip
NOT_OF_AN_UPDATE = (*OF_RESPONSES, "update_weights", "check_rollout", "data", "step", "testing", "save_checkpoint",
                    "load_checkpoint")  # fmt: skip


def print_best_split(config: PPOConfig, train: Callable[[Mapping[str, Any]], None]) -> None:
    """Train small asynchronous steps of two sizes, and print the idle shares of each split of the run's GPUs.

    `train(changes)` trains with other values of `config`, by dotted key. Of the two sizes the tokens per second of a
    server come at two numbers of sequences. Responses have their measured lengths, scaled to data.max_response_length.
    """
    ranks = config.trainer.nnodes * config.trainer.n_gpus_per_node
    servers, per_server = _servers(config)
    measured = []
    for prompts in sorted({ranks * size for size in PROMPTS}):
        with tempfile.TemporaryDirectory(prefix="verl_calibration_") as folder:
            train({**small_run(config, folder, prompts), **IN_TURN})
            measured.append(measure(Path(folder), prompts * config.rollout.n))
    rates, response = rates_of(measured, ranks, plan_batches(config).prompts * config.rollout.n)
    longest = config.data.max_response_length
    response = Spread(response.mean * longest / min(longest, RESPONSE), response.cv, longest)
    workload = Workload(plan_batches(config).prompts, config.rollout.n, response, round(measured[-1]["prompt"]))
    bound = config.async_training
    schedule = Schedule(
        bound.trigger_parameter_sync_step, bound.staleness_threshold, bound.partial_rollout,
        config.actor_rollout_ref.rollout.max_num_seqs,
    )  # fmt: skip
    run = (rates, workload, schedule, ranks + servers * per_server, per_server, 5 * schedule.sync_step)
    console = Console(soft_wrap=True)
    console.rule("Split of the GPUs, simulated")
    print_splits(console, splits(*run), synchronous(*run))


def _servers(config: PPOConfig) -> tuple[int, int]:
    """(servers, GPUs of each)."""
    per_server = config.actor_rollout_ref.rollout.tensor_model_parallel_size
    return config.rollout.nnodes * config.rollout.n_gpus_per_node // per_server, per_server


def measure(folder: Path, samples: int) -> dict[str, float]:
    """What a small run's files say of its steps after the first one, which warms up.

    sequences and decode: mean number of sequences of a server while it generates, and its tokens per second; update_s,
    sync_s: seconds of an update and of a weight sync; samples; mean, cv: of the tokens of its responses; prompt: mean
    tokens of a prompt.
    """
    generated = sum(
        span["end"] - span["start"]
        for _, span in read_objects(folder / "async_timeline.jsonl", growing=True)
        if span["what"] == "generate" and span["version"] > 0
    )
    started: dict[str, float] = {}
    finished, running_s = [], 0.0
    for _, row in read_objects(folder / "async_journal.jsonl", growing=True):
        if row.get("state") == "running":
            started.setdefault(row["sample"], row["time"])
        elif row.get("state") == "finished" and row["version"] > 0:
            finished.append(row["tokens"])
            running_s += row["time"] - started[row["sample"]]
    metrics = [row["data"] for _, row in read_objects(folder / "metrics.jsonl") if "timing_s/step" in row["data"]][1:]

    def mean(name: str) -> float:
        return statistics.mean(row.get(name, 0.0) for row in metrics)

    phases = {name.removeprefix("timing_s/") for row in metrics for name in row if name.startswith("timing_s/")}
    return {
        "sequences": max(1.0, running_s / generated), "decode": sum(finished) / generated,
        "update_s": sum(mean(f"timing_s/{phase}") for phase in phases if "/" not in phase
                        and phase not in NOT_OF_AN_UPDATE), "sync_s": mean("timing_s/update_weights"),
        "samples": samples, "mean": statistics.mean(finished),
        "cv": statistics.pstdev(finished) / statistics.mean(finished),
        "prompt": mean("prompt_length/mean"),
    }  # fmt: skip


def rates_of(measured: list[dict[str, float]], ranks: int, samples: int) -> tuple[Rates, Spread]:
    """(rates, lengths) of an update of `samples` samples from `measure` of a few and of more samples on `ranks` ranks.

    The update's seconds grow linearly with the samples; what does not grow is not shared by ranks either.
    """
    few, many = measured[0], measured[-1]
    more = many["samples"] - few["samples"]
    each = max(0.0, min((many["update_s"] - few["update_s"]) / more, many["update_s"] / many["samples"])) if more else 0
    fixed = many["update_s"] - each * many["samples"]
    decode = tuple(sorted({run["sequences"]: run["decode"] for run in measured}.items()))
    rates = Rates(decode, update_s=each * samples * ranks, update_fixed_s=fixed, sync_s=many["sync_s"])
    return rates, Spread(many["mean"], many["cv"])
