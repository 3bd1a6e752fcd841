"""Iterative refinement of the pretrained pair's target by the command of `make demo-pretrained-dllm`, three seeds."""

from collections.abc import Mapping
from typing import Any

from benchmarks.harness import Row, mean_row, run_seeds
from examples.demo_runner import ROOT

OUT = ROOT / "outputs" / "pretrained_dllm"


def run() -> list[Row]:
    """The command, whose stages are kept, and the rows of what it measured."""
    return measured(run_seeds("examples.pretrained.dllm.demo", OUT)["seeds"])


def measured(seeds: Mapping[str, Mapping[str, Any]]) -> list[Row]:
    """Means over the seeds of result.json."""
    results = list(seeds.values())
    modes = ", ".join(result["mode"] for result in results)
    names = {
        "dllm_tokens_per_forward": (f"tokens, lossless, {results[0]['questions']} questions; {modes}",
                                    lambda result: result["dllm_tokens_per_forward"]),
        "dllm_accuracy_gap": ("points, refined less twin, greedy", lambda result: result["gap"]["difference"]),
        "dllm_aup_refined": ("area under accuracy over tokens per forward", lambda result: result["aup"]["refined"]),
        "dllm_aup_twin": ("area under accuracy over tokens per forward", lambda result: result["aup"]["twin"]),
        "dllm_served_over_greedy": ("times, tokens per second, one request at a time",
                                    lambda result: result["dllm_served_over_greedy"]),
        "dllm_served_over_ngram": ("times, tokens per second, one request at a time", served_over_ngram),
        "dllm_training_seconds": ("s of refinement", lambda result: result["training_seconds"]),
    }  # fmt: skip
    return [mean_row(name, [value(result) for result in results], unit) for name, (unit, value) in names.items()]


def served_over_ngram(result: Mapping[str, Any]) -> float:
    """Tokens per second of the refined model with its own drafts over those with n-gram drafts."""
    ways = result["served"]["results"]
    return ways["refined"]["tokens_per_second"] / ways["n-gram"]["tokens_per_second"]
