"""Runs the benchmarks and writes benchmarks/results/*.json: `python -m benchmarks.run [name ...]`; by default NAMES."""

import importlib
import sys

from benchmarks.harness import Bound, save
from benchmarks.speculative import WALL
from examples.pretrained import demo as pretrained_demo
from examples.pretrained.dllm import demo as dllm_demo
from examples.pretrained.gsm8k import demo as gsm8k_demo

NAMES = ("spd", "rl")
# Take long: by name only.
LONG = ("speculative", "pretrained", "gsm8k")
#: Take long too: benchmark -> the one whose file has its results.
PARTS = {"pretrained_spd": "pretrained", "pretrained_dllm": "pretrained"}
WANTED: dict[str, Bound] = {
    "spd_step_speedup": ("at least", 5),
    "spd_step_gradient_difference": ("at most", 1e-5),
    "actor_update_shared_speedup": ("at least", 2.5),
    "actor_update_shared_gradient_difference": ("at most", 1e-4),
    "hf_rollout_done_rows_leave": ("at least", 1.3),
    "grpo_step_vs_trl_short": ("at least", 0.9),
    "grpo_step_vs_trl_long": ("at least", 2),
    **{f"refine_wall_{batch}": ("at least", least) for batch, least in WALL.items()},
    "refine_same_samples": ("at least", 1),
    "grpo_gain_points": ("at least", pretrained_demo.GAIN_POINTS),
    "grpo_gain_seconds": ("at most", pretrained_demo.TIME_S),
    "grpo_gain_control": ("at most", 0),
    "grpo_step_vs_trl": ("at least", 5),
    "first_step_kl_bfloat16": ("at most", 0.01),
    "first_step_pearson_bfloat16": ("at least", 0.995),
    "first_step_kl_float32": ("at most", 1e-5),
    "gsm8k_gain_points": ("at least", gsm8k_demo.GAIN_POINTS),
    "gsm8k_gain_last_number": ("at least", gsm8k_demo.GAIN_LAST_NUMBER),
    "gsm8k_gain_control": ("at most", 0),
    "gsm8k_seconds": ("at most", gsm8k_demo.TIME_S),
    "gsm8k_step_vs_trl": ("at least", 4),
    "gsm8k_step_over_parts": ("at most", 1.3),
    "spd_gain_over_best_rule": ("at least", 1.1),
    "spd_gain_over_exact": ("at least", 1.2),
    "spd_served_over_exact": ("at least", 1.08),
    "spd_served_over_greedy": ("at least", 1.65),
    "dllm_tokens_per_forward": ("at least", dllm_demo.TOKENS_PER_FORWARD),
    "dllm_accuracy_gap": ("at least", -dllm_demo.GAP_POINTS),
    "dllm_served_over_greedy": ("at least", dllm_demo.SERVED),
    "dllm_training_seconds": ("at most", dllm_demo.TRAINING_S),
}


def main(names: list[str]) -> int:
    """Run the named benchmarks, all by default; gives the exit code."""
    if unknown := sorted(set(names) - {*NAMES, *LONG, *PARTS}):
        sys.stderr.write(f"no benchmark {', '.join(unknown)}; known: {', '.join((*NAMES, *LONG, *PARTS))}\n")
        return 2
    for name in names or NAMES:
        rows, whole = importlib.import_module(f"benchmarks.{name}").run(), PARTS.get(name, name)
        save(whole, rows, WANTED, alone=name in PARTS)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
