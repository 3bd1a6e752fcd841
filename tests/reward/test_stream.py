"""Grading of samples that finished while others are still generated; limits that all objects of a process share."""

import asyncio
import threading
import time

import numpy as np
import pytest
from omegaconf import OmegaConf

from tests.helpers.columns import object_columns
from tests.reward.test_managers import TOKENIZER, batch, length_score
from verl.config.reward_model import RewardModelConfig
from verl.protocol import DataProto
from verl.reward.managers import DAPORewardManager, NaiveRewardManager, RateLimitedRewardManager, limited
from verl.reward.managers.batch import BatchRewardManager
from verl.reward.managers.limited import AsyncTokenBucket
from verl.reward.rows import GRADED, RewardError, drop_failed, rows_of
from verl.reward.stream import RewardStream, can_stream
from verl.trainer.ppo.reward import compute_reward
from verl.trainer.ppo.rollout_phase import RolloutPhase


def naive_manager(function):
    return NaiveRewardManager(TOKENIZER, 0, function)


def concurrent_manager(function):
    manager = naive_manager(function)
    manager.concurrent = True
    return manager


def grade(manager, data, order, stream=None):
    stream = stream or RewardStream(manager)
    for index in order:
        stream.put(index, data[index : index + 1])
    return stream.finish(data)


@pytest.mark.parametrize("make", [naive_manager, concurrent_manager])
def test_results_are_those_of_the_batch(make):
    def score(data_source, solution_str, ground_truth, extra_info):
        return {"score": len(solution_str.split()), "index": extra_info["index"]}

    data = batch(("1 2", "7", "1 2 3"))
    expected = compute_reward(batch(("1 2", "7", "1 2 3")), make(score))
    manager = make(score)
    metrics = grade(manager, data, [2, 0, 1])
    assert [result["score"] for result in data.non_tensor_batch[GRADED]] == [2, 1, 3]
    scores, extras = compute_reward(data, manager)
    assert scores.tolist() == expected[0].tolist() == [[0, 2, 0, 0], [1, 0, 0, 0], [0, 0, 3, 0]]
    assert extras == expected[1] and extras["index"] == [10, 11, 12]
    assert metrics["timing_s/agent_loop/reward/busy"] > 0


@pytest.mark.parametrize("make", [naive_manager, concurrent_manager])
def test_grading_starts_before_the_last_sample_is_there(make):
    graded = threading.Event()

    def score(data_source, solution_str, ground_truth, extra_info):
        graded.set()
        return 1.0

    data, manager = batch(), make(score)
    stream = RewardStream(manager)
    stream.put(0, data[:1])
    assert graded.wait(10)  # row 1 has not been generated yet
    grade(manager, data, [1], stream)
    assert compute_reward(data, manager)[0].sum(-1).tolist() == [1, 1]


def test_samples_of_concurrent_managers_are_graded_at_the_same_time():
    meet = threading.Barrier(2, timeout=10)  # passed by two threads at a time only

    def score(data_source, solution_str, ground_truth, extra_info):
        meet.wait()
        return 1.0

    data, manager = batch(), concurrent_manager(score)
    grade(manager, data, [0, 1])
    assert compute_reward(data, manager)[0].sum().item() == 2


@pytest.mark.parametrize("make", [naive_manager, concurrent_manager])
def test_a_failed_sample_keeps_its_rule(make):
    def score(data_source, solution_str, ground_truth, extra_info):
        return 1 / len(solution_str.split()[1:])  # an answer of one word has no score

    data, manager = batch(), make(score)
    grade(manager, data, [0, 1])
    with pytest.raises(RewardError, match=r"row 1 .*index=11.*ZeroDivisionError.*1 of 2 rows have no score"):
        compute_reward(data, manager)
    manager.settings = RewardModelConfig(error="drop")
    kept, scores, _, failed = drop_failed(data, *compute_reward(data, manager))
    assert (len(kept), scores.tolist(), failed) == (1, [[0, 1, 0, 0]], {"error": 1})


def test_the_rate_limited_manager_keeps_its_limit_over_samples_that_finish_apart():
    running, most = 0, 0

    async def score(data_source, solution_str, ground_truth, extra_info):
        nonlocal running, most
        running += 1
        most = max(most, running)
        await asyncio.sleep(0.05)
        running -= 1
        return float(len(solution_str.split()))

    data, manager = batch(("1 2", "7", "1 2 3", "1")), limited_manager(score, max_concurrent=2)
    assert can_stream(manager)
    grade(manager, data, [3, 1, 0, 2])
    assert compute_reward(data, manager)[0].sum(1).tolist() == [2, 1, 3, 1] and most == 2


def test_a_sample_that_comes_twice_has_the_result_of_the_last():
    """A conversation is held again after its worker died."""

    def score(data_source, solution_str, ground_truth, extra_info):
        time.sleep(0.3 if solution_str == "1 2" else 0)
        return float(len(solution_str.split()))

    data, again, manager = batch(("1 2", "7")), batch(("1 2 3", "7")), concurrent_manager(score)
    stream = RewardStream(manager)
    stream.put(0, data[:1])
    stream.put(0, again[:1])
    grade(manager, again, [1], stream)
    assert [result["score"] for result in again.non_tensor_batch[GRADED]] == [3, 1]


def test_samples_of_loops_with_different_columns_are_graded_together():
    first = threading.Event()

    def score(data_source, solution_str, ground_truth, extra_info):
        first.wait(10)  # until the others are waiting
        return float(len(solution_str.split()))

    data, manager = batch(("1 2 3", "7", "1 2")), naive_manager(score)
    stream = RewardStream(manager)
    for index in range(3):
        row = data[index : index + 1]
        more = {"turn_scores": np.array([0.5])} if index == 2 else {}
        stream.put(index, DataProto(row.batch, {**row.non_tensor_batch, **more}, {}))
    first.set()
    stream.finish(data)
    assert data.non_tensor_batch[GRADED].tolist() == [3, 1, 2]


def test_samples_that_were_lost_have_no_result():
    data = batch()
    grade(naive_manager(length_score), data, [1])
    assert data.non_tensor_batch[GRADED].tolist() == [None, 1]


def test_a_missing_column_is_reported():
    data, manager = batch(), naive_manager(length_score)
    stream = RewardStream(manager)
    stream.put(0, DataProto(data[:1].batch, {"extra_info": np.array([{}], dtype=object)}, {}))
    with pytest.raises(RewardError, match="no column 'data_source'.* or name another one in data.reward_fn_key"):
        stream.finish(data)
    del data.non_tensor_batch["reward_model"]
    with pytest.raises(RewardError, match=r"no column 'reward_model' to score by.* Add the column to the data set\.$"):
        rows_of(data, "data_source")


TOOLS, TURNS = ("tool_rewards", [[0.25], None]), ("turn_scores", [[0.5, 0.0], []])


@pytest.mark.parametrize(
    ("adds", "columns", "expected"),
    [(True, (TOOLS, TURNS), [2 + 0.5 + 0.25, 1]), (False, (TOOLS, TURNS), [2, 1]), (True, (TURNS,), [2.5, 1]),
     (True, (), [2, 1])],
)  # fmt: skip
def test_rewards_of_tools_and_turns_are_part_of_the_score_by_a_key(adds, columns, expected):
    data = batch(("1 2", "7"), **object_columns(**dict(columns)))
    phase = RolloutPhase.__new__(RolloutPhase)
    phase.rm_group = None
    phase.rollout_config = OmegaConf.create({"multi_turn": {"add_turn_rewards": adds}})
    manager = naive_manager(lambda data_source, solution_str, **rest: float(len(solution_str.split())))
    assert phase.score(data, manager)[1].sum(1).tolist() == expected


class Comparing(NaiveRewardManager):
    def __call__(self, data, return_dict=False):
        return super().__call__(data, return_dict)


def by_batch(data_sources, solution_strs, ground_truths, extra_infos):
    return [0.0] * len(data_sources)


def test_which_managers_grade_samples_singly():
    assert can_stream(naive_manager(length_score)) and can_stream(concurrent_manager(length_score))
    assert can_stream(DAPORewardManager(TOKENIZER, 0, length_score))
    assert can_stream(BatchRewardManager(TOKENIZER, 0, length_score))
    assert not can_stream(BatchRewardManager(TOKENIZER, 0, by_batch))
    assert not can_stream(Comparing(TOKENIZER, 0, length_score))
    assert not can_stream(length_score)


@pytest.fixture
def clock(monkeypatch):
    """A clock that only `asyncio.sleep` of the limits moves; a list with the time."""
    now = [100.0]

    async def sleep(seconds):
        now[0] += seconds

    monkeypatch.setattr(limited.time, "monotonic", lambda: now[0])
    monkeypatch.setattr(limited.asyncio, "sleep", sleep)
    return now


async def test_a_bucket_refills_by_its_rate(clock):
    bucket = AsyncTokenBucket(rate_limit=2.0, max_tokens=4.0)
    times = []
    for tokens in (4, 1, 1, 6):  # full; half a second each; three seconds
        await bucket.acquire(tokens)
        times.append(clock[0] - 100)
    clock[0] += 10  # more than it can hold
    await bucket.acquire(4)
    times.append(clock[0] - 100)
    assert times == [0.0, 0.5, 1.0, 4.0, 14.0]
    with pytest.raises(ValueError, match="rate_limit=0 must be above 0"):
        AsyncTokenBucket(0)


@pytest.fixture(autouse=True)
def fresh_limits(monkeypatch):
    monkeypatch.setattr(RateLimitedRewardManager, "_max_concurrent", None)
    monkeypatch.setattr(RateLimitedRewardManager, "_loop", None)


def limited_manager(function, **settings):
    manager = RateLimitedRewardManager(TOKENIZER, 0, function)
    manager.settings = RewardModelConfig(**settings)
    return manager


def test_limits_are_shared_and_kept(clock):
    times = []

    async def ask(**kwargs):
        times.append(clock[0] - 100)
        return 1.0

    limits = {"max_concurrent": 1, "max_rpm": 60, "max_tpm": 120, "estimated_tokens_per_request": 4}
    first, second = (limited_manager(ask, **limits) for _ in range(2))
    first(batch(["1"] * 2))
    second(batch(["1"]))
    # One request a second; the 120 tokens of the first minute suffice for all three.
    assert times == [0.0, 1.0, 2.0]


def test_a_request_that_hangs_is_an_error():
    async def hang(**kwargs):
        await asyncio.sleep(60)

    with pytest.raises(RewardError, match=r"row 0 .*TimeoutError.*2 of 2 rows have no score"):
        limited_manager(hang, timeout=0.05)(batch())
