"""Every module of `make bench BENCH=rl` at small sizes: it runs to its end and gives each figure that is wanted of it.

Not covered: vLLM's own share (transformers' rollout stands in for it), our training runs of `rl_whole_step` (their
command is read, not started), and the figures themselves.
"""

import json
from pathlib import Path

import pytest
import torch

from benchmarks import rl, rl_forward, rl_rollout, rl_whole_step, trl_steps
from benchmarks.run import WANTED
from examples.demo_runner import python
from tests.examples.test_grpo_demo import trained_config
from verl.rollout import get_rollout_class

MODULES = {
    rl_forward: dict(GROUPS=1, N=2, PROMPT=16, RESPONSE=4, VOCABULARY=32, REPETITIONS=1),
    rl_rollout: dict(PROMPTS=2, SAMPLES=2, PROMPT=4, RESPONSE=3, REPETITIONS=1,
                     LARGE=dict(width=64, layers=1, vocabulary=64), SMALL=dict(width=32, layers=1, vocabulary=64)),
    rl_whole_step: dict(PROMPTS=2, SAMPLES=2, STEPS=3, WARM_UP=1, TURNS=2),
}  # fmt: skip

def rows_of(module, monkeypatch):
    """The module's rows by name, at its small sizes."""
    for name, value in MODULES[module].items():
        assert hasattr(module, name)
        monkeypatch.setattr(module, name, value)
    rows = module.run()
    assert len({row.name for row in rows}) == len(rows) and all(row.low <= row.value <= row.high for row in rows)
    return {row.name: row for row in rows}


def wanted(*prefixes):
    """Names of `run.py` with a bound."""
    results = {name for name in WANTED if name.startswith(prefixes)}
    assert {prefix for prefix in prefixes if any(name.startswith(prefix) for name in results)} == set(prefixes)
    return results


def test_every_module_is_run_here():
    assert set(rl.MODULES) == set(MODULES)


def test_forwards(monkeypatch):
    rows = rows_of(rl_forward, monkeypatch)
    assert wanted("actor_") | {"rmpad_speedup", "rmpad_gradient_difference"} <= rows.keys()
    assert rows["actor_update_shared_gradient_difference"].value < 1e-4
    assert rows["rmpad_gradient_difference"].value < 1e-4


class StandIn(get_rollout_class("hf", "sync")):
    """For vLLM, whose end takes the process group with it."""

    def close(self):
        torch.distributed.destroy_process_group()


def test_rollouts(monkeypatch):
    monkeypatch.setattr(rl_rollout, "get_rollout_class", lambda name, mode: StandIn)
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")  # run() sets it for good
    monkeypatch.setenv("MASTER_PORT", "0")
    rows = rows_of(rl_rollout, monkeypatch)
    assert rows.keys() == {
        "weight_sync_seconds_per_gb", "hf_rollout_done_rows_leave", "vllm_vs_hf_rollout", "vllm_rollout"
    }  # fmt: skip
    assert not torch.distributed.is_initialized()


def run_of(command, log):
    """Leaves what the command of a trainer would, 3 steps of it: ours takes half of TRL's time."""
    steps = range(1, 4)
    if command[2] == "benchmarks.trl_steps":
        args = trl_steps.parse(command[3:])
        assert (args.folder, args.steps, args.prompts, args.samples) == (args.out.parent, 3, 2, 2)
        args.out.write_text(json.dumps({"seconds": [9.0, 4.0, 4.0], "tokens": [1.0, 60.0, 64.0]}))
        return
    config = trained_config(command)
    run = Path(config.trainer.default_local_dir)
    run.mkdir()
    rows = [{"step": 0, "data": {"val/x": 1.0}}]
    rows += [{"step": s, "data": {"timing_s/step": 2.0, "response_length/mean": 63.0}} for s in steps]
    (run / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    calls = [{"name": name, "ts": 1e6 * s, "dur": micros} for s in reversed(steps)
             for name, micros in (("generate_sequences", 1e6), ("update_actor", 5e5 + s), ("is_set", 9e6))]  # fmt: skip
    with open(config.ray_kwargs.timeline_json_file, "w") as file:
        json.dump(calls, file)


def test_whole_steps(monkeypatch):
    monkeypatch.setattr(rl_whole_step, "run_alone", run_of)
    rows = rows_of(rl_whole_step, monkeypatch)
    assert {"grpo_step_vs_trl_short", "grpo_step_vs_trl_long"} <= wanted("grpo_step_") & rows.keys()
    assert rows["grpo_step_vs_trl_long"].value == 2.0 and rows["grpo_step_trl_long"].repetitions == 2 * 2
    assert rows["grpo_answer_tokens_trl_long"].value == 62.0 and rows["grpo_answer_tokens_ours_long"].value == 63.0
    assert rows["driver_seconds_per_step"].value == pytest.approx(0.5, abs=1e-5)


def test_a_call_that_the_timeline_lost_is_said():
    lost = [{"name": "update_actor", "ts": 1.0, "dur": 1.0}]
    with pytest.raises(RuntimeError, match="1 calls of update_actor for 2 steps"):
        rl_whole_step.work_of_steps(lost, 2)


@pytest.mark.slow
def test_trl_steps_to_the_limit(tmp_path):
    pytest.importorskip("trl", reason="requirements/bench.txt")
    case = rl_whole_step.Case("short", 3, 4, True)
    rl_whole_step.make(tmp_path, case)
    sizes = ["--steps", 2, "--prompts", 2, "--samples", 2, "--limit", 4, "--to-the-limit"]
    out = tmp_path / "trl.json"
    rl_whole_step.run_alone(python("benchmarks.trl_steps", tmp_path, "--out", out, *sizes), tmp_path / "trl.log")
    results = rl_whole_step.Steps(**json.loads(out.read_text()))
    assert len(results.seconds) == 2 and results.tokens == [4.0, 4.0] and results.driver == []
