"""Conversations with tools, trained asynchronously and in turn, on the same two cores.

Both train the samples of benchmarks.agents' seeded plans: an asynchronous run with one trainer rank and one server of
one thread each, and synchronous runs with agent loops, of one and of two threads.
"""

import json
import os
import random
import shutil
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from benchmarks import agents
from benchmarks.harness import Row, ratios, remembered, row, say
from examples.demo_runner import ROOT, by_step

PROMPTS, EPOCHS, REPETITIONS = 16, 3, 5
FOLDER = ROOT / "outputs" / "benchmarks" / "async_speed"
SYNC, ASYNC = "verl.trainer.main_ppo", "recipe.fully_async_policy.fully_async_main"
THREADS = (1, 2)  # of the synchronous run
#: Of an asynchronous run with one rank that trains and one server.
POOLS = {
    "rollout.nnodes": 1, "rollout.n_gpus_per_node": 1, "rollout.n": 1, "rollout.test_freq": -1,
    "rollout.total_rollout_steps": "null", "async_training.staleness_threshold": 1,
    "async_training.trigger_parameter_sync_step": 1,
}  # fmt: skip
REWARD = """def compute_score(data_source, solution_str, ground_truth, extra_info=None):
    return len(solution_str.split()) % 5
"""


def make(folder: Path) -> Path:
    """The model, the conversations, the tool and the reward function, unless they exist."""
    if not (folder / "reward.py").exists():
        folder.mkdir(parents=True, exist_ok=True)
        agents.save_model(folder / "model")
        rows = [
            {
                "data_source": "plan", "prompt": [{"role": "user", "content": " ".join(plan.words)}],
                "agent_name": "tool_agent", "reward_model": {"style": "rule", "ground_truth": ""},
                "extra_info": {"index": i, "tools_kwargs": {"wait": {"create_kwargs": {"answers": plan.answers}}}},
            }
            for i, plan in enumerate(agents.plans())
        ]  # fmt: skip
        (folder / "rows.jsonl").write_text("".join(json.dumps(one) + "\n" for one in rows))
        tools = {"tools": [{"class_name": "benchmarks.agents.WaitTool", "config": {}}]}
        (folder / "tools.yaml").write_text(json.dumps(tools))
        (folder / "reward.py").write_text(REWARD)
    return folder


def settings_of(folder: Path, run: Path) -> dict[str, Any]:
    """What synchronous and asynchronous runs have in common."""
    rollout = "actor_rollout_ref.rollout"
    return {
        "trainer.device": "cpu", "trainer.nnodes": 1, "trainer.n_gpus_per_node": 1, "trainer.logger": "[]",
        "trainer.report": "false", "trainer.save_freq": 0, "trainer.test_freq": -1, "trainer.val_before_train": "false",
        "trainer.total_epochs": EPOCHS, "trainer.default_local_dir": run, "trainer.rollout_data_dir": run / "samples",
        "data.train_files": folder / "rows.jsonl", "data.val_files": folder / "rows.jsonl", "data.seed": 1,
        "data.train_batch_size": PROMPTS, "data.dataloader_num_workers": 0,
        "data.max_prompt_length": agents.PROMPT, "data.max_response_length": agents.RESPONSE,
        "algorithm.adv_estimator": "reinforce_plus_plus", "custom_reward_function.path": folder / "reward.py",
        "reward_model.num_workers": 0, "actor_rollout_ref.model.path": folder / "model",
        "actor_rollout_ref.actor.fsdp_config.dtype": "float32",
        "actor_rollout_ref.actor.optim.lr": 0,  # the samples stay those of the plans
        "actor_rollout_ref.actor.ppo_mini_batch_size": PROMPTS,
        "actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu": PROMPTS,
        "actor_rollout_ref.actor.use_rollout_log_probs": "true",
        f"{rollout}.name": "vllm", f"{rollout}.mode": "async", f"{rollout}.dtype": "float32", f"{rollout}.n": 1,
        f"{rollout}.max_num_seqs": agents.CONVERSATIONS, f"{rollout}.calculate_log_probs": "true",
        f"{rollout}.log_prob_micro_batch_size_per_gpu": PROMPTS,
        f"{rollout}.agent.num_workers": 1, f"{rollout}.multi_turn.journal_tool_calls": "false",
        f"{rollout}.multi_turn.tool_config_path": folder / "tools.yaml",
    }  # fmt: skip


def launch(module: str, settings: Mapping[str, Any], threads: int, run: Path) -> float:
    """Run `python -m MODULE key=value ...` from scratch on two cores; its seconds. RuntimeError if it fails."""
    shutil.rmtree(run, ignore_errors=True)
    run.mkdir(parents=True)
    cores = sorted(os.sched_getaffinity(0))[:2]
    command = [sys.executable, "-m", module, *(f"{key}={value}" for key, value in settings.items())]
    environment = {**os.environ, "OMP_NUM_THREADS": str(threads), "HF_HUB_OFFLINE": "1"}
    begun = time.monotonic()
    with open(run / "log.txt", "w") as log:
        done = subprocess.run(
            ["taskset", "--cpu-list", ",".join(map(str, cores)), *command], cwd=ROOT, env=environment, stdout=log,
            stderr=subprocess.STDOUT,
        )  # fmt: skip
    if done.returncode:
        raise RuntimeError(f"{module} ended with {done.returncode}:\n{(run / 'log.txt').read_text()[-3000:]}")
    return time.monotonic() - begun


def seconds_between_steps(run: Path, steps: int) -> float:
    """From the end of the first step, which warms up, to that of the last one."""
    first, last = ((run / "samples" / f"{step}.jsonl").stat().st_mtime for step in (1, steps))
    return last - first


def samples_of(run: Path) -> Counter[tuple[str, str]]:
    """The trained samples: (prompt, response)."""
    rows = (json.loads(line) for file in (run / "samples").glob("*.jsonl") for line in file.read_text().splitlines())
    return Counter((one["input"], one["output"]) for one in rows)


def idle_shares(run: Path) -> tuple[float, float]:
    """Shares of the time after the first step in which the trainer and the servers of an asynchronous run waited."""
    begin = (run / "samples" / "1.jsonl").stat().st_mtime
    seconds: dict[str, Counter[str]] = {"trainer": Counter(), "server": Counter()}
    for line in (run / "async_timeline.jsonl").read_text().splitlines():
        span = json.loads(line)
        spent = max(0.0, span["end"] - max(span["start"], begin))
        seconds["trainer" if span["who"] == "trainer" else "server"][span["what"]] += spent
    trainer, server = (spent["idle"] / spent.total() for spent in seconds.values())
    return trainer, server


def measure(kind: str, run: Path) -> dict[str, Any]:
    """One run: its seconds, idle shares of trainer and server, and a digest of the samples."""
    steps = EPOCHS * agents.CONVERSATIONS // PROMPTS
    settings = settings_of(make(FOLDER), run)
    if kind == "async":
        more = POOLS | {"data.train_batch_size": 0, "rollout.total_epochs": EPOCHS}
        whole = launch(ASYNC, settings | more, 1, run)
        trainer, server = idle_shares(run)
    else:
        whole = launch(SYNC, settings, int(kind.removeprefix("sync")), run)
        parts = [sum(list(by_step(run, f"timing_s/{name}").values())[1:]) for name in ("gen", "step")]
        trainer = parts[0] / parts[1]
        server = 1 - trainer
    seconds = seconds_between_steps(run, steps)
    say(f"{kind}: {seconds:.1f} s for {steps - 1} steps, {whole:.0f} s in all; idle: trainer {trainer:.0%}, "
        f"servers {server:.0%}")  # fmt: skip
    samples = sorted(samples_of(run).items())
    return {"seconds": seconds, "trainer": trainer, "server": server, "samples": samples}


def repetitions() -> Iterator[tuple[int, dict[str, dict[str, Any]]]]:
    """Every kind of run in turn, in an order that changes; runs of an earlier start are taken from their files."""
    kinds = ["async", *(f"sync{threads}" for threads in THREADS)]
    for number in range(REPETITIONS):
        measured = {}
        for kind in random.Random(number).sample(kinds, len(kinds)):
            run = FOLDER / f"{kind}_{number}"
            measured[kind] = remembered(FOLDER / f"{kind}_{number}.json", lambda kind=kind, run=run: measure(kind, run))
        yield number, measured


def run() -> list[Row]:
    """All rows; the speedup is against the synchronous run with the number of threads that is faster."""
    runs: dict[str, list[dict[str, Any]]] = {}
    for number, measured in repetitions():
        for kind, result in measured.items():
            runs.setdefault(kind, []).append(result)
            if result["samples"] != measured["async"]["samples"]:
                raise RuntimeError(f"repetition {number}: {kind} did not train the samples of the asynchronous run")
    seconds = {kind: [result["seconds"] for result in results] for kind, results in runs.items()}
    best = min((kind for kind in seconds if kind != "async"), key=lambda kind: sum(seconds[kind]))
    samples = sum(count for _, count in runs["async"][0]["samples"])
    return [
        row("async_speedup", ratios(seconds[best], seconds["async"]), f"times {best}, {samples} samples"),
        *(row(f"{kind}_seconds", values, "s without the first step") for kind, values in seconds.items()),
        *(row(f"{name}_{side}_idle", [result[side] for result in runs[kind]], "of the time")
          for name, kind in (("async", "async"), ("sync", best)) for side in ("trainer", "server")),
    ]  # fmt: skip
