"""Runs a function on several gloo ranks, in fresh processes, with a rendezvous of its own."""

import multiprocessing
import os
import threading

import numpy as np
import torch.distributed as dist
import torch.multiprocessing as mp

from verl.utils.ports import free_port


def _entry(rank: int, world_size: int, port: int, environ: dict, fn, args, queue) -> None:
    os.environ.update(
        environ,
        RANK=str(rank),
        LOCAL_RANK=str(rank),
        WORLD_SIZE=str(world_size),
        LOCAL_WORLD_SIZE=str(world_size),
        MASTER_ADDR="127.0.0.1",
        MASTER_PORT=str(port),
        OMP_NUM_THREADS="1",
    )
    import torch

    torch.set_num_threads(1)
    dist.init_process_group("gloo", rank=rank, world_size=world_size)
    try:
        queue.put((rank, fn(rank, world_size, *args)))
        if dist.is_initialized():  # vLLM ends the group when it is shut down
            dist.barrier()
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()


def mean_metrics(of_ranks: list[dict]) -> dict:
    """Metrics of all ranks, reduced as the trainer does: to the largest where the name has max in it, else the mean."""
    assert all(metrics.keys() == of_ranks[0].keys() for metrics in of_ranks)
    return {name: (max if "max" in name else np.mean)([m[name] for m in of_ranks]) for name in of_ranks[0]}


def run_ranks(fn, world_size: int, *args):
    """Call `fn(rank, world_size, *args)` on every rank; returns what each returned, in rank order.

    `fn` must be importable (a module-level function) and return plain Python or numpy values.
    """
    # The server of forks imports what takes seconds once a test session, and starts no thread of its own.
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["tests.helpers.engines"])
    queue = context.SimpleQueue()
    got: dict[int, object] = {}
    # A pipe holds 64 KiB: results are read while the ranks run, or a large one would block its rank for ever.
    reader = threading.Thread(target=lambda: got.update(queue.get() for _ in range(world_size)), daemon=True)
    reader.start()
    given = (world_size, free_port(), dict(os.environ), fn, args, queue)
    mp.start_processes(_entry, args=given, nprocs=world_size, join=True, start_method="forkserver")
    reader.join(timeout=30)
    return [got[r] for r in range(world_size)]
