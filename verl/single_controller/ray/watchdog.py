"""A limit on what ranks and workers may take for one call: beyond it the run ends and says what hangs, and where."""

import os
import time
from collections.abc import Mapping, Sequence
from typing import Any

import psutil
import ray
from ray.actor import ActorHandle
from ray.exceptions import GetTimeoutError, RayError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from verl.single_controller.base.worker import STACK_SIGNAL

METHODS = {
    "init": ("init_model", "rollout_server", "server_handle", "_query_dispatch_info", "query_collect_info",
             "__ray_ready__"),
    "generate": ("generate_sequences", "reset"),
    "log_prob": ("compute_log_prob", "compute_ref_log_prob", "compute_values", "compute_rm_score",
                 "compute_score_batch"),
    "update": ("update_actor", "update_critic", "rollout_mode", "trainer_mode", "wake_up", "sleep", "close_rollout"),
    "save": ("save_checkpoint", "load_checkpoint", "save_is_finished", "nodes_that_see"),
}  # fmt: skip
OTHERS = "update"  # the phase of methods that are not listed, such as those of a user's own workers
REMOTE_S = 60.0  # for the tasks on other nodes, which may have to start a process first
STACKS_S = 3.0  # until those lines have come through Ray's log to the driver


class PhaseTimeout(RuntimeError):
    """A call on ranks took longer than trainer.watchdog allows."""


def phase_of(method: str) -> str:
    """The phase of a method, with or without the prefix of its role."""
    return next((phase for phase, names in METHODS.items() if method.endswith(names)), OTHERS)


def get_within(
    limits: Mapping[str, float | None], refs: Sequence[ray.ObjectRef], labels: list[str], method: str,
    actors: list[ActorHandle],
) -> list[Any]:  # fmt: skip
    """The values of calls of `method`, one on each of the actors, which `labels` name; `limits`: seconds by phase.

    Raises PhaseTimeout, and what a call raised.
    """
    limit = limits[phase_of(method)]
    try:
        return ray.get(list(refs), timeout=limit)
    except GetTimeoutError:
        raise timeout_error(list(refs), labels, method, limit, actors) from None


def timeout_error(
    refs: list[ray.ObjectRef], labels: list[str], method: str, seconds: float, actors: list[ActorHandle],
    others: Mapping[str, ActorHandle] | None = None,
) -> PhaseTimeout:  # fmt: skip
    """The error that names the ranks without an answer, after each was made to write its stacks.

    Ranks that wait for a stopped one are as late as it is: stopped processes are named alone, where there are some.
    `others` are what they may wait for, by label.
    """
    _, waiting = ray.wait(list(dict.fromkeys(refs)), num_returns=len(set(refs)), timeout=0)
    late = [i for i, ref in enumerate(refs) if ref in waiting]
    candidates = {labels[i]: actors[i] for i in late} | dict(others or {})
    states = dict(zip(candidates, ask_for_stacks(list(candidates.values())), strict=True))
    time.sleep(STACKS_S)
    stopped = [label for label in candidates if states[label].startswith(psutil.STATUS_STOPPED)]
    named = ", ".join(f"{label} ({states[label]})" for label in stopped or [labels[i] for i in late])
    return PhaseTimeout(
        f"{named} did not finish {method} within trainer.watchdog.{phase_of(method)}={seconds:g} s; {len(late)} of "
        f"{len(refs)} calls had not ended, and the available Python stacks are printed above. Raise the limit if "
        "the step is only slow."
    )


def ask_for_stacks(actors: list[ActorHandle]) -> list[str]:
    """Have the actors' processes write their Python stacks; returns their statuses: stopped, running, sleeping, gone.

    A task on the actor's node sends the signal. If the node does not run it, the status is a text with its address.
    """
    from ray._private.state import state

    replies = []
    for actor in actors:
        entry = state.actor_table(actor._actor_id.hex())
        place, pid = entry["Address"], entry["Pid"]
        there = NodeAffinitySchedulingStrategy(node_id=place["NodeID"], soft=False)
        if place["NodeID"] == ray.get_runtime_context().get_node_id():
            replies.append(request_stacks(pid))
        else:
            task = ray.remote(num_cpus=0, max_retries=0)(request_stacks).options(scheduling_strategy=there).remote(pid)
            replies.append((task, place["IPAddress"]))
    deadline = time.monotonic() + REMOTE_S
    return [answer if isinstance(answer, str) else _answer(*answer, deadline) for answer in replies]


def _answer(task: ray.ObjectRef, address: str, deadline: float) -> str:
    try:
        return f"{ray.get(task, timeout=max(0.0, deadline - time.monotonic()))} on node {address}"
    except RayError:  # the node is gone, or does not answer in time
        return f"no answer from node {address}"


def request_stacks(pid: int) -> str:
    """Signal a process of this node to write its stacks; returns its status."""
    try:
        status = psutil.Process(pid).status()
        os.kill(pid, STACK_SIGNAL)
    except (psutil.NoSuchProcess, ProcessLookupError):
        return "gone"
    return status
