"""Rewards: programs a second in the sandbox, answers a second through the grading processes."""

from __future__ import annotations

import os
import time
from concurrent.futures import ThreadPoolExecutor

from benchmarks.harness import Row, row, say
from verl.utils.grading import ExternFunction, GradingPool
from verl.utils.sandbox import SandboxConfig, run_python

PROGRAM = "a, b = map(int, input().split())\nprint(a + b)\n"
RUNS, REPETITIONS, ANSWERS = 40, 5, 400
MATH = "so the answer is \\boxed{\\frac{%d}{4}}"


def rate(work, count: int) -> list[float]:
    """Items a second of `work()`, which does `count` of them, after one untimed round."""
    rates = []
    for repetition in range(REPETITIONS + 1):
        started = time.perf_counter()
        work()
        if repetition:
            rates.append(count / (time.perf_counter() - started))
    return rates


def programs(workers: int, limits: SandboxConfig) -> list[float]:
    """Programs a second, `workers` at a time."""

    def one(_: int) -> None:
        if run_python(PROGRAM, b"30 12\n", limits).stdout != b"42\n":
            raise RuntimeError("the program gave a wrong sum")

    with ThreadPoolExecutor(workers) as pool:
        return rate(lambda: list(pool.map(one, range(RUNS))), RUNS)


def answers(source: str, text: str, truth: str, workers: int) -> list[float]:
    """Answers a second of a rule reward in `workers` processes."""
    pool = GradingPool(ExternFunction("pkg://verl.utils.reward_score", "default_compute_score"), workers, 60.0)
    solutions = [text % i if "%d" in text else text for i in range(ANSWERS)]
    items = [{"data_source": source, "solution_str": solution, "ground_truth": truth} for solution in solutions]
    rates = rate(lambda: pool.map(items), ANSWERS)
    pool.close()
    return rates


def run() -> list[Row]:
    """All rows."""
    cores = os.cpu_count() or 1
    say(__doc__)
    return [
        row("sandbox_runs_per_second_one", programs(1, SandboxConfig()), "1/s"),
        row("sandbox_runs_per_second_all_cores", programs(cores, SandboxConfig()), "1/s"),
        row("unconfined_runs_per_second_one", programs(1, SandboxConfig(unconfined=True)), "1/s"),
        row("math_answers_per_second_one", answers("lighteval/MATH", MATH, "\\frac{3}{4}", 1), "1/s"),
        row("gsm8k_answers_per_second_one", answers("openai/gsm8k", "#### 42", "42", 1), "1/s"),
    ]
