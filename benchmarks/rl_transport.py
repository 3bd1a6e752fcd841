"""What a step sends through Ray, and what the driver computes itself."""

import io
import os
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import ray
import torch
from ray._private.internal_api import node_stats

from benchmarks.harness import Row, alternate, ratios, row
from examples.demo_runner import ROOT
from verl.protocol import DataProto
from verl.single_controller.base import Worker
from verl.single_controller.base.dispatch import make_nd_compute_dataproto_dispatch_fn, register
from verl.single_controller.ray import RayClassWithInitArgs, RayResourcePool, RayWorkerGroup
from verl.trainer.ppo.metric_utils import process_validation_metrics

SENT_BYTES = 50 << 20
STORE_BYTES = 1 << 30
RANKS = 2
ROWS, LENGTH, SAMPLES_A_PROMPT = 512, 1024, 8  # of a step's batch
PROMPTS, SAMPLES = 200, 16  # of a validation
REPETITIONS, STEPS = 7, 5  # of a step's dispatches, STEPS


@ray.remote
class Reader:
    """Reads every array that it is sent."""

    def read(self, data: DataProto) -> float:
        """A DataProto as it travels."""
        return sum(float(tensor.sum()) for tensor in data.batch.values())

    def read_saved(self, data: bytes) -> float:
        """The tensors as torch.save pickled them."""
        return sum(float(tensor.sum()) for tensor in torch.load(io.BytesIO(data), weights_only=True).values())


class Taker(Worker):
    """A rank that reads what it is sent."""

    def __init__(self) -> None:
        super().__init__()
        self._register_dispatch_collect_info("actor", dp_rank=self.rank, is_collect=True)

    @register(dispatch_mode=make_nd_compute_dataproto_dispatch_fn(mesh_name="actor"))
    def take(self, data: DataProto) -> DataProto:
        """Reads its share; the answer is too small for the object store."""
        return DataProto(meta_info={"metrics": {"sum": [float(data.batch["input_ids"].sum())]}})


@contextmanager
def cluster() -> Iterator[None]:
    """A Ray of our own on this machine, unless one runs in this process."""
    if ray.is_initialized():
        yield
        return
    os.environ["PYTHONPATH"] = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
    ray.init(address="local", num_cpus=4, include_dashboard=False, log_to_driver=False, logging_level="ERROR",
             object_store_memory=STORE_BYTES)
    try:
        yield
    finally:
        ray.shutdown()


def send() -> list[Row]:
    """Seconds from a DataProto of 50 MiB here until an actor has read all its arrays, both ways."""
    columns = 10
    tensors = {f"t{i}": torch.rand(256, SENT_BYTES // 4 // 256 // columns) for i in range(columns)}
    data = DataProto.from_dict(tensors=tensors)
    reader = Reader.remote()

    def saved() -> float:
        buffer = io.BytesIO()
        torch.save(dict(data.batch.items()), buffer)
        return ray.get(reader.read_saved.remote(buffer.getvalue()))

    ways = {"torch.save": saved, "ours": lambda: ray.get(reader.read.remote(data))}
    for _ in range(STORE_BYTES // SENT_BYTES):  # after a training's first steps the store's pages are all touched
        for way in ways.values():
            way()
    seconds = alternate(ways, REPETITIONS)
    ray.kill(reader)
    return [row("ray_send_speedup", ratios(seconds["torch.save"], seconds["ours"]), "times, torch.save / ours"),
            row("ray_send", [1000 * s for s in seconds["ours"]], "ms")]


def step_dispatches() -> list[DataProto]:
    """What a GRPO step with a reference sends: prompts to the rollout, then its batch three times, growing.

    ROWS samples of LENGTH tokens, half of them the answer's, SAMPLES_A_PROMPT to a prompt.
    """
    answer, ints = LENGTH // 2, torch.int64
    prompts = {name: torch.ones(ROWS // SAMPLES_A_PROMPT, LENGTH - answer, dtype=ints)
               for name in ("input_ids", "attention_mask", "position_ids")}
    uids = np.array([str(i) for i in range(ROWS // SAMPLES_A_PROMPT)], object)
    rollout = DataProto.from_dict(tensors=prompts, non_tensors={"uid": uids})
    tensors = {name: torch.ones(ROWS, LENGTH, dtype=ints) for name in prompts}
    tensors |= {name: torch.ones(ROWS, answer, dtype=ints) for name in ("prompts", "responses", "response_mask")}
    tensors |= {name: torch.rand(ROWS, answer) for name in ("rollout_log_probs", "token_level_scores")}
    tensors["group_index"] = torch.arange(ROWS) // SAMPLES_A_PROMPT
    sent = [rollout, DataProto.from_dict(tensors=tensors)]  # the second: to old log-probs
    for more in (("old_log_probs",), ("ref_log_prob", "token_level_rewards", "advantages", "returns")):
        tensors = tensors | {name: torch.rand(ROWS, answer) for name in more}
        sent.append(DataProto.from_dict(tensors=tensors))  # to the reference, to the update
    return sent


def put_bytes() -> int:
    """What was ever put into Ray's object store of this node."""
    node = next(node for node in ray.nodes() if node["Alive"])
    return node_stats(node["NodeManagerAddress"], node["NodeManagerPort"]).store_stats.cumulative_created_bytes


def dispatch() -> Row:
    """Bytes put into the object store by a step's dispatches to two ranks, over the bytes of the arrays sent."""
    step = step_dispatches()
    arrays = sum(tensor.numel() * tensor.element_size() for sent in step for tensor in sent.batch.values())
    pool = RayResourcePool([RANKS], use_gpu=False, name_prefix=f"bench{os.getpid()}")
    measured = []
    try:
        group = RayWorkerGroup(pool, RayClassWithInitArgs(ray.remote(Taker)), device_name="cpu")
        group.take(step[0])  # the ranks' first call also looks up their meshes
        for _ in range(STEPS):
            before = put_bytes()
            for sent in step:
                group.take(sent)
            measured.append((put_bytes() - before) / arrays)
    finally:
        pool.release()
    return row("dispatch_bytes_ratio", measured, "put / bytes of the arrays")


def validation() -> Row:
    """Statistics of 200 prompts with 16 samples each: best, worst and majority of 2 to 16 with 1000 resamples."""
    generator = np.random.default_rng(0)
    rows = PROMPTS * SAMPLES
    uids = [str(i // SAMPLES) for i in range(rows)]
    infos = {"acc": generator.integers(2, size=rows).astype(float).tolist(),
             "reward": generator.random(rows).tolist(),
             "pred": [str(v) for v in generator.integers(5, size=rows)]}
    work = {"stats": lambda: process_validation_metrics(["math"] * rows, uids, infos)}
    return row("validation_stats_seconds", alternate(work, REPETITIONS)["stats"], "s")


def run() -> list[Row]:
    """All rows."""
    with cluster():
        rows = [*send(), dispatch()]
    return [*rows, validation()]
