"""Rewards: programs a second in the sandbox, answers a second through the grading processes."""

import itertools
import os
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

from benchmarks.harness import Row, row, say
from verl.reward.pool import ExternFunction, GradingPool
from verl.reward.sandbox import SandboxConfig, SandboxUnavailable, run_python

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
    pool = GradingPool(ExternFunction("pkg://verl.reward.rules", "default_compute_score"), workers, 60.0)
    numbers = itertools.count(100)  # no answer comes twice: a process remembers what it compared

    def work() -> None:
        solutions = [text % next(numbers) if "%d" in text else text for _ in range(ANSWERS)]
        pool.map([{"data_source": source, "solution_str": one, "ground_truth": truth} for one in solutions])

    rates = rate(work, ANSWERS)
    pool.close()
    return rates


def sandbox_rows() -> Iterator[Row]:
    """Programs a second, confined and not; a message in place of a row that this machine's kernel refuses."""
    cores = os.cpu_count() or 1
    asked = {
        "sandbox_runs_per_second_one": (1, SandboxConfig()),
        "sandbox_runs_per_second_all_cores": (cores, SandboxConfig()),
        "unconfined_runs_per_second_one": (1, SandboxConfig(unconfined=True)),
    }
    for name, (workers, limits) in asked.items():
        try:
            yield row(name, programs(workers, limits), "1/s")
        except SandboxUnavailable as refusal:
            say(f"{name} is not measured: {refusal}")


def run() -> list[Row]:
    """All rows."""
    say(__doc__)
    return [
        *sandbox_rows(),
        row("math_answers_per_second_one", answers("lighteval/MATH", MATH, "\\frac{3}{4}", 1), "1/s"),
        row("gsm8k_answers_per_second_one", answers("openai/gsm8k", "#### 42", "42", 1), "1/s"),
    ]
