"""The seconds of a step, from three small steps of the same run on the same ranks."""

import json
import statistics
import tempfile
from collections.abc import Callable
from pathlib import Path

from omegaconf import DictConfig, OmegaConf
from rich.console import Console

from verl.planning.batch_arithmetic import plan_batches
from verl.planning.dry_run import print_rows

STEPS = 3  # the first warms up
RESPONSE = 128  # tokens at most
OF_RESPONSES = ("gen", "gen_max")
OF_TOKENS = ("old_log_prob", "ref", "values", "adv", "update_critic", "update_actor")
OF_SAMPLES = ("reward",)
NOT_IN_A_STEP = ("step", "testing", "save_checkpoint", "load_checkpoint", "data")


def print_step_time(config: DictConfig, train: Callable[[DictConfig], None]) -> None:
    """Train three small steps by `train` and print what a step of `config` takes at their rates.

    A phase's seconds grow with the tokens, or samples, that it works on; others stay. Responses are counted at their
    full length, and small batches use ranks and engines less well: a real step is rather shorter.
    """
    with tempfile.TemporaryDirectory(prefix="verl_calibration_") as folder:
        small = _small(config, folder)
        train(small)
        lines = (Path(folder) / "metrics.jsonl").read_text().splitlines()
        rows = [json.loads(line)["data"] for line in lines][1:]
    phases = {name.removeprefix("timing_s/") for row in rows for name in row if name.startswith("timing_s/")}
    names = ("prompt_length/mean", "response_length/mean", *(f"timing_s/{phase}" for phase in phases))
    mean = {name: statistics.mean(row.get(name, 0.0) for row in rows) for name in names}
    here, there = (plan_batches(OmegaConf.to_container(c, resolve=True)) for c in (small, config))
    samples = there.prompts * there.samples_per_prompt / (here.prompts * here.samples_per_prompt)
    prompt, response = mean["prompt_length/mean"], mean["response_length/mean"]
    longest = config.data.max_response_length
    factors = dict.fromkeys(OF_RESPONSES, samples * longest / response)
    factors |= dict.fromkeys(OF_TOKENS, samples * (prompt + longest) / (prompt + response))
    factors |= dict.fromkeys(OF_SAMPLES, samples)
    seconds = {p: mean[f"timing_s/{p}"] * factors.get(p, 1.0) for p in sorted(phases - set(NOT_IN_A_STEP))}
    seconds = {phase: s for phase, s in seconds.items() if s >= 0.005}
    console = Console(soft_wrap=True)
    console.rule("Seconds of a step, at most")
    print_rows(console, {p: f"{s:,.2f}" for p, s in seconds.items()} | {"step": f"{sum(seconds.values()):,.2f}"})


def _small(config: DictConfig, folder: str) -> DictConfig:
    """The run with as few prompts as its ranks can share, short responses, and nothing kept."""
    ranks = config.trainer.nnodes * config.trainer.n_gpus_per_node
    changes = {
        "trainer.dry_run": False, "trainer.calibrate": False, "trainer.total_training_steps": STEPS,
        "trainer.logger": [], "trainer.report": False, "trainer.val_before_train": False, "trainer.test_freq": -1,
        "trainer.save_freq": 0, "trainer.resume_mode": "disable", "trainer.default_local_dir": folder,
        "trainer.rollout_data_dir": None, "data.train_batch_size": ranks, "data.gen_batch_size": ranks,
        "data.max_response_length": min(RESPONSE, config.data.max_response_length),
        "actor_rollout_ref.actor.ppo_mini_batch_size": ranks, "critic.ppo_mini_batch_size": ranks,
    }  # fmt: skip
    small = config.copy()
    for key, value in changes.items():
        OmegaConf.update(small, key, value, force_add=False)
    return small
