"""The first signal is a wish, a second one ends the process; handlers come back."""

import multiprocessing
import os
import signal
import subprocess
import threading

import psutil
import pytest
from torch.utils.data import DataLoader

from verl.trainer.run import prompt_stream, stop_signals
from verl.trainer.run.prompt_stream import PromptLoader
from verl.trainer.run.stop_signals import StopSignals, obey_parent_only


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_signals_close_together_are_one(number):
    before = signal.getsignal(number)
    with StopSignals() as signals:
        assert not signals.stop_requested
        os.kill(os.getpid(), number)
        os.kill(os.getpid(), number)
        assert signals.stop_requested and signals.exit_code == 128 + number
    assert signal.getsignal(number) is before


def test_a_second_signal_later_on_ends_the_process_with_the_code_of_the_first(monkeypatch):
    """Also where a library changes the code, as ray.get does with a SystemExit that is raised while it waits."""
    monkeypatch.setattr(stop_signals, "SAME_STOP_S", 0.0)
    with pytest.raises(SystemExit) as ended, StopSignals():
        os.kill(os.getpid(), signal.SIGINT)
        try:
            os.kill(os.getpid(), signal.SIGTERM)
        except SystemExit:
            raise SystemExit(1) from None
    assert ended.value.code == 130


def test_an_exit_of_the_programs_own_keeps_its_code():
    with pytest.raises(SystemExit) as ended, StopSignals():
        os.kill(os.getpid(), signal.SIGTERM)
        raise SystemExit(2)
    assert ended.value.code == 2


@pytest.mark.process
def test_a_loader_process_that_just_started_outlives_a_signal_of_the_group(monkeypatch):
    others = set(psutil.Process().children())  # of tests before
    begun = multiprocessing.get_context("fork").Semaphore(0)
    signalled = multiprocessing.get_context("fork").Event()

    def before_it_obeys(worker):
        begun.release()
        signalled.wait(10)
        obey_parent_only(worker)

    def send():
        started = [begun.acquire(timeout=30) for _ in range(2)]
        for worker in set(psutil.Process().children()) - others if all(started) else ():
            subprocess.run(["kill", "-TERM", str(worker.pid)], check=True)
        signalled.set()

    monkeypatch.setattr(prompt_stream, "obey_parent_only", before_it_obeys)
    loader = PromptLoader(range(8), num_workers=2, batch_size=2)
    sender = threading.Thread(target=send, daemon=True)
    sender.start()
    batches = iter(loader)
    sender.join()
    assert [batch.tolist() for batch in batches] == [[0, 1], [2, 3], [4, 5], [6, 7]]
    assert not signal.pthread_sigmask(signal.SIG_BLOCK, []) & {signal.SIGTERM, signal.SIGINT}


@pytest.mark.process
def test_a_loader_process_obeys_its_parent_only():
    others = set(psutil.Process().children())  # of tests before
    batches = iter(DataLoader(range(50), num_workers=1, prefetch_factor=1, worker_init_fn=obey_parent_only))
    assert next(batches).item() == 0
    (worker,) = set(psutil.Process().children()) - others
    for number in (signal.SIGTERM, signal.SIGINT):
        subprocess.run(["kill", f"-{int(number)}", str(worker.pid)], check=True)  # by another process
    assert [batch.item() for batch in batches] == [*range(1, 50)]
    batches = iter(DataLoader(range(50), num_workers=1, prefetch_factor=1, worker_init_fn=obey_parent_only))
    next(batches)
    (worker,) = set(psutil.Process().children()) - others - {worker}
    worker.terminate()  # by this one
    assert worker.wait(timeout=10) == 0
