"""Timers, memory logs and profilers, in one process and in a run."""

import gzip
import json
import logging

import pytest
import torch
from omegaconf import open_dict

from tests.helpers.rl_run import compose_run
from verl.profiling import profile as active
from verl.trainer.main_ppo import TaskRunner
from verl.trainer.ppo.worker_groups import nsight_options
from verl.trainer.run.ray_session import run_here
from verl.utils import profiler as p


def events(file):
    return {event.get("name") for event in json.loads(gzip.decompress(file.read_bytes()))["traceEvents"]}


def test_timers_add_up_and_end_after_an_error():
    timing = {"a": 1.0}
    with p.simple_timer("a", timing), p.marked_timer("b", timing, color="red"):
        pass
    with pytest.raises(KeyError), p.marked_timer("c", timing):
        raise KeyError("x")
    assert timing["a"] > 1.0 and 0 < timing["b"] < 1 and 0 < timing["c"] < 1


def test_memory_is_logged_before_and_after(caplog):
    log = logging.getLogger("memory")

    @p.GPUMemoryLogger(role="actor", logger=log, level=logging.INFO)
    def update(x):
        return x + 1

    with caplog.at_level(logging.INFO):
        assert update(1) == 2 and update.__name__ == "update"
        p.log_gpu_memory_usage("another rank's", log, logging.INFO, rank=3)
    assert [r.message.split(",")[0] for r in caplog.records] == ["before actor update", "after actor update"]
    assert "GiB" in caplog.records[0].message


def config(folder, **more):
    return p.ProfilerConfig(**{"tool": "torch", "enable": True, "ranks": [0], "save_path": str(folder), **more})


def test_settings_are_joined():
    one, other = config("x", ranks=[0, 1]), config("x", ranks=[1, 2], enable=False)
    assert (one.union(other).ranks, one.union(other).enable) == ([0, 1, 2], True)
    assert (one.intersect(other).ranks, one.intersect(other).enable) == ([1], False)
    with pytest.raises(AssertionError, match="'torch' in one role and 'nsys' in another"):
        one.union(config("x", tool="nsys"))


def test_only_named_ranks_record_and_one_role_of_a_process(tmp_path):
    first, second, other = (p.DistProfiler(rank, config(tmp_path)) for rank in (0, 0, 1))
    for profiler in (other, first, second):
        profiler.start(step=4)

    @p.DistProfiler.annotate(message="my_range")
    def work():
        return torch.ones(4) @ torch.ones(4)

    work()
    for profiler in (second, other, first):
        profiler.stop()
    (file,) = tmp_path.iterdir()
    assert file.name == "profile_step4_rank0.json.gz" and {"my_range", "aten::dot"} <= events(file)


def test_a_trace_of_some_updates(tmp_path):
    settings = config(tmp_path, tool_config={"torch": p.TorchProfilerToolConfig(step_start=1, step_end=2)})
    profiler = p.DistProfiler(0, settings)
    profiler.start(step=1)
    for number in range(3):
        with torch.profiler.record_function(f"update_{number}"):
            torch.ones(2).sum()
        active.finished_update()
    profiler.stop()
    (file,) = tmp_path.iterdir()
    assert "update_1" in events(file) and not {"update_0", "update_2"} & events(file)


def test_stacks_in_a_memory_snapshot_are_cut_after_their_innermost_python_frames():
    def stack(names):
        return [{"filename": name, "line": 1, "name": "f"} for name in names.split()]

    deep, short = stack("??  alloc.cpp a.py call.cpp b.py c.py"), stack("?? a.py")
    block = {"size": 8, "frames": deep}
    events = [{"action": "alloc", "frames": deep}, {"action": "free", "frames": short}]
    snapshot = {"segments": [{"blocks": [block, {"size": 8}], "frames": deep}], "device_traces": [events, []]}
    active.cut_stacks(snapshot, 2)
    kept = stack("?? alloc.cpp a.py call.cpp b.py")
    assert block["frames"] == snapshot["segments"][0]["frames"] == kept
    assert [event["frames"] for event in events] == [kept, short]
    assert snapshot["segments"][0]["blocks"][1] == {"size": 8} and len(deep) == 6


@pytest.mark.parametrize(("discrete", "ranges"), [
    (False, "start a b b stop"), (True, "start a stop start b b stop"),
])  # fmt: skip
def test_a_capture_range_covers_the_step_or_each_call(tmp_path, monkeypatch, discrete, ranges):
    seen = []
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    for name in ("start", "stop"):
        monkeypatch.setattr(torch.cuda.profiler, name, lambda name=name: seen.append(name))
    monkeypatch.setattr(torch.cuda.nvtx, "range_push", seen.append)
    monkeypatch.setattr(torch.cuda.nvtx, "range_pop", lambda: None)
    tools = {"nsys": p.NsightToolConfig(discrete=discrete)}
    profiler = p.DistProfiler(0, config(tmp_path, tool="nsys", tool_config=tools))

    @p.DistProfiler.annotate("a")
    def one():
        pass

    @p.DistProfiler.annotate("b")
    def two(again=True):
        if again:
            two(False)

    profiler.start(step=1)
    one()
    two()
    profiler.stop()
    one()
    assert seen == [*ranges.split(), "a"]


PROFILED = {
    "global_profiler__tool": "torch", "global_profiler__steps": "[2]",
    "actor_rollout_ref__actor__profiler__enable": "true", "actor_rollout_ref__actor__profiler__all_ranks": "true",
}  # fmt: skip


def test_a_run_profiles_the_named_step(tiny_llama, tmp_path, capfd):
    traces = tmp_path / "traces"
    config = compose_run(
        tmp_path, tiny_llama, trainer__local="true", trainer__total_training_steps=3, reward_model__num_workers=0,
        trainer__save_freq=0, global_profiler__save_path=traces, **PROFILED,
    )  # fmt: skip
    assert run_here(TaskRunner(), config) == 0, capfd.readouterr().err
    (file,) = traces.iterdir()
    assert file.name == "profile_step2_rank0.json.gz" and "Optimizer.step#AdamW.step" in events(file)
    rows = [json.loads(line)["data"] for line in (tmp_path / "out" / "metrics.jsonl").read_text().splitlines()]
    assert ["timing_s/stop_profile" in row for row in rows] == [False, True, False]


def test_nsight_gets_one_capture_range_for_each_profile(tmp_path):
    traces = tmp_path / "traces"
    settings = {"global_profiler__tool": "nsys", "global_profiler__steps": "[1,2,5]"}
    settings["global_profiler__save_path"] = traces
    options = nsight_options(compose_run(tmp_path, "unused", **settings))
    assert options["capture-range"] == "cudaProfilerApi" and options["capture-range-end"] == "repeat-shutdown:3"
    joined = compose_run(tmp_path, "unused", global_profiler__profile_continuous_steps="true", **settings)
    assert nsight_options(joined)["capture-range-end"] == "repeat-shutdown:2"
    calls = compose_run(tmp_path, "unused", global_profiler__global_tool_config__nsys__discrete="true", **settings)
    assert nsight_options(calls)["capture-range-end"] == "repeat"
    assert nsight_options(calls, of_driver=True)["o"] == f"{traces}/driver_%h_%p"
    assert traces.is_dir() and options["o"] == f"{traces}/rank_%h_%p"
    with open_dict(calls):
        calls.global_profiler.global_tool_config.nsys.worker_nsight_options["output"] = "my reports"
    options = nsight_options(calls)
    assert options["o"] == f"{traces}/my\\ reports" and "output" not in options
