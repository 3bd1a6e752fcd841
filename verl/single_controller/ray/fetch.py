"""The error that explains why ranks did not return what they were called for."""

import re

import ray
from ray.exceptions import RayActorError, RayTaskError

_COLOUR = re.compile(r"\x1b\[[0-9;]*m")
GRACE_S = 2.0  # how long the other ranks may take to fail as well, once one has failed


class WorkerDiedError(RuntimeError):
    """A rank's process ended while its group was working."""


def failure_of(refs: list[ray.ObjectRef], labels: list[str], method: str) -> Exception:
    """The error to raise where some of `refs` failed: that of the rank which failed for a reason of its own, with the
    worker's traceback as a note. `labels` says of each reference which rank it comes from.

    A dead process comes first: what the others say then is a broken connection.
    """
    failures = _failures(refs)
    deaths = [(i, e) for i, e in failures if not isinstance(e, RayTaskError)]
    index, error = (deaths or failures)[0]
    others = [labels[i] for i, _ in failures if i != index]
    also = f" ({len(others)} other rank(s) failed after it: {', '.join(others[:4])})" if others else ""
    # A RayTaskError may be a RayActorError, too: that of another actor, which the rank called.
    if not isinstance(error, RayTaskError):
        what = "could not be constructed" if error.actor_init_failed else f"died while the group was in {method}"
        return WorkerDiedError(f"{labels[index]} {what}{also}: {_reason(error)}")
    cause = error.cause
    if not isinstance(cause, Exception) or isinstance(cause, RayTaskError):
        cause = RuntimeError(str(cause))
    cause.add_note(f"raised by {labels[index]} in {method}{also}; traceback of the worker:\n{_plain(error)}")
    return cause


def _failures(refs: list[ray.ObjectRef]) -> list[tuple[int, Exception]]:
    """(index, error) of every reference that failed, in the order in which they ended."""
    place = {ref: i for i, ref in enumerate(refs)}
    collected, waiting, timeout = [], list(dict.fromkeys(refs)), None
    while waiting:
        done, waiting = ray.wait(waiting, num_returns=1, timeout=timeout)
        if not done:
            break
        try:
            ray.get(done[0])
        except (RayTaskError, RayActorError) as error:
            collected.append((place[done[0]], error))
            timeout = GRACE_S
    return collected


def _plain(error: Exception) -> str:
    return _COLOUR.sub("", str(error)).strip()


def _reason(error: RayActorError) -> str:
    """Ray's reason without its boilerplate: the error line of a constructor, the cause of death of a process."""
    lines = [line.strip() for line in _plain(error).splitlines() if line.strip()]
    if error.actor_init_failed:
        return lines[-1]
    kept = [line for line in lines[1:] if not line.startswith(("class_name:", "actor_id:", "namespace:", "name:"))]
    return "; ".join(kept) or lines[0]
