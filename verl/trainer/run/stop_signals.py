"""Turns SIGTERM and Ctrl-C into a flag that a training loop checks."""

from __future__ import annotations

import multiprocessing
import os
import signal
import threading
import time
from typing import Any

from loguru import logger

SAME_STOP_S = 2.0  # seconds in which further signals belong to the first


def obey_parent_only(worker: int) -> None:
    """`worker_init_fn` of a DataLoader: its processes ignore Ctrl-C, and SIGTERM unless the parent process sends it.

    A terminal, `timeout` and `kill` of a job signal the complete process group. The step that the trainer finishes then
    needs its data: PyTorch reports a loader process that is gone as a failure of the run. Programs that a data set
    starts inherit the blocked signals: it must end them with `kill()`.
    """
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM, signal.SIGINT})  # also of threads that start later
    parent = multiprocessing.parent_process().pid

    def wait() -> None:
        while signal.sigwaitinfo({signal.SIGTERM}).si_pid != parent:
            pass
        os._exit(0)

    threading.Thread(target=wait, daemon=True).start()


class StopSignals:
    """Context manager. The first signal sets `stop_requested` and `exit_code` (130 for Ctrl-C, 143 for SIGTERM).

    A second one exits the process with that code. Signals within 2 s are one: a launcher signals every process of its
    tree, and a shell forwards its own signal.
    """

    def __init__(self) -> None:
        self.stop_requested = False
        self.exit_code = 0
        self._first = 0.0  # monotonic seconds
        self._twice = False

    def __enter__(self) -> StopSignals:
        self._before = {number: signal.signal(number, self._on_signal) for number in (signal.SIGTERM, signal.SIGINT)}
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)
        if self._twice and isinstance(error, SystemExit):
            raise SystemExit(self.exit_code) from None  # ray.get and ray.wait replace the code by 1

    def _on_signal(self, number: int, frame: Any) -> None:
        name = signal.Signals(number).name
        if not self.stop_requested:
            self.stop_requested, self._first, self.exit_code = True, time.monotonic(), 128 + number
            when = "after this step (after the first one, if none has begun)"
            logger.warning(f"{name}: the run saves and ends {when}; a second signal ends it at once")
        elif time.monotonic() - self._first >= SAME_STOP_S:
            logger.error(f"second {name}: the run ends now")
            self._twice = True
            raise SystemExit(self.exit_code)
