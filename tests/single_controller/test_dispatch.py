"""Dispatch and collect functions on lists and small batches, without Ray; each call on ranks has a time limit."""

from types import SimpleNamespace

import pytest
import torch

from tests.helpers.configs import compose_ppo
from verl import DataProto
from verl.protocol import DataProtoConfig
from verl.roles.reward_server import RewardServerWorker
from verl.rollout.replica_worker import RolloutReplicaWorker
from verl.single_controller.base import Worker
from verl.single_controller.base import decorator as d
from verl.single_controller.base.worker_group import registered_methods
from verl.single_controller.ray.watchdog import METHODS, phase_of
from verl.utils.tensordict_utils import assert_tensordict_eq, get_tensordict
from verl.workers.fsdp_workers import ActorRolloutRefWorker, AsyncActorRolloutRefWorker, CriticWorker, RewardModelWorker


def group(world: int, **extra) -> SimpleNamespace:
    return SimpleNamespace(world_size=world, _dispatch_info={}, _collect_info={}, **extra)


def batch(rows: int, **meta) -> DataProto:
    return DataProto.from_dict({"x": torch.arange(rows)}, {"uid": [f"u{i}" for i in range(rows)]}, meta)


def xs(parts) -> list[list[int]]:
    return [p.batch["x"].tolist() for p in parts]


def test_dp_compute_needs_one_entry_a_rank():
    assert d.dispatch_dp_compute(group(2), [1, 2]) == (([1, 2],), {})
    with pytest.raises(ValueError, match="argument 0 has 3 entries for 2 ranks"):
        d.dispatch_dp_compute(group(2), [1, 2, 3])
    with pytest.raises(ValueError, match="the output has 1 entries for 2 ranks"):
        d.collect_dp_compute(group(2), [1])


def test_dp_compute_proto_does_not_pad_by_itself():
    with pytest.raises(ValueError, match="5 rows cannot be cut into 2 equal parts"):
        d.dispatch_dp_compute_data_proto(group(2), batch(5))


def test_auto_padding_repeats_the_last_row_and_returns_how_often():
    data = batch(5, **{DataProtoConfig.auto_padding_key: True})
    (parts,), kwargs = d.dispatch_dp_compute_data_proto(group(4), data)
    assert xs(parts) == [[0, 1], [2, 3], [4, 4], [4, 4]]
    assert kwargs == {d.PADDING_KEY: (3, 8)} and len(data) == 5
    (_, whole), _ = d.dispatch_dp_compute_data_proto(group(4), data, batch(8))
    assert xs(whole) == [[0, 1], [2, 3], [4, 5], [6, 7]]  # without auto padding: as it is


def test_plain_values_are_refused_where_batches_are_cut():
    with pytest.raises(TypeError, match="argument 'alpha' is a float"):
        d.dispatch_dp_compute_data_proto(group(2), batch(4), alpha=0.5)


def test_lazy_compute_collects_in_the_order_of_dispatch():
    asked = []

    def query(mesh):
        asked.append(mesh)
        return [1, 0]

    g = group(2, _query_dispatch_info=query, query_collect_info=lambda mesh: [True, True])
    fns = d.make_nd_compute_dataproto_dispatch_fn("actor")
    for _ in range(2):
        (parts,), _ = fns["dispatch_fn"](g, batch(4))
        assert xs(parts) == [[2, 3], [0, 1]]
        assert fns["collect_fn"](g, parts).batch["x"].tolist() == [0, 1, 2, 3]
    assert asked == ["actor"]


def test_outputs_of_two_kinds_are_refused():
    with pytest.raises(TypeError, match="got DataProto, NoneType"):
        d.collect_dp_compute_data_proto(group(2), [batch(1), None])


def test_a_mode_can_be_added_and_replaced():
    d.register_dispatch_mode("test_reversed", lambda g, *a, **k: (a[::-1], k), d.collect_all_to_all)
    try:
        mode = d.Dispatch.TEST_REVERSED
        assert d.get_predefined_dispatch_fn(mode)["dispatch_fn"](None, 1, 2) == ((2, 1), {})
        d.update_dispatch_mode(mode, d.dispatch_all_to_all, d.collect_all_to_all)
        assert d.get_predefined_dispatch_fn(mode)["dispatch_fn"](None, 1, 2) == ((1, 2), {})
    finally:
        d.DISPATCH_MODE_FN_REGISTRY.pop(d.Dispatch.remove("test_reversed"))


def test_register_refuses_modes_it_does_not_know():
    with pytest.raises(KeyError, match="execute_mode=Execute.RANK_ZERO"):
        d.get_predefined_dispatch_fn(d.Dispatch.RANK_ZERO)
    with pytest.raises(TypeError, match="dispatch_mode='one_to_all'"):
        d.register(dispatch_mode="one_to_all")
    with pytest.raises(ValueError, match="lacks \\['collect_fn'\\]"):
        d.register(dispatch_mode={"dispatch_fn": len})


def test_registered_methods_include_those_of_bases():
    class A:
        @d.register(dispatch_mode=d.Dispatch.ONE_TO_ALL, blocking=False)
        def go(self):
            return 1

    class B(A):
        @property
        def trap(self):
            raise RuntimeError("a property must not run")

    assert registered_methods(B) == {
        "go": {"dispatch_mode": d.Dispatch.ONE_TO_ALL, "execute_mode": d.Execute.ALL, "blocking": False}
    }
    assert B().go() == 1


def tensordict(rows: int):
    tokens = torch.nested.as_nested_tensor([torch.arange(n + 1) for n in range(rows)], layout=torch.jagged)
    return get_tensordict({"x": torch.arange(rows), "tokens": tokens, "uid": [f"u{i}" for i in range(rows)]}, {"t": 1})


def test_a_tensordict_is_cut_and_joined_like_a_data_proto():
    (parts,), kwargs = d.dispatch_dp_compute_data_proto(group(2), tensordict(4))
    assert [part["x"].tolist() for part in parts] == [[0, 1], [2, 3]] and kwargs == {}
    assert [row.tolist() for row in parts[1]["tokens"].unbind()] == [[0, 1, 2], [0, 1, 2, 3]]
    assert_tensordict_eq(d.collect_dp_compute_data_proto(group(2), parts), tensordict(4))
    (spread,), _ = d.dispatch_nd_compute_dataproto([0, 0, 1, 1], 2, group(4), tensordict(4))
    assert [part["x"].tolist() for part in spread] == [[0, 1], [0, 1], [2, 3], [2, 3]]
    joined = d.collect_nd_compute_dataproto([True, False, True, False], group(4), spread)
    assert_tensordict_eq(joined, tensordict(4))
    with pytest.raises(ValueError, match="5 rows cannot be divided into 2 equal chunks"):
        d.dispatch_dp_compute_data_proto(group(2), tensordict(5))
    with pytest.raises(TypeError, match="batches of several types: DataProto, TensorDict"):
        d.collect_dp_compute_data_proto(group(2), [batch(1), tensordict(1)])


def test_a_mesh_is_registered_once_or_again_with_the_same_values(monkeypatch):
    for name, value in {"WORLD_SIZE": "1", "RANK": "0"}.items():
        monkeypatch.setenv(name, value)
    worker = Worker()
    worker._register_dispatch_collect_info("actor", dp_rank=1, is_collect=True)
    worker._register_dispatch_collect_info("actor", dp_rank=1, is_collect=True)
    other = Worker()
    other.set_dispatch_collect("actor", **worker.get_dispatch_collect())
    assert other.get_dispatch_collect() == {"dispatch_dp_rank": {"actor": 1}, "collect_dp_rank": {"actor": True}}
    assert other._query_dispatch_info("actor") == 1 and other.query_collect_info("actor") is True
    with pytest.raises(AssertionError, match=r"'actor' is registered on rank 0 with .* \(1, True\), not \(0, True\)"):
        worker._register_dispatch_collect_info("actor", dp_rank=0, is_collect=True)


ROLES = (ActorRolloutRefWorker, AsyncActorRolloutRefWorker, CriticWorker, RewardModelWorker, RewardServerWorker,
         RolloutReplicaWorker)  # fmt: skip


@pytest.mark.parametrize("role", ROLES)
def test_every_registered_method_has_a_phase_with_a_limit(role):
    limits = compose_ppo("actor_rollout_ref.model.path=m", "actor_rollout_ref.rollout.name=hf").trainer.watchdog
    for method in registered_methods(role):
        assert limits[phase_of(method)] > 0, method
        assert phase_of(f"actor_rollout_{method}") == phase_of(method)


def test_phases_name_registered_methods_only_and_each_once():
    named = [name for names in METHODS.values() for name in names]
    assert len(named) == len(set(named))
    of_other_workers = {"__ray_ready__", "reset", "compute_score_batch"}
    assert of_other_workers < set(named) <= of_other_workers | {m for role in ROLES for m in registered_methods(role)}
