"""Worker groups on a real Ray cluster: every dispatch mode, shared processes, detached groups, failures."""

import os
import signal
import time
from types import SimpleNamespace

import numpy as np
import pytest
import ray
import torch
from ray.exceptions import ActorDiedError, RayActorError, RayTaskError
from tensordict import TensorDict

from verl import DataProto
from verl.protocol import DataProtoFuture
from verl.single_controller.base import Worker
from verl.single_controller.base.decorator import Dispatch, Execute, make_nd_compute_dataproto_dispatch_fn, register
from verl.single_controller.ray import RayClassWithInitArgs, RayResourcePool, RayWorkerGroup, base
from verl.single_controller.ray.base import WorkerDiedError
from verl.single_controller.ray.fetch import failure_of
from verl.single_controller.ray.watchdog import PhaseTimeout
from verl.utils.tensordict_utils import get_tensordict

pytestmark = pytest.mark.process


class Adder(Worker):
    def __init__(self, step: int = 0):
        super().__init__()
        self.step = step

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def init_model(self):
        self._register_dispatch_collect_info("pairs", dp_rank=self.rank // 2, is_collect=self.rank % 2 == 0)

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def environment(self, names):
        return [os.environ.get(n) for n in names]

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def add(self, x, by=0):
        return x + by + self.step + self.rank

    @register(dispatch_mode=Dispatch.ALL_TO_ALL)
    def add_own(self, x):
        return x + self.rank

    @register(dispatch_mode=Dispatch.ALL_TO_ALL)
    def rows_of_each(self, batches):
        return self.local_rank, [len(b) for b in batches]

    @register(dispatch_mode=Dispatch.DP_COMPUTE)
    def add_listed(self, x):
        return x + self.rank

    @register(dispatch_mode=Dispatch.ONE_TO_ALL, execute_mode=Execute.RANK_ZERO)
    def first_only(self, x):
        return [x, self.rank]

    @register(dispatch_mode=Dispatch.DP_COMPUTE_PROTO)
    def add_batch(self, data: DataProto):
        return DataProto.from_dict({"y": data.batch["x"] + 100 * self.rank}, meta_info={"metrics": {"rows": len(data)}})

    @register(dispatch_mode=Dispatch.DP_COMPUTE_PROTO, blocking=False)
    def add_later(self, data: DataProto | TensorDict):
        if isinstance(data, TensorDict):
            return data.set("x", data["x"] + 1)
        return DataProto.from_dict({"x": data.batch["x"] + 1})

    @register(dispatch_mode=Dispatch.DP_COMPUTE_METRIC)
    def count(self, data: DataProto):
        return len(data)

    @register(dispatch_mode=make_nd_compute_dataproto_dispatch_fn("pairs"))
    def add_in_pairs(self, data: DataProto):
        return DataProto.from_dict({"y": data.batch["x"] + 100 * self.rank})

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def is_zero_copy(self, data: DataProto):
        return not np.asarray(data.non_tensor_batch["n"]).flags.writeable

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def fail(self, rank):
        if self.rank == rank:
            raise KeyError(f"nothing here on rank {rank}")
        time.sleep(120)

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def die(self, rank):
        if self.rank == rank:
            os._exit(3)
        time.sleep(60)


class Stopping(Worker):
    """Stops its second rank as a debugger or a swapping machine would, in whatever the group calls."""

    def _stop(self):
        if self.rank == 1:
            os.kill(os.getpid(), signal.SIGSTOP)

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def init_model(self):
        """Returns once the process has started."""

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def rollout_mode(self):
        self._stop()

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def of_a_user(self):
        self._stop()


class Namer(Worker):
    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def add(self, x):
        partner = self.get_fused_worker_by_name("adder")
        return f"{x}/{self.rank}/{partner.step if partner is not None else None}"

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def pid(self):
        return os.getpid()


class Broken(Worker):
    def __init__(self):
        super().__init__()
        raise FileNotFoundError("model.path=/nowhere does not exist")

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def go(self):
        return 1


@pytest.fixture
def pool(ray_cluster):
    """Two CPU ranks; given back after the test, with every actor on them."""
    pool = RayResourcePool([2], use_gpu=False, max_colocate_count=2)
    yield pool
    pool.release()


def batch(rows: int) -> DataProto:
    return DataProto.from_dict({"x": torch.arange(rows)}, {"n": np.arange(rows)})


def test_every_dispatch_mode_and_what_a_rank_knows_of_its_world(pool):
    wg = RayWorkerGroup(pool, RayClassWithInitArgs(Adder, step=10))
    names = ["RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_PORT", "OMP_NUM_THREADS", "WG_BACKEND"]
    port, threads = str(wg.master_port), os.environ["OMP_NUM_THREADS"]
    assert wg.environment(names) == [[str(r), "2", str(r), "2", port, threads, "ray"] for r in range(2)]
    assert wg.world_size == 2 and wg.master_address

    assert wg.add(1, by=5) == [16, 17]
    assert wg.add_own([1, 2]) == [1, 3] and wg.add_own(5) == [5, 6]
    assert wg.add_listed([1, 2]) == [1, 3]
    assert wg.rows_of_each([batch(1), batch(2), batch(3)]) == [(0, [1, 2, 3]), (1, [1, 2, 3])]
    assert wg.first_only("a") == ["a", 0]
    out = wg.add_batch(batch(4))
    assert out.batch["y"].tolist() == [0, 1, 102, 103] and out.meta_info["metrics"] == {"rows": [2, 2]}
    assert wg.count(batch(6)) == [3, 3]
    assert wg.is_zero_copy(batch(100_000)) == [True, True]
    assert wg.execute_with_func_generator(_double, batch(2)).batch["x"].tolist() == [0, 2]
    assert wg.execute_func_rank_zero(max, 3, 4) == 4
    assert wg.execute_rank_zero_sync("add", 1) == 11 and wg.execute_all_sync("add", 1) == [11, 12]

    padded = batch(3)
    padded.meta_info["_verl_auto_padding"] = True
    assert wg.add_batch(padded).batch["y"].tolist() == [0, 1, 102]
    assert wg.count(padded) == [2, 2]  # one number a rank: nothing to drop
    assert len(wg.add_later(padded).get()) == 3

    later = wg.add_later(batch(4))
    assert isinstance(later, DataProtoFuture)
    assert wg.add_later(later).get().batch["x"].tolist() == [2, 3, 4, 5]

    rows = torch.nested.as_nested_tensor([torch.ones(n) for n in (1, 3, 2, 4)], layout=torch.jagged)
    tensors = get_tensordict({"x": torch.arange(4), "rows": rows, "name": ["a", "b", "c", "d"]}, {"t": 0.5})
    tensors = wg.add_later(wg.add_later(tensors)).get()
    assert tensors["x"].tolist() == [2, 3, 4, 5] and tensors["name"] == ["a", "b", "c", "d"] and tensors["t"] == 0.5
    assert [len(row) for row in tensors["rows"].unbind()] == [1, 3, 2, 4]

    again = RayWorkerGroup.from_detached(worker_names=wg.worker_names, ray_cls_with_init=RayClassWithInitArgs(Adder))
    assert again.add(1) == [11, 12]


def _double(worker, data):
    return DataProto.from_dict({"x": data.batch["x"] * 2})


def test_mesh_partners_share_a_part_and_one_of_them_answers(ray_cluster):
    pool = RayResourcePool([4], use_gpu=False)
    try:
        wg = RayWorkerGroup(pool, RayClassWithInitArgs(Adder))
        wg.init_model()
        assert wg.add_in_pairs(batch(4)).batch["y"].tolist() == [0, 1, 202, 203]
    finally:
        pool.release()


@pytest.mark.parametrize("make", [base.create_colocated_worker_cls, base.create_colocated_worker_cls_fused])
def test_colocated_roles_share_processes_and_keep_their_own_methods(pool, make):
    both = make({"adder": RayClassWithInitArgs(Adder, step=3), "adder_namer": RayClassWithInitArgs(Namer)})
    wg = RayWorkerGroup(pool, both)
    roles = wg.spawn({"adder", "adder_namer"})
    assert roles["adder"].add(1) == [4, 5]
    assert roles["adder_namer"].add("x") == ["x/0/3", "x/1/3"]
    assert roles["adder"].add_batch(batch(2)).batch["y"].tolist() == [0, 101]
    wg.fuse({"adder_namer"})
    assert len(set(wg.adder_namer.pid())) == 2
    with pytest.raises(ValueError, match="no role 'critic'"):
        wg.spawn({"critic"})


def test_a_users_class_over_colocated_roles_calls_them_by_name(pool):
    roles = {"adder": RayClassWithInitArgs(Adder, step=3), "namer": RayClassWithInitArgs(Namer)}

    class Both(base.create_colocated_worker_raw_cls(roles)):
        @register(dispatch_mode=Dispatch.ONE_TO_ALL)
        def both(self, x):
            return [self.adder.add(x), self.namer.add(x), os.environ["MINE"]]

    wg = RayWorkerGroup(pool, RayClassWithInitArgs(ray.remote(Both)), worker_env={"MINE": "set"})
    assert wg.both(1) == [[4, "1/0/3", "set"], [5, "1/1/3", "set"]]
    wg.shutdown()
    with pytest.raises(ValueError, match="worker_env sets MASTER_PORT, RANK, which the group sets for each rank"):
        RayWorkerGroup(pool, RayClassWithInitArgs(Adder), worker_env={"RANK": "5", "MASTER_PORT": "1"})
    with pytest.raises(ValueError, match="role 'env_keys' has the name"):
        base.create_colocated_worker_raw_cls({"env_keys": RayClassWithInitArgs(Adder)})


def test_a_workers_own_error_surfaces_at_once_with_its_type_and_a_dead_process_is_named(pool):
    wg = RayWorkerGroup(pool, RayClassWithInitArgs(Adder))
    wg.add(0)
    start = time.monotonic()
    with pytest.raises(KeyError, match="nothing here on rank 1") as caught:
        wg.fail(1)
    assert time.monotonic() - start < 100
    note = caught.value.__notes__[0]
    assert "rank 1" in note and "in fail" in note
    assert "ray::Adder.fail()" in note and 'raise KeyError(f"nothing here' in note and "\x1b" not in note
    with pytest.raises(WorkerDiedError, match="rank 1 .* died while the group was in die"):
        wg.die(1)


@pytest.mark.timeout(120)
@pytest.mark.parametrize("method", ["rollout_mode", "of_a_user"])
def test_a_rank_that_stops_in_a_weight_sync_or_in_a_users_method_is_named_within_the_limit(pool, method):
    group = RayWorkerGroup(pool, RayClassWithInitArgs(Stopping), time_limits={"init": None, "update": 1.0})
    group.init_model()
    message = rf"rank 1 .*\(stopped\) did not finish {method} within trainer.watchdog.update=1 s"
    with pytest.raises(PhaseTimeout, match=message):
        getattr(group, method)()


def test_an_error_in_a_constructor_is_named(ray_cluster):
    pool = RayResourcePool([1], use_gpu=False)
    try:
        wg = RayWorkerGroup(pool, RayClassWithInitArgs(Broken))
        with pytest.raises(WorkerDiedError, match="could not be constructed.*FileNotFoundError.*/nowhere"):
            wg.go()
    finally:
        pool.release()


def test_a_pool_larger_than_the_cluster_is_refused_with_numbers(ray_cluster, monkeypatch):
    monkeypatch.setattr("verl.single_controller.ray.resource_pool.HOPELESS_TIMEOUT_S", 0.2)
    with pytest.raises(RuntimeError, match=r"needs \{'CPU': 64\}.*has \{'CPU': 4"):
        RayResourcePool([64], use_gpu=False).get_placement_groups()


def test_counts_follow_the_groups_into_the_order_of_addresses(monkeypatch):
    module = "verl.single_controller.ray.resource_pool"
    reserve = lambda bundles, *_, **__: SimpleNamespace(bundle_count=len(bundles))  # noqa: E731
    monkeypatch.setattr(f"{module}.placement_group", reserve)
    monkeypatch.setattr(f"{module}.sort_placement_group_by_node_ip", lambda groups: groups[::-1])
    monkeypatch.setattr(RayResourcePool, "_wait_until_ready", lambda self, groups: None)
    pool = RayResourcePool([2, 1], use_gpu=False)
    bundles = [(group.bundle_count, *rest) for group, *rest in pool.bundles("PACK", "cpu")]
    assert bundles == [(1, 0, 0, 1), (2, 0, 0, 2), (2, 1, 1, 2)]
    assert pool.local_rank_list() == [0, 0, 1] and pool.local_world_size_list() == [1, 2, 2]


def test_pools_split_and_merge(ray_cluster):
    a, b = RayResourcePool([2], use_gpu=False), RayResourcePool([1], use_gpu=False)
    try:
        first, second = base.split_resource_pool(a, 1)
        assert [p.world_size for p in (first, second)] == [1, 1]
        assert [p.bundles("PACK", "cpu")[0][1] for p in (first, second)] == [0, 1]
        merged = base.merge_resource_pool(a, b)
        assert merged.store == [group.bundle_count for group in merged.pgs] == [2, 1]
        with pytest.raises(ValueError, match="a part of a split pool cannot be merged"):
            base.merge_resource_pool(first, second)
        with pytest.raises(ValueError, match="do not add up to .* 2 ranks; give a divisor of 2"):
            base.split_resource_pool(a, [1, 2])
        assert RayWorkerGroup(second, RayClassWithInitArgs(Adder)).add(1) == [1]
    finally:
        a.release()
        b.release()


def test_a_rank_that_called_a_dead_actor_is_not_the_one_that_died(monkeypatch):
    """Ray's error is a RayTaskError and a RayActorError then."""
    error = RayTaskError("f", "Traceback of the rank", ActorDiedError()).as_instanceof_cause()
    assert isinstance(error, RayActorError)
    monkeypatch.setattr("verl.single_controller.ray.fetch._failures", lambda refs: [(0, error)])
    raised = failure_of([None], ["actor rank 0"], "update_actor")
    assert isinstance(raised, ActorDiedError) and not isinstance(raised, WorkerDiedError)
    assert "raised by actor rank 0 in update_actor; traceback of the worker:" in raised.__notes__[0]
