"""Dispatch and collect functions on lists and small batches, without Ray."""

from types import SimpleNamespace

import pytest
import torch

from verl import DataProto
from verl.protocol import DataProtoConfig
from verl.single_controller.base import Worker
from verl.single_controller.base import decorator as d
from verl.single_controller.base.worker_group import ResourcePool, registered_methods
from verl.utils.tensordict_utils import assert_tensordict_eq, get_tensordict


def group(world: int, **extra) -> SimpleNamespace:
    return SimpleNamespace(world_size=world, _dispatch_info={}, _collect_info={}, **extra)


def batch(rows: int, **meta) -> DataProto:
    return DataProto.from_dict({"x": torch.arange(rows)}, {"uid": [f"u{i}" for i in range(rows)]}, meta)


def xs(parts) -> list[list[int]]:
    return [p.batch["x"].tolist() for p in parts]


def test_one_to_all_gives_every_rank_everything():
    assert d.dispatch_one_to_all(group(3), 7, k="a") == (([7, 7, 7],), {"k": ["a", "a", "a"]})


def test_all_to_all_changes_nothing():
    assert d.dispatch_all_to_all(group(2), [1, 2], k=3) == (([1, 2],), {"k": 3})
    assert d.collect_all_to_all(group(2), ["a", "b"]) == ["a", "b"]


def test_dp_compute_needs_one_entry_a_rank():
    assert d.dispatch_dp_compute(group(2), [1, 2]) == (([1, 2],), {})
    with pytest.raises(ValueError, match="argument 0 has 3 entries for 2 ranks"):
        d.dispatch_dp_compute(group(2), [1, 2, 3])
    with pytest.raises(ValueError, match="the output has 1 entries for 2 ranks"):
        d.collect_dp_compute(group(2), [1])


def test_dp_compute_proto_cuts_and_joins_in_rank_order():
    (parts,), kwargs = d.dispatch_dp_compute_data_proto(group(2), batch(4))
    assert xs(parts) == [[0, 1], [2, 3]] and kwargs == {}
    assert d.collect_dp_compute_data_proto(group(2), parts).batch["x"].tolist() == [0, 1, 2, 3]


def test_dp_compute_proto_does_not_pad_by_itself():
    with pytest.raises(ValueError, match="5 rows cannot be cut into 2 equal parts"):
        d.dispatch_dp_compute_data_proto(group(2), batch(5))


def test_auto_padding_repeats_the_last_row_and_returns_how_often():
    data = batch(5, **{DataProtoConfig.auto_padding_key: True})
    (parts,), kwargs = d.dispatch_dp_compute_data_proto(group(4), data)
    assert xs(parts) == [[0, 1], [2, 3], [4, 4], [4, 4]]
    assert kwargs == {d.PADDING_KEY: (3, 8)} and len(data) == 5


def test_plain_values_are_refused_where_batches_are_cut():
    with pytest.raises(TypeError, match="argument 'alpha' is a float"):
        d.dispatch_dp_compute_data_proto(group(2), batch(4), alpha=0.5)


def test_with_func_replicates_the_function_only():
    (funcs, parts), _ = d.dispatch_dp_compute_data_proto_with_func(group(2), len, batch(4))
    assert funcs == [len, len] and xs(parts) == [[0, 1], [2, 3]]


def test_nd_compute_gives_tensor_parallel_partners_the_same_object():
    (parts,), _ = d.dispatch_nd_compute_dataproto([0, 0, 1, 1], 2, group(4), batch(4))
    assert xs(parts) == [[0, 1], [0, 1], [2, 3], [2, 3]] and parts[0] is parts[1]
    joined = d.collect_nd_compute_dataproto([True, False, True, False], group(4), parts)
    assert joined.batch["x"].tolist() == [0, 1, 2, 3]


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


def test_rank_zero_has_no_functions():
    with pytest.raises(KeyError, match="execute_mode=Execute.RANK_ZERO"):
        d.get_predefined_dispatch_fn(d.Dispatch.RANK_ZERO)


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


def test_resource_pool_counts_ranks():
    pool = ResourcePool([2, 1])
    assert pool.world_size == 3
    assert pool.local_rank_list() == [0, 1, 0] and pool.local_world_size_list() == [2, 2, 1]


def tensordict(rows: int):
    tokens = torch.nested.as_nested_tensor([torch.arange(n + 1) for n in range(rows)], layout=torch.jagged)
    return get_tensordict({"x": torch.arange(rows), "tokens": tokens, "uid": [f"u{i}" for i in range(rows)]}, {"t": 1})


def test_a_tensordict_is_cut_and_joined_like_a_data_proto():
    (parts,), kwargs = d.dispatch_dp_compute_data_proto(group(2), tensordict(4))
    assert [part["x"].tolist() for part in parts] == [[0, 1], [2, 3]] and kwargs == {}
    assert [row.tolist() for row in parts[1]["tokens"].unbind()] == [[0, 1, 2], [0, 1, 2, 3]]
    assert_tensordict_eq(d.collect_dp_compute_data_proto(group(2), parts), tensordict(4))
    ranks = [0, 0, 1, 1]
    (spread,), _ = d.dispatch_nd_compute_dataproto(ranks, 2, group(4), tensordict(4))
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
