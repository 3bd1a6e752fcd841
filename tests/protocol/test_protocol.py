"""DataProto: properties that hold for any batch, errors that name the culprit, pickling and files without pickle."""

import pickle

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tensordict import TensorDict

from tests.helpers.ranks import run_ranks
from verl import DataProto, protocol
from verl.protocol import DataProtoConfig, DataProtoError, DataProtoItem

FAST = settings(max_examples=30, deadline=None)


def make(rows: int, **meta) -> DataProto:
    tensors = {"ids": torch.arange(rows * 3).view(rows, 3), "p": torch.arange(rows, dtype=torch.float32) / 7}
    return DataProto.from_dict(tensors, {"uid": [f"u{i}" for i in range(rows)], "n": np.arange(rows)}, meta)


def same(a: DataProto, b: DataProto) -> bool:
    assert set(a.batch.keys()) == set(b.batch.keys()) and a.non_tensor_batch.keys() == b.non_tensor_batch.keys()
    tensors = all(torch.equal(a.batch[k], b.batch[k]) and a.batch[k].dtype == b.batch[k].dtype for k in a.batch.keys())
    columns = all((v == b.non_tensor_batch[k]).all() for k, v in a.non_tensor_batch.items())
    return tensors and columns and a.meta_info == b.meta_info


@FAST
@given(rows=st.integers(1, 12), size=st.integers(1, 13))
def test_split_then_concat_is_the_identity(rows, size):
    data = make(rows, t=0.5)
    parts = data.split(size)
    assert [len(p) for p in parts[:-1]] == [size] * (len(parts) - 1)
    assert same(DataProto.concat(parts), data)


@FAST
@given(chunks=st.integers(1, 5), each=st.integers(1, 4))
def test_chunk_then_concat_is_the_identity(chunks, each):
    data = make(chunks * each)
    assert [len(c) for c in data.chunk(chunks)] == [each] * chunks
    assert same(DataProto.concat(data.chunk(chunks)), data)


@FAST
@given(rows=st.integers(1, 6), n=st.integers(1, 4), interleave=st.booleans())
def test_repeat_agrees_with_choosing_rows(rows, n, interleave):
    order = [i for i in range(rows) for _ in range(n)] if interleave else list(range(rows)) * n
    assert same(make(rows).repeat(n, interleave), make(rows).select_idxs(order))


@FAST
@given(rows=st.integers(1, 9), k=st.integers(1, 12))
def test_pad_then_unpad_is_the_identity(rows, k):
    padded, pad = protocol.pad_dataproto_to_divisor(make(rows), k)
    assert len(padded) % k == 0 and 0 <= pad < k
    assert same(protocol.unpad_dataproto(padded, pad), make(rows))


@FAST
@given(st.permutations(range(6)))
def test_reorder_by_the_inverse_undoes_it(order):
    data = make(6)
    data.reorder(torch.tensor(order))
    assert data.batch["ids"][:, 0].tolist() == [3 * i for i in order]
    data.reorder(np.argsort(order))
    assert same(data, make(6))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64, torch.bool, torch.int8, torch.int64,
                                   torch.float8_e4m3fn, torch.complex64])  # fmt: skip
def test_pickling_keeps_types_and_bytes(dtype):
    x = torch.randint(0, 2, (4, 3)).to(dtype)
    got = pickle.loads(pickle.dumps(DataProto.from_dict({"x": x}, {"u": [1, "b", [2], None]}, {"k": 1})))
    assert got.batch["x"].dtype == dtype and got.batch["x"].shape == (4, 3)
    assert torch.equal(got.batch["x"].to(torch.complex64), x.to(torch.complex64))
    assert got.non_tensor_batch["u"].tolist() == [1, "b", [2], None] and got.meta_info == {"k": 1}


def test_a_slice_pickles_its_rows_only_and_out_of_band():
    part = DataProto.from_dict({"x": torch.zeros(1000, 1000)})[:10]
    buffers = []
    head = pickle.dumps(part, protocol=5, buffer_callback=buffers.append)
    assert sum(b.raw().nbytes for b in buffers) == 10 * 1000 * 4 and len(head) < 2000


def test_parts_selections_and_unions_share_memory():
    data = make(4)
    others = [data.chunk(2)[0], data.select(["ids"]), DataProto.from_dict({"x": torch.zeros(4)}).union(data)]
    assert {other.batch["ids"].untyped_storage().data_ptr() for other in others} == {
        data.batch["ids"].untyped_storage().data_ptr()
    }


def test_an_empty_batch_works():
    empty = make(4)[:0]
    assert len(empty) == 0 and len(DataProto.concat([empty, empty])) == 0 and len(empty.repeat(3)) == 0
    assert same(pickle.loads(pickle.dumps(empty)), empty)
    assert len(empty.select_idxs([])) == 0 and empty.split(2) == []
    assert len(DataProto()) == 0 and len(DataProto(meta_info={"a": 1}).union(make(2))) == 2
    assert len(DataProto(None, {"name": np.array(["a", "b"], dtype=object)})) == 2  # of columns alone


def test_files_hold_everything_without_pickle(tmp_path):
    data = make(2, t=0.5, eos=[1, 2], shape=(1, 2), by_id={3: "c"}, rate=np.float32(0.25), w=torch.ones(2).bfloat16())
    data.batch["b"] = torch.ones(2, 2, dtype=torch.bfloat16)
    data.non_tensor_batch["extra"] = np.array([{"a": [1, None]}, {"a": np.arange(2)}], dtype=object)
    data.save_to_disk(tmp_path / "batch.dp")
    assert [p.name for p in tmp_path.iterdir()] == ["batch.dp"]
    got = DataProto.load_from_disk(tmp_path / "batch.dp")
    assert got.batch["b"].dtype == torch.bfloat16 and torch.equal(got.batch["ids"], data.batch["ids"])
    assert got.non_tensor_batch["uid"].tolist() == ["u0", "u1"] and got.non_tensor_batch["n"].dtype == np.int64
    assert got.non_tensor_batch["extra"][1]["a"].tolist() == [0, 1]
    assert got.meta_info["shape"] == (1, 2) and got.meta_info["by_id"] == {3: "c"} and got.meta_info["w"].sum() == 2
    assert got.meta_info["rate"] == np.float32(0.25) and got.meta_info["rate"].dtype == np.float32


def test_files_refuse_what_they_cannot_hold(tmp_path):
    with pytest.raises(TypeError, match=r"meta_info\.fn holds a builtins\.builtin_function"):
        make(1, fn=len).save_to_disk(tmp_path / "x.dp")
    from safetensors.numpy import save_file

    save_file({"a": np.zeros(2)}, tmp_path / "other.safetensors")
    with pytest.raises(ValueError, match="is not a stored DataProto"):
        DataProto.load_from_disk(tmp_path / "other.safetensors")


def test_union_is_in_place_and_names_the_key_and_both_shapes_when_sides_differ():
    data, other = make(2), DataProto.from_dict({"p": make(2).batch["p"], "q": torch.ones(2)}, meta_info={"t": 1})
    assert data.union(other) is data and data.batch["q"].tolist() == [1, 1] and data.meta_info == {"t": 1}
    with pytest.raises(AssertionError, match=r"tensor 'ids' differs .*\(2, 3\) and \(2, 4\)"):
        data.union(DataProto.from_dict({"ids": torch.zeros(2, 4)}))
    with pytest.raises(DataProtoError, match="column 'uid' differs"):
        data.union(DataProto.from_dict(non_tensors={"uid": ["a", "b"]}))
    with pytest.raises(DataProtoError, match=r"meta_info\['t'\] is 1 here, 2 there"):
        data.union(DataProto(meta_info={"t": 2}))
    with pytest.raises(DataProtoError, match="union of 2 and 3 rows"):
        data.union(make(3))
    assert set(data.batch.keys()) == {"ids", "p", "q"}


def test_union_takes_nan_as_equal_to_nan():
    a = {"x": np.array([1.0, np.nan]), "o": np.array([{"k": float("nan")}, [np.arange(2)]], dtype=object)}
    b = {"x": np.array([1.0, np.nan]), "o": np.array([{"k": float("nan")}, [np.arange(2)]], dtype=object)}
    assert protocol.union_numpy_dict(a, b) is a
    data = DataProto.from_dict({"x": torch.tensor([1.0, torch.nan])})
    data.union(DataProto.from_dict({"x": torch.tensor([1.0, torch.nan])}))


def test_concat_gathers_metrics_and_demands_equal_meta_otherwise():
    a, b = make(1, metrics={"loss": [1.0, 2.0]}, t=1), make(2, metrics={"loss": 3.0}, t=1)
    assert DataProto.concat([a, b]).meta_info == {"metrics": {"loss": [1.0, 2.0, 3.0]}, "t": 1}
    with pytest.raises(DataProtoError, match=r"meta_info\['t'\] is 1 in one part and 2 in part 1"):
        DataProto.concat([make(1, t=1), make(1, t=2)])
    with pytest.raises(DataProtoError, match=r"tensor 'x' is \(1, 2\) in part 0 and \(1, 3\) in part 1"):
        DataProto.concat([DataProto.from_dict({"x": torch.zeros(1, n)}) for n in (2, 3)])


def test_chunk_must_divide_unless_padding_is_enabled(monkeypatch):
    with pytest.raises(AssertionError, match="5 rows cannot be cut into 2 equal parts"):
        make(5).chunk(2)
    monkeypatch.setattr(DataProtoConfig, "auto_padding", True)
    assert [len(c) for c in make(5).chunk(2)] == [2, 3]


def test_select_pop_rename():
    data = make(2, a=1, b=2)
    assert list(data.select(["p"], [], ["a"]).batch.keys()) == ["p"]
    deep = data.select(deepcopy=True)
    deep.batch["p"].zero_()
    assert data.batch["p"][1] > 0
    gone = data.pop(["p"], ["n"], ["b"])
    assert list(gone.batch.keys()) == ["p"] and list(data.batch.keys()) == ["ids"] and data.meta_info == {"a": 1}
    assert list(data.rename("ids", "input_ids").batch.keys()) == ["input_ids"]
    with pytest.raises(KeyError, match="'prompts' is not in batch"):
        data.pop(["prompts"])
    assert list(data.batch.keys()) == ["input_ids"]


def test_indexing_by_every_kind():
    data = make(4)
    assert isinstance(data[1], DataProtoItem) and data[-1].non_tensor_batch["uid"] == "u3"
    for rows in ([1, 3], np.array([1, 3]), torch.tensor([1, 3]), slice(1, 4, 2), [False, True, False, True]):
        assert data[rows].non_tensor_batch["uid"].tolist() == ["u1", "u3"]
    with pytest.raises(IndexError, match="row 4 of a DataProto with 4 rows"):
        data[4]
    assert protocol.collate_fn([data[i] for i in range(4)]).batch["ids"].tolist() == data.batch["ids"].tolist()


def test_construction_names_the_column_that_does_not_fit():
    with pytest.raises(DataProtoError, match=r"tensor 'b' has shape \(3,\), but 'a' has \(2,\)"):
        DataProto.from_dict({"a": torch.zeros(2), "b": torch.zeros(3)})
    with pytest.raises(DataProtoError, match=r"non_tensor_batch\['u'\] has shape \(3,\); expected 2 rows"):
        DataProto.from_dict({"a": torch.zeros(2)}, {"u": [1, 2, 3]})
    with pytest.raises(DataProtoError, match="column 'a' is a list"):
        DataProto.from_single_dict({"a": [1]})


def test_iterator_covers_every_row_each_epoch_and_repeats_with_its_seed():
    def rows(seed):
        return [b.non_tensor_batch["n"].tolist() for b in make(6).make_iterator(2, 2, seed, {"shuffle": True})]

    assert rows(1) == rows(1) and sorted(sum(rows(1)[:3], [])) == list(range(6)) and rows(1)[:3] != rows(1)[3:]
    assert [b.non_tensor_batch["n"].tolist() for b in make(4).make_iterator(2, 1)] == [[0, 1], [2, 3]]
    with pytest.raises(DataProtoError, match="5 rows cannot be divided into mini-batches of 2"):
        make(5).make_iterator(2, 1)


def test_folding_unfolding_and_column_chunks():
    data = make(6)
    folded = protocol.fold_batch_dim(data, 2)
    assert folded.batch["ids"].shape == (2, 3, 3) and folded.non_tensor_batch["uid"].shape == (2, 3)
    assert same(protocol.unfold_batch_dim(folded), data)
    wide = DataProto.from_dict({"x": torch.arange(8).view(2, 4), "y": torch.tensor([7, 8])}, {"u": ["a", "b"]})
    wide.non_tensor_batch["pair"] = np.array([[1, 2], [3, 4]])
    parts = wide.unfold_column_chunks(2, ["x"])
    assert parts.batch["x"].tolist() == [[0, 1], [2, 3], [4, 5], [6, 7]]
    assert parts.batch["y"].tolist() == [7, 7, 8, 8] and parts.non_tensor_batch["u"].tolist() == ["a", "a", "b", "b"]
    assert parts.non_tensor_batch["pair"].tolist() == [[1, 2], [1, 2], [3, 4], [3, 4]]
    assert wide.unfold_column_chunks(2, ["pair"]).non_tensor_batch["pair"].tolist() == [[1], [2], [3], [4]]
    assert make(2).sample_level_repeat([2, 1]).non_tensor_batch["n"].tolist() == [0, 0, 1]


def test_padding_appends_the_first_or_the_last_row():
    data = make(2)
    data.padding(2, "first")
    data.padding(1)
    assert data.non_tensor_batch["n"].tolist() == [0, 1, 0, 0, 0]


def test_tensordict_and_back():
    data = make(2, t=0.5, opts={"a": 1})
    assert "ids: (2, 3) torch.int64" in data.get_data_info() and "opts: dict" in data.get_data_info()
    back = DataProto.from_tensordict(data.to_tensordict())
    assert back.non_tensor_batch["uid"].tolist() == ["u0", "u1"] and back.meta_info == {"t": 0.5, "opts": {"a": 1}}
    assert torch.equal(back.batch["ids"], data.batch["ids"])
    assert len(DataProto.from_tensordict(TensorDict({"x": torch.zeros(3, 2)}, batch_size=[3]))) == 3


def test_lists_of_dicts():
    assert protocol.list_of_dict_to_dict_of_list([{"a": 1}, {"a": 2}]) == {"a": [1, 2]}
    with pytest.raises(DataProtoError, match="entry 1 has keys"):
        protocol.list_of_dict_to_dict_of_list([{"a": 1}, {"b": 2}])


def _gather(rank, world):
    data = DataProto.from_dict({"x": torch.tensor([rank, rank + 10])}, {"u": [f"r{rank}", "z"]})
    protocol.all_gather_data_proto(data, torch.distributed.group.WORLD)
    return data.batch["x"].tolist(), data.non_tensor_batch["u"].tolist()


@pytest.mark.process
def test_all_gather_gives_every_rank_all_rows():
    assert run_ranks(_gather, 2) == [([0, 10, 1, 11], ["r0", "z", "r1", "z"])] * 2


def jagged_batch():
    rows = [torch.arange(3.0), torch.arange(1.0), torch.arange(4.0)]
    tokens = torch.nested.as_nested_tensor(rows, layout=torch.jagged)
    return DataProto.from_dict({"tokens": tokens, "x": torch.arange(3)}, {"name": ["a", "b", "c"]})


def lengths(data):
    return [len(row) for row in data.batch["tokens"].unbind()]


def test_jagged_tensors_travel_and_are_stored(tmp_path):
    data = jagged_batch()
    for copied in (pickle.loads(pickle.dumps(data)), DataProto.from_tensordict(data.to_tensordict())):
        assert copied.batch["tokens"].is_nested and lengths(copied) == [3, 1, 4] and copied.batch.device is None
        assert torch.equal(copied.batch["tokens"].values(), data.batch["tokens"].values())
    assert lengths(pickle.loads(pickle.dumps(data[1:]))) == [1, 4]
    data.save_to_disk(tmp_path / "data")
    assert lengths(DataProto.load_from_disk(tmp_path / "data")) == [3, 1, 4]


def test_jagged_tensors_are_selected_joined_and_compared():
    data = jagged_batch()
    assert lengths(data.select_idxs([2, 0])) == [4, 3] and lengths(data.repeat(2)) == [3, 3, 1, 1, 4, 4]
    assert lengths(DataProto.concat([data, data[:1]])) == [3, 1, 4, 3]
    assert len(data.union(jagged_batch())) == 3
    other = jagged_batch()
    other.batch["tokens"] = torch.nested.as_nested_tensor([torch.ones(3), torch.ones(1), torch.ones(4)],
                                                          layout=torch.jagged)  # fmt: skip
    with pytest.raises(AssertionError, match="tensor 'tokens' differs"):
        data.union(other)


def test_the_device_of_a_batch_stays_as_it_is():
    for device in (None, torch.device("cpu")):
        batch = TensorDict({"x": torch.arange(2)}, batch_size=[2], device=device)
        assert pickle.loads(pickle.dumps(DataProto(batch))).batch.device == device
