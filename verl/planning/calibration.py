"""The seconds of a step, from small steps of the same run on the same ranks."""

import json
import math
import statistics
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from rich.console import Console

from verl.config.batch_sizes import plan_batches
from verl.config.ppo import PPOConfig
from verl.planning.dry_run import print_rows

STEPS = 3  # the first warms up
PROMPTS = (1, 4)  # per rank, of two small runs
RESPONSE = 128  # tokens at most
OF_RESPONSES = ("gen", "gen_max")
OF_TOKENS = ("old_log_prob", "ref", "values", "adv", "update_critic", "update_actor")
OF_SAMPLES = ("reward",)
NOT_IN_A_STEP = ("step", "testing", "save_checkpoint", "load_checkpoint", "data")


def print_step_time(config: PPOConfig, train: Callable[[Mapping[str, Any]], None]) -> None:
    """Train small steps of two sizes and print what a step of `config` takes at their rates.

    `train(changes)` trains with other values of `config`, by dotted key. Of a phase that works on samples, the two
    sizes give a fixed part and one that grows with the samples. An update has the fixed part once for each optimizer
    step; the other grows with a sample's tokens as well. The seconds of a generation grow with the length of responses,
    which are counted at their full length: a real step is rather shorter. Other phases stay.
    """
    plan = plan_batches(config)
    n, longest = plan.samples_per_prompt, config.data.max_response_length
    sizes = sorted({plan.ranks * max(1, min(size, plan.prompts // plan.ranks)) for size in PROMPTS})
    measured = [_measure(config, train, prompts) for prompts in sizes]
    few, many = measured[0], measured[-1]
    samples, more = sizes[-1] * n, (sizes[-1] - sizes[0]) * n
    prompt, response = many["prompt_length/mean"], many["response_length/mean"]
    critic_updates = math.ceil(plan.prompts / config.critic.ppo_mini_batch_size)
    updates = {"update_actor": plan.mini_batches, "update_critic": critic_updates}
    seconds = {}
    for phase in sorted(name.removeprefix("timing_s/") for name in many if name.startswith("timing_s/")):
        least, most = (run.get(f"timing_s/{phase}", 0.0) for run in (few, many))
        if phase in (*OF_RESPONSES, *OF_TOKENS, *OF_SAMPLES):
            rate = max(0.0, min((most - least) / more, most / samples)) if more else most / samples
            fixed = (most - rate * samples) * updates.get(phase, 1)
            growing = rate * plan.prompts * n
            if phase in OF_TOKENS:
                growing *= (prompt + longest) / (prompt + response)
            seconds[phase] = (fixed + growing) * (longest / response if phase in OF_RESPONSES else 1)
        elif phase not in NOT_IN_A_STEP:
            seconds[phase] = (least + most) / 2
    seconds = {phase: s for phase, s in seconds.items() if s >= 0.005}
    console = Console(soft_wrap=True)
    console.rule("Seconds of a step, estimated")
    print_rows(console, {p: f"{s:,.2f}" for p, s in seconds.items()} | {"step": f"{sum(seconds.values()):,.2f}"})


def _measure(config: PPOConfig, train: Callable[[Mapping[str, Any]], None], prompts: int) -> dict[str, float]:
    """Means of the metrics over small steps of `prompts` prompts."""
    with tempfile.TemporaryDirectory(prefix="verl_calibration_") as folder:
        train(small_run(config, folder, prompts))
        lines = (Path(folder) / "metrics.jsonl").read_text().splitlines()
    rows = [json.loads(line)["data"] for line in lines][1:]
    return {name: statistics.mean(row.get(name, 0.0) for row in rows) for row in rows for name in row}


def small_run(config: PPOConfig, folder: str, prompts: int) -> dict[str, Any]:
    """What makes a run of `prompts` prompts a step, with short responses, that keeps nothing."""
    return {
        "trainer.dry_run": False, "trainer.calibrate": False, "trainer.total_training_steps": STEPS,
        "trainer.logger": [], "trainer.report": False, "trainer.val_before_train": False, "trainer.test_freq": -1,
        "trainer.save_freq": 0, "trainer.resume_mode": "disable", "trainer.default_local_dir": folder,
        "trainer.critic_warmup": 0, "trainer.rollout_data_dir": None,
        "data.train_batch_size": prompts, "data.gen_batch_size": prompts,
        "data.max_response_length": min(RESPONSE, config.data.max_response_length),
        "actor_rollout_ref.actor.ppo_mini_batch_size": prompts, "critic.ppo_mini_batch_size": prompts,
    }  # fmt: skip
