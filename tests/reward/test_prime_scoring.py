"""reward_manager.prime's functions: scores from processes, errors that name completion, task and function."""

import asyncio
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

from tests.helpers import rewards
from verl.reward.rows import RewardError
from verl.workers.reward_manager import prime


@pytest.mark.process
def test_primes_functions_score_in_processes_and_name_what_fails():
    ratio = rewards.ratio
    tasks, extra = ["pair", "eq", "eq"], [{"of": 4}] * 3
    scored = prime.run_reward_scoring(ratio, ["ab", "x", "y"], [None, "x", "x"], tasks, extra, 2)
    assert scored == [0.5, 1.0, 0.0]
    later = prime.parallel_compute_score_async(ratio, ["x", "y"], ["x", "x"], ["eq", "eq"], num_processes=1)
    assert asyncio.run(later) == [1.0, 0.0]
    said = (
        r"completion 1 \(task 'pair'\): reward function ratio \(tests/helpers/rewards.py:\d+\) raised "
        r"TypeError.* 1 of 2 completions have no score \(0 took too long\)"
    )
    with pytest.raises(RewardError, match=said):
        prime.run_reward_scoring(ratio, ["x", "ab"], ["x", "x"], ["eq", "pair"], num_processes=2)
    column = np.array(extra[:2], dtype=object)  # as a batch has it
    assert prime.run_reward_scoring(ratio, ["abc", "x"], ["", "x"], ["pair", "eq"], column, 1) == [0.75, 1.0]

    async def alone(completion, timeout):
        with ThreadPoolExecutor(1) as executor:
            return await prime.single_compute_score(ratio, completion, "x", "eq", None, executor, timeout)

    assert asyncio.run(alone("x", 30)) == {"score": 1.0}


@pytest.mark.process
def test_a_completion_that_hangs_prime_is_killed_and_named(monkeypatch):
    monkeypatch.setattr(prime, "_SECONDS", 3.0)
    with pytest.raises(RewardError, match=r"completion 1 .* took longer than 3 s and was killed.*\(1 took too long\)"):
        prime.run_reward_scoring(rewards.score, ["a", "hang", "b"], ["", "", ""], ["x"] * 3, num_processes=2)


def test_primes_columns_have_one_length():
    for columns in ((["x"] * 2, ["x"], ["eq"] * 2), (["x"], ["x"], ["eq"] * 2), (["x"], ["x"], ["eq"], [{}] * 2)):
        with pytest.raises(ValueError, match="a reference, a task and an extra_info are needed"):
            prime.run_reward_scoring(rewards.ratio, *columns)
    with pytest.raises(ValueError, match="num_processes=0"):
        prime.run_reward_scoring(rewards.ratio, ["x"], ["x"], ["eq"], num_processes=0)
