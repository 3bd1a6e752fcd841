"""SIGKILL of the driver, of a rank that trains, of one that generates and of a reward process: the command resumes."""

import os
import signal
import subprocess
import sys
import time
from contextlib import contextmanager

import psutil
import pytest

from tests.helpers.rl_run import overrides
from tests.helpers.spd_run import processes_of
from tests.helpers.watched_runs import wait_until
from tests.trainer.fully_async.test_runs import PROGRAM, check_journal, rows
from verl.training.checkpoint.publish import TRACKER

pytestmark = [pytest.mark.process, pytest.mark.slow]
STEPS = 9
#: A word of the command lines of each kind of process; reward processes are children of a fork server.
VICTIMS = {"driver": "", "trainer": "SeparateActorWorker", "server": "RolloutReplicaWorker",
           "reward": "multiprocessing.forkserver"}  # fmt: skip


def command(folder, model, **more):
    keys = {
        "rollout__nnodes": 1, "rollout__n_gpus_per_node": 1, "rollout__total_rollout_steps": 4 * STEPS,
        "rollout__total_epochs": 20, "rollout__test_freq": -1, "rollout__n": 2, "actor_rollout_ref__rollout__n": 2,
        "actor_rollout_ref__rollout__name": "vllm", "actor_rollout_ref__rollout__dtype": "float32",
        "actor_rollout_ref__rollout__max_num_seqs": 32, "actor_rollout_ref__rollout__server__retry_delay": 0.5,
        "actor_rollout_ref__rollout__ignore_eos": "true", "actor_rollout_ref__actor__ppo_mini_batch_size": 4,
        "async_training__staleness_threshold": 1, "async_training__trigger_parameter_sync_step": 1,
        "data__max_response_length": 96, "trainer__save_freq": 2, "trainer__total_epochs": 20,
        "reward_model__num_workers": 1, **more,
    }  # fmt: skip
    words = [word for word in overrides(folder, model, **keys) if not word.startswith("data.train_batch_size")]
    return [sys.executable, "-m", "recipe.fully_async_policy.fully_async_main", *words]


def trained_steps(out):
    metrics = out / "metrics.jsonl"
    return metrics.read_text().count("\n") if metrics.exists() else 0


def victims_of(victim, run):
    """The processes to kill; none where they have not started or the run is over."""
    if run.poll() is not None:
        return []
    if victim == "driver":
        return [psutil.Process(run.pid)]
    found = processes_of(run, VICTIMS[victim])
    return [process for process in found if process.parent() in found] if victim == "reward" else found


@contextmanager
def started(folder, model, is_time, **more):
    """A run, once `is_time(run)`."""
    folder.mkdir(parents=True, exist_ok=True)
    log = folder / "log.txt"
    with open(log, "w") as output:
        words = command(folder, model, **more)
        run = subprocess.Popen(words, stdout=output, stderr=subprocess.STDOUT, start_new_session=True)
        wait_until(lambda: is_time(run), run, log, 400)
        yield run


def finished(folder, model, **more):
    """Run the command to its end; (ends of samples, rows of the journal about resumes)."""
    out = folder / "out"
    done = subprocess.run(command(folder, model, **more), capture_output=True, text=True, timeout=400)
    assert done.returncode == 0, done.stdout[-1500:] + done.stderr[-3000:]
    ends, states = check_journal(out, STEPS)
    assert [row["step"] for row in rows(out / "metrics.jsonl")] == list(range(1, STEPS + 1))
    assert [row["step"] for row in rows(out / "async_record.jsonl")] == list(range(1, STEPS + 1))
    prompts = sorted(int(sample.partition("/")[0]) for sample in states)
    assert prompts == sorted(2 * list(range(4 * STEPS)))  # every prompt once, none is lost
    for row in rows(out / "async_record.jsonl"):
        oldest = min(span[0] for group in row["groups"] for sample in group["samples"] for span in sample["spans"])
        assert row["step"] - 1 - oldest <= 1
    return ends, [row for row in rows(out / "async_journal.jsonl") if "event" in row]


def run_with_kill(folder, model, victim, after_step, delay, in_save=False, **more):
    """Kill the victim once, then run the command again; (steps before, ends of samples, rows about resumes)."""
    out = folder / "out"

    def is_time(run):
        saves = any(out.glob("global_step_*.tmp")) or not in_save
        return trained_steps(out) >= after_step and saves and victims_of(victim, run)

    with started(folder, model, is_time, **more) as run:
        time.sleep(delay)
        targets = victims_of(victim, run)
        for target in targets:
            os.kill(target.pid, signal.SIGKILL)
        code = run.wait(timeout=300)
    before = trained_steps(out)
    assert not targets or code != 0 or before == STEPS, (folder / "log.txt").read_text()[-3000:]
    return before, *finished(folder, model, **more)


@pytest.mark.parametrize(("victim", "after_step"), [("driver", 3), ("trainer", 5), ("server", 4), ("reward", 3)])
def test_a_killed_run_is_resumed_without_losing_or_repeating_a_prompt(tmp_path, tiny_llama, victim, after_step):
    before, ends, events = run_with_kill(tmp_path / "run", tiny_llama, victim, after_step, 0.05)
    assert before < STEPS and ends == {"trained": 8 * STEPS}
    assert len(events) == 1 and events[0]["event"] == "resume" and events[0]["step"] in (2, 4, 6)


def test_a_killed_run_with_programs_is_resumed_while_loader_processes_start(tmp_path, tiny_llama):
    (tmp_path / "program.py").write_text(PROGRAM)
    more = {"actor_rollout_ref__rollout__agent__command": f"'python {tmp_path / 'program.py'}'",
            "data__max_prompt_length": 40, "data__dataloader_num_workers": 4}  # fmt: skip
    before, ends, events = run_with_kill(tmp_path / "run", tiny_llama, "driver", 3, 0.05, **more)
    assert before < STEPS and ends == {"trained": 8 * STEPS} and len(events) == 1


def test_a_run_that_is_killed_while_it_saves_is_resumed_from_the_checkpoint_before(tmp_path, tiny_llama):
    before, ends, events = run_with_kill(tmp_path / "run", tiny_llama, "driver", 4, 0.0, in_save=True)
    assert before in (4, 6, 8) and ends == {"trained": 8 * STEPS}
    assert [event["step"] for event in events] == [before - 2]


def test_ctrl_c_ends_a_run_after_its_step_with_a_checkpoint(tmp_path, tiny_llama):
    out = tmp_path / "run" / "out"
    with started(tmp_path / "run", tiny_llama, lambda run: trained_steps(out) >= 3) as run:
        members = psutil.Process(run.pid).children(recursive=True)
        os.killpg(run.pid, signal.SIGINT)  # as a terminal does
        assert run.wait(timeout=120) == 130, (tmp_path / "run" / "log.txt").read_text()[-3000:]
    assert psutil.wait_procs(members, timeout=20)[1] == []
    done = trained_steps(out)
    assert 3 <= done < STEPS and (out / TRACKER).read_text() == str(done)
    ends, events = finished(tmp_path / "run", tiny_llama)
    assert ends == {"trained": 8 * STEPS} and [event["step"] for event in events] == [done]
