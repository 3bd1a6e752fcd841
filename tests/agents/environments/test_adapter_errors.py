"""Errors of adapters name the keys that help: too few tasks of a verifiers environment, rows without an environment."""

import asyncio
from types import SimpleNamespace

import pytest

from examples.environments.skyrl_gym_adapter import SkyRLGym
from verl.agents.environments.adapters.verifiers import Verifiers
from verl.config.environment import EnvironmentConfig


def count(split, own=0, **sizes):
    """Tasks of a split: of 5 tasks for training, and `own` of another configuration for validation."""
    adapter = Verifiers.__new__(Verifiers)  # without the library
    adapter.settings, adapter.tasks = EnvironmentConfig(name="verifiers", tasks=["sort"], **sizes), {}
    given = {"train": 5} | ({"val": own} if own else {})
    adapter.environments = {("sort", s): SimpleNamespace(taskset=range(number)) for s, number in given.items()}
    return len(adapter._tasks("sort", split))


@pytest.mark.parametrize(
    ("split", "wrong", "advice", "fixes"),
    [
        ("train", {"size": 6}, r"data.environment.size: .* Lower it\.$", [{"size": 5}]),
        ("val", {"val_size": 9, "own": 3}, r"data.environment.val_size: .* Lower it\.$", [{"val_size": 3, "own": 3}]),
        ("val", {"size": 5, "val_size": 2}, "val_size: .* Lower it or data.environment.size, or set .*params.sort.val",
         [{"size": 3, "val_size": 2}, {"size": 5, "val_size": 2, "own": 2}]),
    ],
)  # fmt: skip
def test_the_advice_about_too_few_tasks_helps(split, wrong, advice, fixes):
    with pytest.raises(ValueError, match=advice):
        count(split, **wrong)
    assert [count(split, **fix) for fix in fixes] == [5 if split == "train" else fix["val_size"] for fix in fixes]


def test_a_row_without_an_environment_is_helped_by_either_setting():
    def rows(tasks=None, **row):
        adapter = SkyRLGym.__new__(SkyRLGym)  # without the library
        adapter.settings = EnvironmentConfig(name="examples.environments.skyrl_gym_adapter.SkyRLGym", tasks=tasks)
        adapter._read = lambda file: [{"prompt": [{"role": "user", "content": "?"}], **row}]
        adapter._make = lambda item, row: SimpleNamespace(init=lambda messages: (messages, {}), close=lambda: None)
        return asyncio.run(adapter.rows("train", ["a.parquet"]))

    with pytest.raises(ValueError, match="Set the row's env_class, or data.environment.tasks"):
        rows()
    assert len(rows(env_class="sums")) == len(rows(tasks=["sums"])) == 1
