"""Times each step of the training loop under a name, which the error of a failed step carries too."""

import functools
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from ray.exceptions import RayTaskError


class StepFailed(RuntimeError):
    """A step of the loop raised an error, which is `__cause__`; `cause_text` is that of its root cause."""

    def __init__(self, step_name: str, global_step: int, cause_text: str) -> None:
        super().__init__(step_name, global_step, cause_text)  # args rebuild it after a trip through Ray
        self.step_name, self.global_step, self.cause_text = step_name, global_step, cause_text

    def __str__(self) -> str:
        return f"step '{self.step_name}' of global step {self.global_step} failed: {self.cause_text}"


def root_cause(error: BaseException) -> BaseException:
    """The error that the worker's own code raised, without Ray's wrappers."""
    while isinstance(error, RayTaskError) and isinstance(error.cause, BaseException) and error.cause is not error:
        error = error.cause
    return error


@contextmanager
def timed_step(name: str, timing_raw: defaultdict[str, float], global_step: int) -> Iterator[None]:
    """Add the block's seconds to `timing_raw[name]`; raise its error as StepFailed, unless an inner step did so."""
    start = time.perf_counter()
    try:
        yield
    except StepFailed:
        raise
    except Exception as e:
        cause = root_cause(e)
        raise StepFailed(name, global_step, f"{type(cause).__name__}: {cause}") from e
    finally:
        timing_raw[name] += time.perf_counter() - start


def step(name: str) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Decorator for a method of a trainer with `run_log` and `global_steps`: `timed_step` under `name`."""

    def decorate(method: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(method)
        def timed(self, *args, **kwargs):
            with timed_step(name, self.run_log.timing, self.global_steps):
                return method(self, *args, **kwargs)

        return timed

    return decorate
