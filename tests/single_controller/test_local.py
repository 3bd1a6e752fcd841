"""LocalWorkerGroup: one rank in this process, with the calls and results of a RayWorkerGroup of one rank."""

import os

import pytest
import torch
import torch.distributed as dist

from tests.helpers.engines import leave_group
from verl.protocol import DataProto
from verl.single_controller.base import ResourcePool, Worker
from verl.single_controller.base.decorator import Dispatch, make_nd_compute_dataproto_dispatch_fn, register
from verl.single_controller.local import RANK_ENVIRONMENT, LocalWorkerGroup
from verl.single_controller.ray import RayClassWithInitArgs
from verl.single_controller.ray.base import create_colocated_worker_cls


class Adder(Worker):
    def __init__(self, amount):
        super().__init__()
        self.amount = amount
        self._register_dispatch_collect_info(mesh_name="adder", dp_rank=0, is_collect=True)

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def ranks(self):
        return self.rank, self.world_size, dist.get_world_size()

    @register(dispatch_mode=Dispatch.DP_COMPUTE_PROTO)
    def add(self, data):
        data.meta_info["seen"] = True
        data.batch["x"] = data.batch["x"] + self.amount
        return data

    @register(dispatch_mode=make_nd_compute_dataproto_dispatch_fn(mesh_name="adder"))
    def add_on_mesh(self, data):
        return self.add(data)

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def fails(self):
        raise KeyError("gone")


@pytest.fixture(autouse=True)
def no_group():
    leave_group()
    before = {name: os.environ.get(name) for name in RANK_ENVIRONMENT}
    yield
    leave_group()
    assert {name: os.environ.get(name) for name in RANK_ENVIRONMENT} == before


def batch():
    return DataProto.from_dict({"x": torch.arange(3)}, meta_info={"step": 1})


def test_methods_dispatch_and_collect_and_leave_the_callers_batch_as_it_was():
    group = LocalWorkerGroup(ResourcePool([1]), RayClassWithInitArgs(Adder, 10), name_prefix="p", time_limits={})
    sent = batch()
    for method in (group.add, group.add_on_mesh):
        assert method(sent).batch["x"].tolist() == [10, 11, 12]
    assert sent.batch["x"].tolist() == [0, 1, 2] and sent.meta_info == {"step": 1}
    assert group.ranks() == [(0, 1, 1)] and group.world_size == 1
    group.shutdown()
    assert not dist.is_initialized()


def test_roles_of_one_process_are_called_by_their_own_names():
    parts = {"small": RayClassWithInitArgs(Adder, 1), "large": RayClassWithInitArgs(Adder, 100)}
    group = LocalWorkerGroup(ResourcePool([1]), create_colocated_worker_cls(parts))
    roles = group.spawn({"small", "large"})
    assert roles["small"].add(batch()).batch["x"].tolist() == [1, 2, 3]
    assert roles["large"].add_on_mesh(batch()).batch["x"].tolist() == [100, 101, 102]
    assert group.large_add(batch()).batch["x"].tolist() == [100, 101, 102]
    roles["small"].shutdown()
    assert dist.is_initialized()
    group.shutdown()


def test_an_exception_arrives_as_it_was_raised_and_closing_logs_it():
    group = LocalWorkerGroup(ResourcePool([1]), RayClassWithInitArgs(Adder, 1))
    with pytest.raises(KeyError, match="gone"):
        group.fails()
    group.try_execute_all("fails", timeout_s=1)
    group.shutdown()


def test_more_than_one_rank_is_refused():
    with pytest.raises(ValueError, match="one rank in this process, but 2 are requested. Set trainer.nnodes=1"):
        LocalWorkerGroup(ResourcePool([2]), RayClassWithInitArgs(Adder, 1))
