"""GRPO in the environment of verifiers that sorted_numbers.py defines, and its learning curve.

    python -m examples.environments.learn_sorted_numbers MODEL [key=value ...]

MODEL is a Hugging Face folder with a chat template; key=value are settings of main_ppo, such as trainer.dry_run=true.
The curve is curve.png in the run's folder. Needs the package: pip install -e .[verifiers].
"""

import argparse
import subprocess
import sys
from pathlib import Path

from examples.demo_runner import by_step
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


def draw(run: Path) -> None:
    """Write run/curve.png: held-out accuracy, with that before training as a line, and scores of training samples."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 3.4), layout="constrained")
    axes = figure.subplots(1, 2)
    metrics = (f"val-core/{ENVIRONMENT}/acc/mean@1", 100, "held-out answers that are right, %"), (
        "critic/score/mean", 1, "mean score of a step's samples")  # fmt: skip
    for axis, (metric, factor, label) in zip(axes, metrics, strict=True):
        values = {step: factor * value for step, value in by_step(run, metric).items()}
        axis.plot(values.keys(), values.values(), ".-", label="training")
        if axis is axes[0]:
            axis.axhline(values[0], color="gray", linestyle="--", label="no training")
            axis.legend()
        axis.set(xlabel="step", ylabel=label, ylim=(0, None))
        axis.grid(alpha=0.3)
    figure.savefig(run / "curve.png", dpi=110)


def main(model: str, more: list[str]) -> int:
    """Train, then draw; returns the exit code."""
    code = subprocess.call(command(model, more, SETTINGS))
    settings = dict(setting.split("=", 1) for setting in more)
    if code == 0 and settings.get("trainer.dry_run") != "true":
        draw(Path(settings.get("trainer.default_local_dir", SETTINGS["trainer.default_local_dir"])))
    return code


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("settings", nargs="*", metavar="key=value")
    sys.exit(main(*vars(parser.parse_args()).values()))
