"""A run with tools that is killed at random moments resumes to the same end, without repeating calls.

`python -m tests.agents.agent_loop.test_killed_tools_run 10` does so with ten kills.
"""

import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest

from tests.agents.agent_loop.parts import listed
from tests.agents.agent_loop.test_tool_agent_loop import CALL, TEMPLATE, WORDS
from tests.helpers.models import save_markov_llama
from tests.helpers.rl_run import metrics_rows, overrides
from tests.helpers.watched_runs import becomes
from verl.training.checkpoint.publish import TRACKER

STEPS = 4


def save_calling_llama(folder: Path, sharpness: float) -> str:
    """A model that answers a question by a call; the lower its sharpness, the more often by something else."""
    after = dict(zip(["=", *CALL], [*CALL, "<eos>"], strict=True)) | {"7": "so", "so": "<eos>"}
    return save_markov_llama(folder, [*WORDS, "="], after, TEMPLATE, sharpness=sharpness)


def command(folder: Path, model: str, tool_class: str = "LoggedTool") -> list[str]:
    folder.mkdir(parents=True, exist_ok=True)
    tools = {"enable": "true", "tool_config_path": listed(folder, "tools", tool_class, log=str(folder / "calls.log"))}
    tools = {f"multi_turn__{key}": value for key, value in tools.items()}
    return training(folder, model, agent__default_agent_loop="tool_agent", **tools)


def training(folder: Path, model: str, response_length: int = 16, **rollout) -> list[str]:
    """The command of a training with these keys of actor_rollout_ref.rollout."""
    rollout |= {"name": "vllm", "mode": "async", "dtype": "float32", "max_num_seqs": 64, "n": 4}
    keys = {f"actor_rollout_ref__rollout__{key}": value for key, value in rollout.items()}
    settings = overrides(
        folder, model, trainer__local="true", trainer__total_training_steps=STEPS, trainer__save_freq=2,
        trainer__resume_mode="auto", data__max_response_length=response_length, data__max_prompt_length=8,
        data__train_batch_size=4, actor_rollout_ref__actor__ppo_mini_batch_size=4, reward_model__num_workers=0, **keys,
    )  # fmt: skip
    return [sys.executable, "-m", "verl.trainer.main_ppo", *settings]


def start(folder: Path, model: str, make: Callable = command) -> subprocess.Popen:
    with open(folder.with_suffix(".log"), "a") as log:
        return subprocess.Popen(make(folder, model), stdout=log, stderr=subprocess.STDOUT, start_new_session=True)


def calls_of(folder: Path) -> list[str]:
    log = folder / "calls.log"
    return log.read_text().split() if log.exists() else []


def journalled(folder: Path, after: int) -> int:
    """Calls of steps beyond `after` whose results are on disk."""
    files = (folder / "out" / "tool_journal").glob("step_*-*.jsonl")
    return sum(f.read_text().count("\n") for f in files if int(f.name.split("-")[0].removeprefix("step_")) > after)


def outcome(folder: Path) -> dict:
    """Metrics of each step, the last of a repeated one; weights and optimizer of the last checkpoint."""
    rows = {row["step"]: row for row in metrics_rows(folder)}
    actor = folder / "out" / f"global_step_{STEPS}" / "actor"
    weights = {file.relative_to(actor): file.read_bytes() for file in actor.rglob("*.distcp")}
    assert len(weights) == 2  # of model and optimizer
    moment = ("agent_loop/prefix_hit_rate",)  # depends on which requests ran at the same time
    return {"weights": weights} | {n: {k: v for k, v in r.items() if k not in moment} for n, r in rows.items()}


def kill_and_resume(
    folder: Path, model: str, expected: dict, calls: int, calls_after: dict[int, int], rng: random.Random,
    make: Callable,
) -> str:  # fmt: skip
    """Kill a run within its calls of tools, at a random one, and start it again until it is finished.

    `calls_after`: an undisturbed run's calls beyond the step of a checkpoint, 0 for none.
    """
    moment = rng.randrange(1, 2 * calls)
    run = start(folder, model, make)
    while len(calls_of(folder)) < moment:
        assert run.poll() is None, folder.with_suffix(".log").read_text()[-3000:]
        time.sleep(0.01)
    os.killpg(run.pid, signal.SIGKILL)
    run.wait()
    assert becomes(lambda: not programs_of(folder))
    events = calls_of(folder)
    tracker = folder / "out" / TRACKER
    saved = int(tracker.read_text()) if tracker.is_file() else 0
    written, begun = journalled(folder, saved), events.count("begin") - (calls - calls_after[saved])
    run = start(folder, model, make)
    assert run.wait(300) == 0, folder.with_suffix(".log").read_text()[-3000:]
    differing = {k: (v, expected.get(k)) for k, v in outcome(folder).items() if v != expected.get(k)}
    assert not differing, {k: "weights" if k == "weights" else v for k, v in differing.items()}
    repeated = calls_of(folder).count("begin") - calls
    assert repeated == begun - written  # each call whose result was not on disk, and no other
    return f"killed after {len(events)} of {2 * calls} events, {repeated} calls without a result repeated, same end"


def programs_of(folder: Path) -> list[psutil.Process]:
    """The processes of programs that the run has started."""
    program = str(folder / "agent.py")
    return [process for process in psutil.process_iter(["cmdline"]) if program in (process.info["cmdline"] or ())]


def kills(root: Path, number: int, seed: int = 0, make: Callable = command, sharpness: float = 7.0) -> None:
    """`make(folder, model)`: the command of a run whose calls write begin and end to calls.log."""
    model = save_calling_llama(root / "model", sharpness)
    undisturbed = start(root / "undisturbed", model, make)
    assert undisturbed.wait(300) == 0, (root / "undisturbed.log").read_text()[-3000:]
    expected, calls = outcome(root / "undisturbed"), calls_of(root / "undisturbed").count("begin")
    assert calls >= 16 and any(row["actor/grad_norm"] > 0 for step, row in expected.items() if step != "weights")
    calls_after = {0: calls, 2: journalled(root / "undisturbed", 2), STEPS: 0}
    assert 0 < calls_after[2] < calls
    rng = random.Random(seed)
    for i in range(number):
        said = kill_and_resume(root / f"kill_{i}", model, expected, calls, calls_after, rng, make)
        print(f"kill {i + 1}: {said}", flush=True)


@pytest.mark.process
@pytest.mark.chaos
def test_a_killed_run_resumes_to_the_same_end_without_repeating_calls(tmp_path):
    kills(tmp_path, 2)


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        kills(Path(folder), int(sys.argv[1]) if len(sys.argv) > 1 else 10)
