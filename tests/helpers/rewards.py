"""Reward functions that raise, hang or die, for processes that find them by name."""

import asyncio
import os
import time


def score(data_source, solution_str, ground_truth, extra_info=None, bonus=0):
    """Number of words; 'hang', 'raise', 'die' and 'none' do what they say."""
    if "hang" in solution_str:
        while True:  # arithmetic, as an expression without end would do
            pass
    if "raise" in solution_str:
        raise KeyError("boom")
    if "die" in solution_str:
        os._exit(3)
    if "none" in solution_str:
        return None
    return {"score": len(solution_str.split()) + bonus, "acc": 1.0}


def slow(solution_str, **kwargs):
    """1 after a tenth of a second."""
    time.sleep(0.1)
    return 1.0


def process(solution_str, **kwargs):
    """The number of the process that grades."""
    time.sleep(0.05)
    return float(os.getpid())


async def later(solution_str, **kwargs):
    """1 after a quarter of a second; 'hang' never ends, 'raise' raises, 'block' never gives the loop back."""
    if "block" in solution_str:
        time.sleep(60)
    if "hang" in solution_str:
        await asyncio.sleep(60)
    if "raise" in solution_str:
        raise KeyError("boom")
    await asyncio.sleep(0.25)
    return 1.0
