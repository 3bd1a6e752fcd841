"""The bound of staleness: how many prompts are started, and which ones an update takes."""

from dataclasses import dataclass

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from verl.trainer.fully_async.staleness import StalenessBound, StalenessError


@dataclass
class Prompt:
    number: int
    oldest_version: int
    is_ready: bool = True


def bound(batch=2, sync_every=1, threshold=0.0, max_staleness=None, stale_samples="wait"):
    settings = {"trigger_parameter_sync_step": sync_every, "staleness_threshold": threshold,
                "max_staleness": max_staleness, "stale_samples": stale_samples}  # fmt: skip
    return StalenessBound.from_settings(settings, batch)


@pytest.mark.parametrize(
    ("sync_every", "threshold", "versions", "at_start", "after_a_sync"),
    [(1, 0, 0, 8, 16), (4, 0, 3, 32, 64), (4, 0.1, 4, 35, 67), (1, 0.5, 1, 12, 20), (1, 1, 1, 16, 24)],
)
def test_versions_and_prompts_follow_from_the_threshold(sync_every, threshold, versions, at_start, after_a_sync):
    limit = bound(8, sync_every, threshold)
    assert limit.versions == versions
    assert limit.may_start(0, 0) == at_start
    assert limit.may_start(sync_every, 0) == after_a_sync
    assert limit.may_start(sync_every, 3) == after_a_sync + 3  # dropped prompts are replaced


def test_a_smaller_limit_than_the_thresholds_starts_fewer_prompts():
    assert bound(8, 1, 1.0).may_start(0, 0) == 16
    assert bound(8, 1, 1.0, max_staleness=0).may_start(0, 0) == 8


def test_prompts_that_expire_first_come_first_and_the_batch_is_in_order():
    prompts = [Prompt(0, 1), Prompt(1, 0), Prompt(2, 1), Prompt(3, 0)]
    chosen = bound(threshold=1.0).choose(2, prompts)
    assert [prompt.number for prompt in chosen] == [1, 3]
    chosen = bound(batch=3, threshold=1.0).choose(2, prompts)
    assert [prompt.number for prompt in chosen] == [0, 1, 3]


def test_a_step_waits_for_a_prompt_that_the_next_one_could_not_take():
    limit = bound(threshold=1.0)
    ready = [Prompt(1, 0), Prompt(2, 0)]
    assert limit.choose(1, [Prompt(0, 0, False), *ready]) == ready  # step 2 may take prompt 0
    assert limit.choose(2, [Prompt(0, 0, False), *ready]) is None
    assert bound(threshold=1.0, stale_samples="drop").choose(2, [Prompt(0, 0, False), *ready]) == ready
    # Of three prompts that run, the next step has room for two.
    running = [Prompt(number, 0, False) for number in range(3)]
    assert limit.choose(1, [*running, Prompt(3, 0), Prompt(4, 0)]) is None
    assert limit.choose(1, [*running[1:], Prompt(3, 0), Prompt(4, 0)]) is not None


def test_a_sample_that_is_too_old_is_refused():
    limit = bound(sync_every=4, threshold=0.1)
    limit.check(8, 3)
    with pytest.raises(StalenessError, match="step 9 would train a sample of weights version 3, 5 versions old.* 4"):
        limit.check(9, 3)
    assert limit.expired(9, [Prompt(0, 3), Prompt(1, 4)])[0].number == 0


@given(
    batch=st.integers(1, 4), sync_every=st.integers(1, 3), threshold=st.sampled_from([0, 0.1, 0.5, 1.0, 2.5]),
    seed=st.integers(0, 200), drops=st.booleans(),
)  # fmt: skip
def test_runs_with_random_orders_of_finishing_keep_the_bound(batch, sync_every, threshold, seed, drops):
    """20 steps: every batch is full and within the bound; where steps wait, no prompt is dropped."""
    limit = bound(batch, sync_every, threshold, stale_samples="drop" if drops else "wait")
    rng, synced, started, dropped, trained = np.random.default_rng(seed), 0, 0, 0, []
    prompts: list[Prompt] = []
    for step in range(1, 21):
        if step - 1 - synced >= sync_every:
            synced = step - 1
        while True:
            while started < limit.may_start(synced, dropped):
                prompts.append(Prompt(started, synced, False))
                started += 1
            for old in limit.expired(step, prompts):
                prompts.remove(old)
                dropped += 1
            if (chosen := limit.choose(step, prompts)) is not None:
                break
            running = [prompt for prompt in prompts if not prompt.is_ready]
            assert running, "the step waits for nothing"
            running[min(rng.geometric(0.5), len(running)) - 1 if seed % 2 else -1].is_ready = True
        assert len(chosen) == batch
        limit.check(step, min(prompt.oldest_version for prompt in chosen))
        trained += [prompt.number for prompt in chosen]
        prompts = [prompt for prompt in prompts if prompt not in chosen]
    assert len(set(trained)) == len(trained) == 20 * batch
    assert drops or not dropped
