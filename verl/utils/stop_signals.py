"""SIGTERM and Ctrl-C as a wish that a loop asks for."""

from __future__ import annotations

import signal
import time
from typing import Any

from loguru import logger

EXIT_STOPPED_TWICE = 143
SAME_STOP_S = 2.0  # seconds in which further signals belong to the first


class StopSignals:
    """Context manager. The first signal sets `asked`; a second one ends the process with code 143.

    Signals within 2 s are one: a launcher signals every process of its tree, and a shell passes its own signal on.
    """

    def __init__(self) -> None:
        self.asked = False
        self._first = 0.0  # monotonic seconds

    def __enter__(self) -> StopSignals:
        self._before = {number: signal.signal(number, self._on_signal) for number in (signal.SIGTERM, signal.SIGINT)}
        return self

    def __exit__(self, *raised: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _on_signal(self, number: int, frame: Any) -> None:
        name = signal.Signals(number).name
        if not self.asked:
            self.asked, self._first = True, time.monotonic()
            logger.warning(f"{name}: finishing the step, then saving (once more: end at once)")
        elif time.monotonic() - self._first >= SAME_STOP_S:
            logger.error(f"second {name}: the run ends now")
            raise SystemExit(EXIT_STOPPED_TWICE)
