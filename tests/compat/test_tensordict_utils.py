"""TensorDict batches: jagged tensors, columns of Python values, values of the full batch."""

import pytest
import torch
from tensordict import NonTensorData, TensorDict

from verl.utils import tensordict_utils as tu


def jagged(*rows):
    return torch.nested.as_nested_tensor([torch.tensor(row) for row in rows], layout=torch.jagged)


def batch(first=0, rows=3):
    numbers = range(first, first + rows)
    return tu.get_tensordict(
        {"ids": torch.tensor([[n, 10 * n] for n in numbers]), "tokens": jagged(*([n] * (n + 1) for n in numbers)),
         "turns": [{"n": n} if n % 2 else [n, n] for n in numbers]},
        {"temperature": 0.5, "stops": ["a", "b"]},
    )  # fmt: skip


def rows_of(td):
    return td["ids"][:, 0].tolist(), [row.tolist() for row in td["tokens"].unbind()], tu.get(td, "turns")


def test_a_batch_is_built_and_read():
    td = batch()
    assert td.batch_size == torch.Size([3]) and td["tokens"].is_nested
    assert rows_of(td) == ([0, 1, 2], [[0], [1, 1], [2, 2, 2]], [[0, 0], {"n": 1}, [2, 2]])
    assert tu.get(td, "temperature") == 0.5 == tu.get_non_tensor_data(td, "temperature", 1.0)
    assert tu.get(td, "stops") == ["a", "b"] and tu.get(td, "nothing", 7) == 7
    assert tu.get_non_tensor_data(td, "nothing", None) is None
    assert tu.unwrap_non_tensor_data(NonTensorData("x")) == "x" and tu.unwrap_non_tensor_data(3) == 3
    assert tu.get_tensordict({}, {"a": 1}).batch_size == torch.Size([])


@pytest.mark.parametrize(("columns", "said"), [
    ({"a": torch.ones(2), "b": [1, 2, 3]}, "column 'b' has 3 rows, but 'a' has 2"),
    ({"a": torch.nested.nested_tensor([torch.ones(2), torch.ones(1)])}, "'a' must be contiguous and of the layout"),
])  # fmt: skip
def test_columns_that_do_not_fit_are_refused(columns, said):
    with pytest.raises(AssertionError, match=said):
        tu.get_tensordict(columns)


def test_values_are_assigned():
    td = TensorDict({"a": torch.ones(2)}, batch_size=[2])
    tu.assign_non_tensor(td, column=[[1], [1, 2]], whole={"k": 1})
    assert tu.get(td, "column") == [[1], [1, 2]] and tu.get(td, "whole") == {"k": 1}
    with pytest.raises(AssertionError, match="'column' has 1 values for 2 rows"):
        tu.assign_non_tensor(td, column=[1])
    with pytest.raises(AssertionError, match="must be a list with one value per row, not a str"):
        tu.assign_non_tensor_stack(td, "text", "ab")


def test_parts_are_joined_and_cut():
    joined = tu.concat_tensordict([batch(0, 2), batch(2, 2)])
    tu.assert_tensordict_eq(joined, batch(0, 4))
    for part, first in zip(tu.chunk_tensordict(joined, 2), (0, 2), strict=True):
        tu.assert_tensordict_eq(part, batch(first, 2))
    with pytest.raises(AssertionError, match="4 rows cannot be divided into 3 equal chunks"):
        tu.chunk_tensordict(joined, 3)
    with pytest.raises(AssertionError, match="empty list"):
        tu.concat_tensordict([])
    other = batch(2, 2)
    other.pop("turns")
    with pytest.raises(AssertionError, match=r"part 1 and part 0 do not both have the columns \['turns'\]"):
        tu.concat_tensordict([batch(0, 2), other])


def test_nested_tensors_of_more_dimensions_are_joined_and_selected():
    one = torch.nested.as_nested_tensor([torch.full((2, 3), 1.0), torch.full((1, 3), 2.0)], layout=torch.jagged)
    joined = tu.concat_nested_tensors([one, one])
    assert [tuple(row.shape) for row in joined.unbind()] == [(2, 3), (1, 3)] * 2
    last = torch.nested.as_nested_tensor([torch.full((4, 3), 1.0), torch.full((4, 5), 2.0)], layout=torch.jagged)
    picked = tu.index_select_tensor_dict(tu.get_tensordict({"p": last}), [1, 0, 1])
    assert [tuple(row.shape) for row in picked["p"].unbind()] == [(4, 5), (4, 3), (4, 5)]
    with pytest.raises(AssertionError, match=r"one of shape \(2,\)"):
        tu.concat_nested_tensors([one, torch.ones(2)])


def test_batches_without_rows_are_joined():
    whole = tu.get_tensordict({}, {"metrics": {"a": 1}})
    assert tu.get(tu.concat_tensordict([whole, whole]), "metrics") == {"a": 1}
    with pytest.raises(AssertionError, match="batches without rows"):
        tu.concat_tensordict_with_none_bsz([batch()])


def test_rows_are_selected_padded_and_dropped():
    assert rows_of(tu.index_select_tensor_dict(batch(), torch.tensor([2, 0]))) == (
        [2, 0], [[2, 2, 2], [0]], [[2, 2], [0, 0]])  # fmt: skip
    padded, added = tu.pad_to_divisor(batch(), 4)
    assert added == 1 and rows_of(padded)[0] == [0, 1, 2, 0] and tu.get(padded, "temperature") == 0.5
    assert tu.pad_to_divisor(batch(0, 1), 4)[0]["ids"][:, 0].tolist() == [0, 0, 0, 0]
    tu.assert_tensordict_eq(tu.unpad(padded, added), batch())
    assert tu.pad_to_divisor(batch(), 3)[1] == 0


def test_union_adds_columns_and_refuses_others_of_the_same_name():
    td = batch()
    more = tu.get_tensordict({"ids": td["ids"].clone(), "scores": torch.arange(3.0)})
    assert tu.union_tensor_dict(td, more) is td and td["scores"].tolist() == [0.0, 1.0, 2.0]
    with pytest.raises(AssertionError, match="tensor 'ids' differs"):
        tu.union_tensor_dict(td, tu.get_tensordict({"ids": td["ids"] + 1}))
    with pytest.raises(AssertionError, match=r"size \(3,\) and \(2,\)"):
        tu.union_tensor_dict(td, batch(0, 2))


@pytest.mark.parametrize("change", [
    lambda td: td.set("ids", td["ids"] + 1), lambda td: td.set("tokens", jagged([0], [1, 1], [2, 2])),
    lambda td: tu.assign_non_tensor(td, turns=[0, 1, 2]), lambda td: td.pop("ids"),
])  # fmt: skip
def test_different_batches_are_not_equal(change):
    other = batch()
    change(other)
    with pytest.raises(AssertionError):
        tu.assert_tensordict_eq(batch(), other)


def test_columns_are_taken():
    td = batch()
    assert set(tu.get_keys(td, ["ids", "turns"]).keys()) == {"ids", "turns"}
    assert tu.pop(td, "turns") == [[0, 0], {"n": 1}, [2, 2]] and tu.pop(td, "turns", "none") == "none"
    assert set(tu.pop_keys(td, ["ids"]).keys()) == {"ids"} and "ids" not in td.keys()
    with pytest.raises(KeyError, match="'ids' is not in the batch"):
        tu.pop_keys(td, ["ids"])


def test_mini_batches_in_order_and_shuffled_by_a_seed():
    td = batch(0, 4)
    order = [rows_of(part)[0] for part in tu.make_iterator(td, 2, epochs=2)]
    assert order == [[0, 1], [2, 3]] * 2
    drawn = [[rows_of(p)[0] for p in tu.make_iterator(td, 2, 2, seed, {"shuffle": True})] for seed in (1, 1)]
    assert drawn[0] == drawn[1] and sorted(sum(drawn[0][:2], [])) == [0, 1, 2, 3]
    with pytest.raises(AssertionError, match="4 rows cannot be divided into mini-batches of 3"):
        tu.make_iterator(td, 3, 1)
