"""Reward functions that raise, hang or die, for processes that find them by name."""

import asyncio
import os
import time


def score(data_source, solution_str, ground_truth, extra_info=None, bonus=0):
    """Number of words; 'hang', 'raise', 'die' and 'none' in answer or truth do what they say."""
    what = f"{solution_str} {ground_truth}"
    if "hang" in what:
        while True:  # arithmetic, as an expression without end would do
            pass
    if "raise" in what:
        raise KeyError("boom")
    if "die" in what:
        os._exit(3)
    if "none" in what:
        return None
    return {"score": len(solution_str.split()) + bonus, "acc": 1.0}


def ratio(task, completion, reference, extra):
    """Positional: (length / extra["of"], text) for the task 'pair', else whether answer and reference are equal."""
    return (len(completion) / extra["of"], "more") if task == "pair" else {"score": float(completion == reference)}


def slow(solution_str, **kwargs):
    """1 after a tenth of a second."""
    time.sleep(0.1)
    return 1.0


def process(solution_str, **kwargs):
    """The number of the process that grades."""
    time.sleep(0.05)
    return float(os.getpid())


async def later(ground_truth, **kwargs):
    """1 after a quarter of a second; truths 'hang' and 'raise' do what they say."""
    if ground_truth == "hang":
        await asyncio.sleep(60)
    if ground_truth == "raise":
        raise KeyError("boom")
    await asyncio.sleep(0.25)
    return 1.0


async def blocking(ground_truth, **kwargs):
    """1 after a quarter of a second, but for the truth 'hang', which lets nobody else run."""
    while ground_truth == "hang":
        pass
    await asyncio.sleep(0.25)
    return 1.0
