"""The first signal is a wish, a second one ends the process; handlers come back."""

import os
import signal

import pytest

from verl.utils import stop_signals
from verl.utils.stop_signals import StopSignals


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_signals_close_together_are_one(number):
    before = signal.getsignal(number)
    with StopSignals() as signals:
        assert not signals.asked
        os.kill(os.getpid(), number)
        os.kill(os.getpid(), number)
        assert signals.asked and signals.exit_code == 128 + number
    assert signal.getsignal(number) is before


def test_a_second_signal_later_on_ends_the_process_with_the_code_of_the_first(monkeypatch):
    monkeypatch.setattr(stop_signals, "SAME_STOP_S", 0.0)
    with pytest.raises(SystemExit) as ended, StopSignals():
        os.kill(os.getpid(), signal.SIGINT)
        os.kill(os.getpid(), signal.SIGTERM)
    assert ended.value.code == 130


def test_the_code_is_the_same_where_a_library_changes_it(monkeypatch):
    """As ray.get does with a SystemExit that is raised while it waits."""
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
