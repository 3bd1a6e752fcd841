"""A limit on what ranks may take for one call: beyond it the run ends and says which rank hangs, and where."""

import os
import time
from collections.abc import Mapping

import psutil
import ray
from ray.actor import ActorHandle

from verl.single_controller.base.worker import STACK_SIGNAL

METHODS = {
    "init": ("init_model",),
    "generate": ("generate_sequences",),
    "log_prob": ("compute_log_prob", "compute_ref_log_prob", "compute_values"),
    "update": ("update_actor", "update_critic"),
    "save": ("save_checkpoint", "load_checkpoint"),
}
PHASE_OF = {method: phase for phase, methods in METHODS.items() for method in methods}
STACKS_S = 3.0  # until those lines have come through Ray's log to the driver


class PhaseTimeout(RuntimeError):
    """A call on ranks took longer than trainer.watchdog allows."""


def limits(watchdog: Mapping[str, float | None]) -> dict[str, float]:
    """Seconds by method name, from seconds by phase (None: no limit)."""
    return {method: seconds for method, phase in PHASE_OF.items() if (seconds := watchdog.get(phase)) is not None}


def hanging(
    refs: list[ray.ObjectRef], labels: list[str], method: str, seconds: float, actors: list[ActorHandle]
) -> PhaseTimeout:
    """The error that names the ranks without an answer, after each was made to write its stacks.

    Ranks that wait for a stopped one are as late as it is: stopped processes are named alone, where there are some.
    """
    _, waiting = ray.wait(list(dict.fromkeys(refs)), num_returns=len(set(refs)), timeout=0)
    late = [i for i, ref in enumerate(refs) if ref in waiting]
    states = {i: ask_for_stacks(actors[i]) for i in late}
    time.sleep(STACKS_S)
    stopped = [i for i in late if states[i] == psutil.STATUS_STOPPED]
    named = ", ".join(f"{labels[i]} ({states[i]})" for i in stopped or late)
    phase = next((phase for name, phase in PHASE_OF.items() if method.endswith(name)), method)
    return PhaseTimeout(
        f"{named} did not finish {method} within trainer.watchdog.{phase}={seconds:g} s; {len(late)} of {len(refs)} "
        "ranks had not answered, and the available Python stacks are printed above. Raise the limit if "
        "the step is only slow."
    )


def ask_for_stacks(actor: ActorHandle) -> str:
    """Have an actor's process write its Python stacks; its state: stopped, running, sleeping, or on another node."""
    from ray._private.state import state

    entry = state.actor_table(actor._actor_id.hex())
    if entry["Address"]["NodeID"] != ray.get_runtime_context().get_node_id():
        return f"on node {entry['Address']['IPAddress']}"
    try:
        status = psutil.Process(entry["Pid"]).status()
        os.kill(entry["Pid"], STACK_SIGNAL)
    except (psutil.NoSuchProcess, ProcessLookupError):
        return "gone"
    return status
