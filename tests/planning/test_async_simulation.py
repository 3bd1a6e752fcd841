"""The simulation of asynchronous training: closed forms, invariants, the command that compares splits."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

from verl.planning.async_run import Rates, Schedule, Spread, Workload, at_concurrency, simulate
from verl.planning.async_simulation import splits, synchronous

ROOT = Path(__file__).resolve().parents[2]
CONSTANT = Workload(prompts=4, n=2, response=Spread(100.0))
RATES = Rates(decode=((1, 10.0), (8, 80.0), (16, 80.0)), update_s=6.0, sync_s=1.0)
SPREAD_OUT = Workload(prompts=8, n=4, response=Spread(100.0, cv=1.0, longest=600.0), prompt_tokens=20, turns=3,
                      tool_s=Spread(2.0, cv=1.0), tool_tokens=10)  # fmt: skip
BUSY = Rates(decode=((1, 10.0), (16, 100.0), (64, 250.0)), prefill=((1, 500.0),), update_s=20.0, update_fixed_s=1.0,
             sync_s=0.5)  # fmt: skip


def test_rates_are_interpolated_and_constant_outside_of_the_table():
    table = ((2, 10.0), (4, 30.0))
    assert [at_concurrency(table, n) for n in (1, 2, 3, 4, 9)] == [10.0, 10.0, 20.0, 30.0, 30.0]


def test_one_server_and_constant_lengths():
    """8 samples of 100 tokens at 80 tokens per second: 10 s, then 6 s of training and a sync of 1 s."""
    run = simulate(RATES, CONSTANT, Schedule(sync_step=1, staleness_threshold=0), ranks=1, servers=1)
    assert run.steps_per_hour == pytest.approx(3600 / (10 + 6 + 1))
    assert run.train_idle == pytest.approx(10 / 17) and run.generate_idle == pytest.approx(6 / 17)
    assert run.sync == pytest.approx(1 / 17)
    assert run.staleness == run.spans == {0: 40 * 8}


@pytest.mark.parametrize("partial", [True, False])
def test_without_staleness_a_step_is_the_sum_of_its_phases(partial):
    schedule = Schedule(sync_step=1, staleness_threshold=0, partial_rollout=partial)
    rates = Rates(((1, 10.0), (8, 80.0)), ((1, 400.0),), update_s=6.0, update_fixed_s=0.5, sync_s=1.0)
    workload = Workload(4, 2, Spread(100.0), prompt_tokens=50)
    run = simulate(rates, workload, schedule, ranks=3, servers=2)
    seconds = 4 * 50 / 400 + 100 / 10 + 6 / 3 + 0.5 + 1  # four samples on each server
    assert run.steps_per_hour == pytest.approx(3600 / seconds)


def test_tool_calls_occupy_no_server():
    """One sample: half of the tokens, 5 s of a tool, its 20 tokens, the other half."""
    rates = Rates(((1, 10.0),), ((1, 40.0),), update_s=1.0)
    workload = Workload(1, 1, Spread(100.0), prompt_tokens=80, turns=2, tool_s=Spread(5.0), tool_tokens=20)
    run = simulate(rates, workload, Schedule(1, 0.0), ranks=1, servers=1)
    assert run.steps_per_hour == pytest.approx(3600 / (2 + 5 + 5 + 0.5 + 5 + 1))
    assert run.generate_idle == pytest.approx(6 / 18.5)


@pytest.mark.parametrize(("update_s", "longer"), [(6.0, 10.0), (15.0, 15.0)])
def test_with_much_staleness_a_step_is_the_longer_of_its_phases(update_s, longer):
    rates = Rates(RATES.decode, update_s=update_s, sync_s=1.0)
    schedule = Schedule(sync_step=1, staleness_threshold=3, concurrency=8)
    run = simulate(rates, CONSTANT, schedule, ranks=1, servers=1, updates=200)
    assert 3600 / run.steps_per_hour == pytest.approx(longer + 1, rel=0.02)
    idle = {6.0: run.generate_idle, 15.0: run.train_idle}[update_s]
    assert idle == pytest.approx(0, abs=0.01)
    other = {6.0: run.train_idle, 15.0: run.generate_idle}[update_s]
    assert other == pytest.approx(1 - (update_s if longer == 10 else 10) / (longer + 1) - run.sync, abs=0.02)


def test_an_interrupted_sample_spans_versions_and_is_read_again():
    """Updates take no time: samples of 10 s are interrupted by each sync, and their 100 tokens are read again."""
    rates = Rates(((1, 10.0),), ((1, 100.0),), update_s=3.0, sync_s=1.0)
    workload = Workload(1, 1, Spread(50.0))
    run = simulate(rates, workload, Schedule(1, 3.0, concurrency=1), ranks=1, servers=1, updates=50)
    slower = simulate(Rates(rates.decode, ((1, 10.0),), 3.0, 0.0, 1.0), workload, Schedule(1, 3.0, concurrency=1), 1, 1)
    assert sum(count for span, count in run.spans.items() if span) > 0
    assert slower.steps_per_hour < run.steps_per_hour
    whole = simulate(rates, workload, Schedule(1, 3.0, False, concurrency=1), ranks=1, servers=1, updates=50)
    assert set(whole.spans) == {0}


@pytest.mark.parametrize("partial", [True, False])
@pytest.mark.parametrize("threshold", [0.0, 0.1, 1.0, 2.5])
@pytest.mark.parametrize("sync_step", [1, 4])
def test_no_sample_is_older_than_the_bound(sync_step, threshold, partial):
    schedule = Schedule(sync_step, threshold, partial, concurrency=40)
    run = simulate(BUSY, SPREAD_OUT, schedule, ranks=2, servers=2, updates=24)
    assert max(run.staleness) <= schedule.updates_allowed
    assert sum(run.staleness.values()) == sum(run.spans.values()) == 24 * 8 * 4
    assert 0 <= run.train_idle < 1 and 0 <= run.generate_idle < 1 and 0 < run.sync < 1
    if not partial or (sync_step, threshold) == (1, 0.0):
        assert set(run.spans) == {0}


def test_a_run_depends_on_its_seed_alone():
    run = (BUSY, SPREAD_OUT, Schedule(2, 1.0), 2, 3, 10)
    assert simulate(*run, seed=1) == simulate(*run, seed=1) != simulate(*run, seed=2)


def test_more_staleness_makes_more_updates():
    rates = [simulate(BUSY, SPREAD_OUT, Schedule(1, threshold), 2, 2, 30).steps_per_hour for threshold in (0, 0.5, 2)]
    assert rates == sorted(rates) and rates[2] > 1.15 * rates[0]


def test_the_best_split_balances_both_sides():
    """On 12 GPUs, 60 s of generation on one and 30 s of training on one: 8 that generate, 4 that train, 7.5 s each."""
    rates = Rates(decode=((1, 20 / 3), (2, 40 / 3)), update_s=30.0)
    workload = Workload(prompts=16, n=1, response=Spread(50.0))
    runs = splits(rates, workload, Schedule(1, 1.0, concurrency=2), gpus=12)
    assert (runs[0].ranks, runs[0].servers) == (4, 8)
    assert [run.steps_per_hour for run in runs] == sorted((run.steps_per_hour for run in runs), reverse=True)
    assert all(run.ranks + run.servers <= 12 and 16 % run.ranks == 0 for run in runs)
    in_turn = synchronous(rates, workload, Schedule(1, 1.0), gpus=12)
    assert in_turn.steps_per_hour < runs[0].steps_per_hour
    two = splits(rates, workload, Schedule(1, 1.0), gpus=12, gpus_per_server=5)
    assert {run.servers for run in two} == {1, 2}
    with pytest.raises(ValueError, match="5 GPUs are too few for a rank that trains and a server on 5"):
        splits(rates, workload, Schedule(), gpus=5, gpus_per_server=5)


@pytest.mark.process
def test_the_command_names_the_best_split():
    command = [sys.executable, "-m", "verl.planning.async_simulation"]
    options = ["--gpus", "4", "--decode", "1:50,16:400", "--update-seconds", "20", "--prompts", "8", "--n", "2",
               "--response-tokens", "200", "--updates", "8"]  # fmt: skip
    made = subprocess.run([*command, *options], capture_output=True, text=True, cwd=ROOT)
    assert made.returncode == 0, made.stderr
    assert re.search(r"Most updates with ranks that train: \d, servers: \d; \d\.\d\d times", made.stdout)
    refused = subprocess.run([*command, *options, "--gpus", "1"], capture_output=True, text=True, cwd=ROOT)
    assert refused.returncode == 2 and "too few" in refused.stderr
    refused = subprocess.run([*command, *options, "--decode", "1:0"], capture_output=True, text=True, cwd=ROOT)
    assert refused.returncode == 2 and "--decode" in refused.stderr
