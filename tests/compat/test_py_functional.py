"""Plain-Python helpers."""

import os
import pickle
import time

import numpy as np
import pytest
from omegaconf import OmegaConf

from verl.utils import py_functional as f


def test_append_rename_and_union_of_dicts():
    data = {}
    f.append_to_dict(data, {"loss": 1}, prefix="actor/")
    f.append_to_dict(data, {"loss": 2}, prefix="actor/")
    assert data == {"actor/loss": [1, 2]}
    assert f.rename_dict({"a": 1}, "x") == {"x/a": 1} == f.rename_dict({"a": 1}, "x/")
    assert f.union_two_dict({"a": np.arange(2)}, {"a": np.arange(2), "b": 1})["b"] == 1
    with pytest.raises(AssertionError, match="key 'a' has two values: 1 and 2"):
        f.union_two_dict({"a": 1}, {"a": 2})


def test_temp_env_var_restores_value_and_absence_after_an_error(monkeypatch):
    monkeypatch.setenv("VERL_TEST_A", "old")
    monkeypatch.delenv("VERL_TEST_B", raising=False)
    for key in ("VERL_TEST_A", "VERL_TEST_B"):
        with pytest.raises(RuntimeError), f.temp_env_var(key, "new"):
            assert os.environ[key] == "new"
            raise RuntimeError
    assert os.environ["VERL_TEST_A"] == "old" and "VERL_TEST_B" not in os.environ


@pytest.mark.process
@pytest.mark.parametrize("use_signals", [True, False])
def test_timeout_limit_stops_a_slow_call_and_leaves_a_fast_one(use_signals):
    @f.timeout_limit(3.0, use_signals=use_signals)
    def call(seconds):
        time.sleep(seconds)
        if seconds == 0:
            raise KeyError("own error")
        return os.getpid()

    assert (call(0.01) == os.getpid()) is use_signals
    with pytest.raises(TimeoutError, match="took longer than 3.0 s"):
        call(60)
    with pytest.raises(KeyError, match="own error"):
        call(0)


class Colour(f.DynamicEnum):
    """An enum for this file."""


def test_dynamic_enum_members_are_single_objects():
    red = Colour.register("red")
    try:
        assert Colour.RED is red is Colour["red"] is pickle.loads(pickle.dumps(red)) and "Red" in Colour
        assert Colour.names() == ["RED"] and Colour.values() == [red] and Colour.from_name("blue") is None
        with pytest.raises(ValueError, match="Colour.RED is already registered"):
            Colour.register("RED")
    finally:
        Colour.remove("red")
    assert Colour.names() == [] and "RED" not in f.DynamicEnum.names()


def test_nested_namespace_and_plain_containers():
    assert f.NestedNamespace({"a": {"b": 2}}).a.b == 2
    plain = f.convert_to_regular_types({"a": OmegaConf.create({"b": [1, {"c": 2}]})})
    assert plain == {"a": {"b": [1, {"c": 2}]}} and type(plain["a"]["b"]) is list


def test_nan_of_any_type_equals_nan():
    assert f.deep_equal([np.float32("nan"), float("nan")], [np.float32("nan"), float("nan")])
    assert not f.deep_equal({"a": 1.0}, {"a": float("nan")})


@pytest.mark.process
def test_an_answer_that_cannot_leave_its_process_is_named():
    with pytest.raises((pickle.PicklingError, AttributeError), match="lambda"):
        f.timeout_limit(5)(lambda: lambda: 1)()
