"""Traces of rollouts: what a backend gets. Clients are recorded here: neither MLflow nor Weave is installed."""

import asyncio
import json
import sys
from contextlib import contextmanager
from types import SimpleNamespace

import pytest

from tests.helpers.models import make_tokenizer
from verl.agents.rollout_trace import RolloutTraceConfig, rollout_trace_attr, rollout_trace_op


@pytest.fixture(autouse=True)
def fresh():
    RolloutTraceConfig.reset()
    yield
    RolloutTraceConfig.reset()


class Loop:
    tokenizer = make_tokenizer()

    @rollout_trace_op
    async def run(self, prompt, limit=3):
        if limit == 0:
            raise ValueError("no room")
        await asyncio.sleep(60 if limit == 60 else 0)
        return SimpleNamespace(prompt_ids=[25, 26], response_ids=[6], mask=[1])

    @rollout_trace_op
    def count(self, values):
        return len(values)


@pytest.fixture
def mlflow(monkeypatch):
    """What a recording module `mlflow` was called with."""
    calls = []

    @contextmanager
    def start_span(name):
        calls.append(("open", name))
        note = lambda kind: lambda value: calls.append((kind, value))  # noqa: E731
        yield SimpleNamespace(set_inputs=note("in"), set_outputs=note("out"))
        calls.append(("close", name))

    module = SimpleNamespace(
        set_experiment=lambda name: calls.append(("project", name)),
        start_span=start_span, update_current_trace=lambda tags: calls.append(("tags", tags)),
    )  # fmt: skip
    monkeypatch.setitem(sys.modules, "mlflow", module)
    return calls


def test_jsonl_has_a_line_for_each_call(tmp_path):
    RolloutTraceConfig.init("p", "e", "jsonl", token2text=True, folder=tmp_path / "traces")
    with rollout_trace_attr(sample_index=1, step=2, rollout_n=0):
        asyncio.run(Loop().run("a"))
        with pytest.raises(ValueError, match="no room"):
            asyncio.run(Loop().run(Loop(), limit=0))
    (file,) = (tmp_path / "traces").iterdir()
    first, second = map(json.loads, file.read_text().splitlines())
    assert (first["op"], first["sample_index"], first["step"], first["error"]) == ("Loop.run", 1, 2, None)
    assert first["inputs"] == {"prompt": "a", "limit": 3} and 0 <= first["seconds"] < 60
    assert first["output"]["response_ids"] == [6]
    assert first["output"]["response_text"] == Loop.tokenizer.decode([6])
    assert second["error"] == "ValueError('no room')" and second["inputs"]["prompt"] == "<Loop>"


def test_mlflow_gets_one_trace_with_its_calls(mlflow):
    RolloutTraceConfig.init("p", "e", "mlflow", token2text=True)
    RolloutTraceConfig.init("other", "e", None)  # no effect before a reset
    with rollout_trace_attr(sample_index=1, step=2, rollout_n=0, name="agent"):
        asyncio.run(Loop().run("a"))
    with rollout_trace_attr(trace=False):
        Loop().count([1])
    decode = Loop.tokenizer.decode
    assert mlflow == [
        ("project", "p"),
        ("open", "agent"),
        ("tags", {"sample_index": "1", "step": "2", "rollout_n": "0", "validate": "False", "experiment_name": "e"}),
        ("open", "Loop.run"),
        ("in", {"prompt": "a", "limit": 3}),
        ("out", {"prompt_ids": [25, 26], "response_ids": [6], "mask": [1], "prompt_text": decode([25, 26]),
                 "response_text": decode([6])}),
        ("close", "Loop.run"),
        ("close", "agent"),
    ]  # fmt: skip


async def cancelled():
    task = asyncio.create_task(Loop().run("a", limit=60))
    await asyncio.sleep(0)
    task.cancel()
    await task


def test_weave_gets_results_and_errors(monkeypatch):
    calls = []
    client = SimpleNamespace(
        create_call=lambda op, inputs, attributes: calls.append((op, inputs, attributes)) or len(calls),
        finish_call=lambda call, output=None, exception=None: calls.append((call, output, repr(exception))),
    )  # fmt: skip

    @contextmanager
    def attributes(given):
        calls.append(given)
        yield

    monkeypatch.setitem(sys.modules, "weave", SimpleNamespace(init=lambda project: client, attributes=attributes))
    RolloutTraceConfig.init("p", "e", "weave")
    with rollout_trace_attr(step=2, validate=True):
        assert Loop().count([5, 6, 7]) == 3
        with pytest.raises(ValueError, match="no room"):
            asyncio.run(Loop().run("a", limit=0))
        with pytest.raises(asyncio.CancelledError):
            asyncio.run(cancelled())
    given = {"step": 2, "validate": True, "experiment_name": "e"}
    assert calls == [
        given, ("Loop.count", {"values": [5, 6, 7]}, given), (2, 3, "None"),
        ("Loop.run", {"prompt": "a", "limit": 0}, given), (4, None, "ValueError('no room')"),
        ("Loop.run", {"prompt": "a", "limit": 60}, given), (6, None, "CancelledError()"),
    ]  # fmt: skip


def test_the_first_samples_of_each_step_are_traced_with_all_their_rollouts(mlflow):
    RolloutTraceConfig.init("p", "e", "mlflow", max_samples_per_step_per_worker=2)
    for step, validate in ((1, False), (2, False), (2, True)):
        for rollout_n in (0, 1):
            for sample in (7, 3, 5):
                with rollout_trace_attr(sample, step, rollout_n, validate=validate):
                    Loop().count([sample])
    tags = [value for kind, value in mlflow if kind == "tags"]
    traced = [tuple(tag[key] for key in ("step", "validate", "rollout_n", "sample_index")) for tag in tags]
    steps = (("1", "False"), ("2", "False"), ("2", "True"))
    assert traced == [(*step, rollout, sample) for step in steps for rollout in "01" for sample in "73"]
    assert [value["values"] for kind, value in mlflow if kind == "in"] == [[7], [3]] * 6  # none of sample 5


def test_a_backend_that_cannot_be_used_is_refused(monkeypatch):
    with pytest.raises(ValueError, match="backend='wandb' is unknown. Known: jsonl, mlflow, weave, null."):
        RolloutTraceConfig.init("p", "e", "wandb")
    monkeypatch.setitem(sys.modules, "weave", None)
    with pytest.raises(ImportError, match="pip install weave"):
        RolloutTraceConfig.init("p", "e", "weave")
    assert RolloutTraceConfig.get_backend() is None
