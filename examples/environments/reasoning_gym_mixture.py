"""GRPO on two tasks of reasoning-gym, mixed by weight: no data file, no reward function.

    python -m examples.environments.reasoning_gym_mixture MODEL [key=value ...]

MODEL is a Hugging Face folder with a chat template; key=value are settings of main_ppo, such as trainer.dry_run=true.
Needs the package: pip install -e .[reasoning-gym].
"""

import subprocess
import sys
from collections.abc import Mapping
from typing import Any

SETTINGS = {
    "data.environment.name": "reasoning_gym",
    "data.environment.tasks": "{chain_sum: 2, letter_counting: 1}",
    "data.environment.params": "{chain_sum: {max_terms: 3, max_digits: 2}, letter_counting: {max_words: 6}}",
    "data.environment.size": 2000, "data.environment.val_size": 100, "data.environment.examples": 1,
    "data.train_batch_size": 16, "data.max_prompt_length": 512, "data.max_response_length": 128,
    "algorithm.adv_estimator": "grpo", "actor_rollout_ref.rollout.name": "vllm", "actor_rollout_ref.rollout.n": 8,
    "actor_rollout_ref.actor.ppo_mini_batch_size": 16, "actor_rollout_ref.actor.use_dynamic_bsz": "true",
    "trainer.n_gpus_per_node": 1, "trainer.total_training_steps": 50, "trainer.test_freq": 10,
    "trainer.default_local_dir": "outputs/reasoning_gym_mixture", "trainer.logger": "[console]",
}  # fmt: skip


def command(model: str, more: list[str], settings: Mapping[str, Any] = SETTINGS) -> list[str]:
    """The command of main_ppo."""
    settings = {**settings, "actor_rollout_ref.model.path": model}
    return [sys.executable, "-m", "verl.trainer.main_ppo", *(f"{k}={v}" for k, v in settings.items()), *more]


if __name__ == "__main__":
    if len(sys.argv) < 2:
        sys.exit(__doc__)
    sys.exit(subprocess.call(command(sys.argv[1], sys.argv[2:])))
