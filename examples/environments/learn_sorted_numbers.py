"""GRPO in the environment of verifiers that sorted_numbers.py defines.

    python -m examples.environments.learn_sorted_numbers MODEL [key=value ...]

MODEL is a Hugging Face folder with a chat template; key=value are settings of main_ppo, such as trainer.dry_run=true.
The run's folder gets a report page. Needs the package: pip install -e .[verifiers].
"""

import argparse
import subprocess
import sys

from examples.environments.reasoning_gym_mixture import command

ENVIRONMENT = "sorted_numbers"
SETTINGS = {
    "data.environment.name": "verifiers", "data.environment.tasks": f"[{ENVIRONMENT}]",
    "data.environment.path": f"examples/environments/{ENVIRONMENT}.py",
    "data.environment.size": 500, "data.environment.val_size": 64,
    "data.train_batch_size": 8, "data.max_prompt_length": 128, "data.max_response_length": 12,
    "algorithm.adv_estimator": "grpo", "actor_rollout_ref.rollout.name": "vllm", "actor_rollout_ref.rollout.n": 8,
    "actor_rollout_ref.actor.ppo_mini_batch_size": 8, "actor_rollout_ref.actor.use_dynamic_bsz": "true",
    "actor_rollout_ref.actor.optim.lr": 2e-5, "trainer.n_gpus_per_node": 1, "trainer.total_training_steps": 12,
    "trainer.test_freq": 4, "trainer.save_freq": -1, "trainer.default_local_dir": f"outputs/{ENVIRONMENT}",
    "trainer.logger": "[console]",
}  # fmt: skip


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("settings", nargs="*", metavar="key=value")
    args = parser.parse_args()
    sys.exit(subprocess.call(command(args.model, args.settings, SETTINGS)))
