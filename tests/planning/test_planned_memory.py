"""The plan of a rank's memory against a run with a vocabulary as large as those of Qwen2.5."""

import io
import re
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest
from rich.console import Console
from transformers import AutoConfig

from tests.helpers.models import save_tiny_llama
from tests.helpers.rl_run import compose_run, metrics_rows, overrides
from tests.helpers.watched_runs import family
from verl.config.compose import to_settings
from verl.config.ppo import PPOConfig
from verl.planning.ppo_memory import print_memory

pytestmark = [pytest.mark.long, pytest.mark.process]

PROMPT, RESPONSE, SAMPLES = 12, 116, 4
RUN = {
    "data__max_prompt_length": PROMPT, "data__max_response_length": RESPONSE, "data__train_batch_size": 4,
    "actor_rollout_ref__model__use_remove_padding": "true", "actor_rollout_ref__rollout__name": "vllm",
    "actor_rollout_ref__rollout__n": SAMPLES, "actor_rollout_ref__rollout__ignore_eos": "true",
    "actor_rollout_ref__rollout__dtype": "float32", "actor_rollout_ref__actor__ppo_mini_batch_size": 4,
    "trainer__total_training_steps": 2, "trainer__save_freq": 1,
}  # fmt: skip


def planned_bytes(folder: Path, model: str) -> float:
    text = io.StringIO()
    config = to_settings(compose_run(folder, model, **RUN), PPOConfig)
    print_memory(Console(file=text, width=120), config, AutoConfig.from_pretrained(model))
    together = re.search(r"together\D+([\d,.]+)", text.getvalue())
    return float(together[1].replace(",", "")) * 2**20


def largest_rank(driver: int) -> int:
    """Bytes of physical memory that the largest worker process of a run has had so far."""
    peaks = [0]
    for process in family(driver):
        try:
            if "ray::" in " ".join(process.cmdline()):
                status = Path(f"/proc/{process.pid}/status").read_text()
                peaks.append(1024 * int(re.search(r"VmHWM:\s+(\d+)", status)[1]))
        except (psutil.NoSuchProcess, FileNotFoundError, TypeError):
            continue  # it has ended
    return max(peaks)


def test_a_rank_takes_the_planned_memory_over_generation_updates_and_saves(tmp_path):
    """99 million parameters in float32, most of them a tied embedding of 151,936 words; two micro-batches a step."""
    model = save_tiny_llama(tmp_path / "model", hidden=512, layers=8, vocab_size=151_936, tied=True)
    planned = planned_bytes(tmp_path, model)
    # Groups of equal rewards are left out of an update, which then holds less. Most answers have no text to judge.
    spread = "import random\n\ndef compute_score(**answer):\n    return random.random()\n"
    (tmp_path / "spread.py").write_text(spread)
    settings = {**RUN, "custom_reward_function__path": tmp_path / "spread.py"}
    command = [sys.executable, "-m", "verl.trainer.main_ppo", *overrides(tmp_path, model, **settings)]
    peak, log = 0, tmp_path / "log"
    with log.open("w") as file:
        run = subprocess.Popen(command, stdout=file, stderr=subprocess.STDOUT)
        while run.poll() is None:
            peak = max(peak, largest_rank(run.pid))
            time.sleep(0.2)
    assert run.returncode == 0, log.read_text()[-3000:]
    assert (tmp_path / "out" / "global_step_2").is_dir()
    assert all(row["health/groups_without_variance"] == 0 for row in metrics_rows(tmp_path))
    assert 0.9 < planned / peak < 1.1, f"planned {planned / 2**20:.0f} MiB, measured {peak / 2**20:.0f} MiB"
