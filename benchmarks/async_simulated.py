"""An asynchronous run against its simulation, whose rates are measured on small steps as trainer.calibrate does.

Single answers with long-tailed lengths; one trainer rank and one server of one thread each, on two cores.
"""

import json
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.async_speed import ASYNC, POOLS, idle_shares, launch, seconds_between_steps, settings_of
from benchmarks.harness import Row, remembered, row, say
from examples.demo_runner import ROOT
from tests.helpers.models import save_markov_llama
from verl.planning import async_calibration
from verl.planning.async_run import Schedule, Spread, Workload, simulate

PROMPTS, STEPS, REPETITIONS, SEQUENCES = 16, 24, 3, 64
SIZES, CALIBRATION_STEPS = (4, 16), 5  # prompts of the small steps, and their number
LENGTHS = Spread(64.0, 0.8, 256)  # tokens of answers
FOLDER = ROOT / "outputs" / "benchmarks" / "async_simulated"
SIZE = {"hidden_size": 320, "intermediate_size": 640, "num_hidden_layers": 4, "num_attention_heads": 5, "head_dim": 64,
        "max_position_embeddings": 512}  # fmt: skip
REWARD = "def compute_score(*args, **kwargs):\n    return 1.0\n"
SIMULATED_UPDATES = 200


def make(folder: Path) -> Path:
    """The model, which counts down from the last word of the prompt, and the prompts, unless they exist."""
    if not (folder / "reward.py").exists():
        folder.mkdir(parents=True, exist_ok=True)
        longest = int(LENGTHS.longest)
        after = {f"a{n}": f"a{n - 1}" for n in range(2, longest + 1)} | {"a1": "<eos>"}
        template = "{% for message in messages %}{{ message['content'] }}{% endfor %}"
        save_markov_llama(folder / "model", [f"a{n}" for n in range(1, longest + 1)], after, template, **SIZE)
        lengths = LENGTHS.draw(np.random.default_rng(0), PROMPTS * STEPS).round().clip(min=2).astype(int)
        rows = [
            {"data_source": "count", "prompt": [{"role": "user", "content": f"a{length}"}],
             "reward_model": {"style": "rule", "ground_truth": ""}, "extra_info": {"index": i}}
            for i, length in enumerate(lengths.tolist())
        ]  # fmt: skip
        (folder / "rows.jsonl").write_text("".join(json.dumps(one) + "\n" for one in rows))
        (folder / "reward.py").write_text(REWARD)
    return folder


def train(run: Path, prompts: int, steps: int, **changes: Any) -> None:
    """An asynchronous run of `steps` updates."""
    rollout = "actor_rollout_ref.rollout"
    more = {
        "data.train_batch_size": 0, "data.max_prompt_length": 8, "data.max_response_length": int(LENGTHS.longest),
        "actor_rollout_ref.actor.ppo_mini_batch_size": prompts,
        "actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu": prompts,
        f"{rollout}.multi_turn.tool_config_path": "null", f"{rollout}.max_num_seqs": SEQUENCES,
        "trainer.total_training_steps": steps, "trainer.total_epochs": 1, "rollout.total_epochs": 1,
    }  # fmt: skip
    launch(ASYNC, settings_of(make(FOLDER), run) | POOLS | more | changes, 1, run)


def calibrated() -> list[dict[str, float]]:
    """What steps of both sizes say, in which each side waits for the other."""
    measured = []
    in_turn = {key: "null" if value is None else value for key, value in async_calibration.IN_TURN.items()}
    for prompts in SIZES:
        run = FOLDER / f"in_turn_{prompts}"
        train(run, prompts, CALIBRATION_STEPS, **in_turn)
        measured.append(async_calibration.measure(run, prompts))
    return measured


def real(run: Path) -> dict[str, float]:
    """Updates per hour and idle shares of a run."""
    train(run, PROMPTS, STEPS)
    trainer, server = idle_shares(run)
    return {"rate": 3600 * (STEPS - 1) / seconds_between_steps(run, STEPS), "trainer": trainer, "server": server}


def run() -> list[Row]:
    """Updates per hour and idle shares of both, and their difference; a value for each run with its calibration."""
    schedule = Schedule(1, POOLS["async_training.staleness_threshold"], True, SEQUENCES)
    errors, runs, simulated = [], [], []
    for number in range(REPETITIONS):
        measured = remembered(FOLDER / f"calibration_{number}.json", calibrated)
        rates, lengths = async_calibration.rates_of(measured, 1, PROMPTS)
        workload = Workload(PROMPTS, 1, Spread(lengths.mean, lengths.cv, LENGTHS.longest), measured[-1]["prompt"])
        simulated.append(simulate(rates, workload, schedule, 1, 1, SIMULATED_UPDATES))
        folder = FOLDER / f"run_{number}"
        runs.append(remembered(FOLDER / f"run_{number}.json", lambda folder=folder: real(folder)))
        errors.append(abs(simulated[-1].steps_per_hour / runs[-1]["rate"] - 1))
        say(f"{runs[-1]['rate']:.0f} updates per hour, {simulated[-1].steps_per_hour:.0f} simulated; rates {rates}")
    return [
        row("async_simulation_error", errors, "relative, of updates per hour"),
        row("async_real_updates", [one["rate"] for one in runs], "updates per hour"),
        row("async_simulated_updates", [one.steps_per_hour for one in simulated], "updates per hour"),
        row("async_real_trainer_idle", [one["trainer"] for one in runs], "of the time"),
        row("async_simulated_trainer_idle", [one.train_idle for one in simulated], "of the time"),
        row("async_real_server_idle", [one["server"] for one in runs], "of the time"),
        row("async_simulated_server_idle", [one.generate_idle for one in simulated], "of the time"),
    ]
