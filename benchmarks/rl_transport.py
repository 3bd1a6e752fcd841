"""What a step sends through Ray, and what the driver computes itself."""

from __future__ import annotations

import io
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import ray
import torch
from ray._private.internal_api import node_stats

from benchmarks.harness import Row, alternate, ratios, row
from examples.running import ROOT
from verl.protocol import DataProto
from verl.single_controller.base import Worker
from verl.single_controller.base.decorator import make_nd_compute_dataproto_dispatch_fn, register
from verl.single_controller.ray import RayClassWithInitArgs, RayResourcePool, RayWorkerGroup
from verl.trainer.ppo.metric_utils import process_validation_metrics

SENT_BYTES = 50 << 20
RANKS = 2
ROWS, LENGTH = 512, 1024  # of a step's batch
HOLD_S = 1.0  # how long a rank keeps its share, so that the object store can be read meanwhile
PROMPTS, SAMPLES = 200, 16  # of a validation


@ray.remote
class Reader:
    """Reads every array that it is sent."""

    def read(self, data: DataProto) -> float:
        """A DataProto as it travels."""
        return sum(float(tensor.sum()) for tensor in data.batch.values())

    def read_saved(self, data: bytes) -> float:
        """The tensors as torch.save pickled them."""
        return sum(float(tensor.sum()) for tensor in torch.load(io.BytesIO(data), weights_only=True).values())


class Holder(Worker):
    """Keeps what it was sent for a moment."""

    def __init__(self) -> None:
        super().__init__()
        self._register_dispatch_collect_info("actor", dp_rank=self.rank, is_collect=True)

    @register(dispatch_mode=make_nd_compute_dataproto_dispatch_fn(mesh_name="actor"), blocking=False)
    def hold(self, data: DataProto) -> DataProto:
        """Reads its share, then waits."""
        time.sleep(HOLD_S)
        return DataProto(meta_info={"metrics": {"sum": [float(data.batch["input_ids"].sum())]}})


@contextmanager
def cluster() -> Iterator[None]:
    """A Ray of our own on this machine, unless one runs in this process."""
    if ray.is_initialized():
        yield
        return
    os.environ["PYTHONPATH"] = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
    ray.init(address="local", num_cpus=4, include_dashboard=False, log_to_driver=False, logging_level="ERROR",
             object_store_memory=1 << 30)
    try:
        yield
    finally:
        ray.shutdown()


def send(repetitions: int = 7) -> list[Row]:
    """Seconds from a DataProto of 50 MiB here until an actor has read all its arrays, both ways."""
    columns = 10
    tensors = {f"t{i}": torch.rand(256, SENT_BYTES // 4 // 256 // columns) for i in range(columns)}
    data = DataProto.from_dict(tensors=tensors)
    reader = Reader.remote()

    def saved() -> float:
        buffer = io.BytesIO()
        torch.save(dict(data.batch.items()), buffer)
        return ray.get(reader.read_saved.remote(buffer.getvalue()))

    seconds = alternate({"torch.save": saved, "ours": lambda: ray.get(reader.read.remote(data))}, repetitions)
    ray.kill(reader)
    return [row("ray_send_speedup", ratios(seconds["torch.save"], seconds["ours"]), "times, torch.save / ours"),
            row("ray_send", [1000 * s for s in seconds["ours"]], "ms")]


def step_batch() -> DataProto:
    """The tensors of an update: [512, 1024] ids, masks and positions, and [512, 512] columns of the responses."""
    whole = {name: torch.ones(ROWS, LENGTH, dtype=torch.int64)
             for name in ("input_ids", "attention_mask", "position_ids")}
    answers = {name: torch.rand(ROWS, LENGTH // 2)
               for name in ("old_log_probs", "ref_log_prob", "advantages", "returns", "rollout_log_probs")}
    masks = {name: torch.ones(ROWS, LENGTH // 2, dtype=torch.int64) for name in ("responses", "response_mask")}
    return DataProto.from_dict(tensors={**whole, **answers, **masks})


def stored_bytes() -> int:
    """What Ray's object store of this node holds now."""
    node = next(node for node in ray.nodes() if node["Alive"])
    return node_stats(node["NodeManagerAddress"], node["NodeManagerPort"]).store_stats.object_store_bytes_used


def settled_bytes() -> int:
    """The same, once nothing is freed any more."""
    now = stored_bytes()
    while True:
        time.sleep(HOLD_S)
        now, before = stored_bytes(), now
        if now == before:
            return now


def dispatch(repetitions: int = 5) -> Row:
    """Bytes in the object store while two ranks hold their shares of a batch, over the bytes of its arrays."""
    pool = RayResourcePool([RANKS], use_gpu=False, name_prefix=f"bench{os.getpid()}")
    group = RayWorkerGroup(pool, RayClassWithInitArgs(ray.remote(Holder)), device_name="cpu")
    batch = step_batch()
    arrays = sum(tensor.numel() * tensor.element_size() for tensor in batch.batch.values())
    found = []
    for _ in range(repetitions):
        before = settled_bytes()
        answer = group.hold(batch)
        time.sleep(HOLD_S / 2)
        found.append((stored_bytes() - before) / arrays)
        answer.get()
    for worker in group.workers:
        ray.kill(worker)
    return row("dispatch_bytes_ratio", found, "stored / bytes of the arrays")


def validation(repetitions: int = 7) -> Row:
    """Statistics of 200 prompts with 16 samples each: best, worst and majority of 2 to 16 with 1000 resamples."""
    generator = np.random.default_rng(0)
    rows = PROMPTS * SAMPLES
    uids = [str(i // SAMPLES) for i in range(rows)]
    infos = {"acc": generator.integers(2, size=rows).astype(float).tolist(),
             "reward": generator.random(rows).tolist(),
             "pred": [str(v) for v in generator.integers(5, size=rows)]}
    work = {"stats": lambda: process_validation_metrics(["math"] * rows, uids, infos)}
    return row("validation_stats_seconds", alternate(work, repetitions)["stats"], "s")


def run() -> list[Row]:
    """All rows."""
    with cluster():
        rows = [*send(), dispatch()]
    return [*rows, validation()]
