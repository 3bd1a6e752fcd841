"""GRPO of SmolLM2-135M-Instruct: the demo on three seeds, its steps against TRL's, and the log-probs of rollout and
trainer.

Everything that has been measured is kept in outputs/benchmarks/pretrained, so that a stopped command resumes; delete
that folder to measure again. Steps are those of the demo with 8 samples of each of 8 prompts, all of the same prompts,
and with learning rate 0, so that the answers of all variants come from the same model.
"""

from __future__ import annotations

import json
import shutil
import time
from collections.abc import Callable
from pathlib import Path
from statistics import mean
from typing import Any

import pandas as pd
import torch

from benchmarks.harness import Row, commit, mean_row, ratios, row, run_alone, run_seeds, say
from examples.demo_runner import ROOT, python
from examples.pretrained import demo, fetch, questions
from verl.utils.accelerator import default_dtype

OUT = ROOT / "outputs" / "benchmarks" / "pretrained"
PROMPTS, SAMPLES, LIMIT = 8, 8, 32
TURNS, STEPS, WARM_UP = 2, 3, 1  # turns of each variant, steps of a turn, of which the first are left out
TRL_ROWS = (16, 32)  # that TRL forwards at a time
ACTOR, ROLLOUT = "actor_rollout_ref.actor", "actor_rollout_ref.rollout"
REWARD = """from examples.pretrained.reward import compute_score as score


def compute_score(data_source, solution_str, ground_truth, extra_info=None):
    return score({source!r}, solution_str, "", {{"entry": ground_truth}})["score"]
"""


def kept(name: str, command: list[str], read: Callable[[], Any]) -> Any:
    """What `read` gives after the command has run, now or in an earlier run of the same command."""
    file = OUT / f"{name}.record.json"
    record = json.loads(file.read_text()) if file.exists() else {}
    if record.get("command") == command:
        say(f"{name}: measured before, tree {record['tree']} (delete {file} to measure it again)")
    else:
        shutil.rmtree(OUT / name, ignore_errors=True)  # a run would resume from what it holds
        run_alone(command, OUT / f"{name}.log")
        record = {"command": command, "value": read(), "tree": commit()}
        file.write_text(json.dumps(record) + "\n")
    return record["value"]


def steps(name: str, model: Path, settings: tuple[str, ...] = (), count: int = STEPS) -> list[dict[str, float]]:
    """Metrics of steps of the demo's command with more settings: the file's prompts in their order, learning rate 0, no
    validation, a checkpoint after the last step only."""
    file = OUT / name / "metrics.jsonl"
    command = demo.training_command(
        model, demo.from_files(OUT / "data"), file.parent, count, 0, f"data.train_batch_size={PROMPTS}",
        "data.shuffle=false",
        f"{ACTOR}.ppo_mini_batch_size={PROMPTS}", f"{ROLLOUT}.n={SAMPLES}",
        "trainer.val_before_train=false", "trainer.test_freq=-1", "trainer.save_freq=-1",
        "trainer.report=false", "trainer.logger=[]", *settings, lr=0.0,
    )  # fmt: skip

    def read() -> list[dict[str, float]]:
        rows = [json.loads(line)["data"] for line in file.read_text().splitlines()]
        return [metrics for metrics in rows if "timing_s/step" in metrics]

    return kept(name, command, read)


def step(name: str, model: Path) -> dict[str, float]:
    """Means of the steps after the first: `seconds`, and tokens of an answer."""
    rows = steps(name, model)[WARM_UP:]
    return {"seconds": mean(row["timing_s/step"] for row in rows),
            "tokens": mean(row["response_length/mean"] for row in rows)}  # fmt: skip


def gain() -> list[Row]:
    """The demo on three seeds."""
    return gained(run_seeds("examples.pretrained.demo", OUT / "demo"))


def gained(result: dict[str, Any]) -> list[Row]:
    """Rows of the demo's result.json."""
    *trained, control = (list(accuracies.values()) for accuracies in result["accuracy"].values())
    return [
        mean_row("grpo_gain_points", result["gains"], f"points on {questions.VALIDATION_SIZE} held-out items, mean"),
        row("grpo_gain_start", [values[0] for values in trained], "% right"),
        row("grpo_gain_end", [values[-1] for values in trained], "% right"),
        row("grpo_gain_control", [abs(control[-1] - control[0])], "points that accuracy moves at learning rate 0"),
        Row("grpo_gain_seconds", max(result["seconds"]), "s, longest run", min(result["seconds"]),
            max(result["seconds"]), len(result["seconds"])),
    ]  # fmt: skip


def trl_step(name: str, rows: int, dtype: str, count: int) -> dict[str, float]:
    """A step of TRL's GRPOTrainer like `step`; the first of several is left out. RuntimeError if it fails."""
    out = OUT / f"{name}.json"
    options = {"out": out, "steps": count, "prompts": PROMPTS, "samples": SAMPLES, "limit": LIMIT, "rows": rows,
               "dtype": dtype, "lr": 0.0}  # fmt: skip
    words = [part for key, value in options.items() for part in (f"--{key}", value)]
    command = python("benchmarks.trl_steps", OUT / "trl", "--chat", *words)
    taken = kept(name, command, lambda: json.loads(out.read_text()))
    return {key: mean(taken[key][min(WARM_UP, count - 1) :]) for key in ("seconds", "tokens")}


def tried_step(rows: int, dtype: str) -> float:
    """Seconds of one step of TRL; inf where it fails, as with more rows than fit in memory."""
    try:
        return trl_step(f"trl_{rows}_rows", rows, dtype, 1)["seconds"]
    except RuntimeError as error:
        say(f"TRL with {rows} rows at a time: {str(error).splitlines()[0]}")
        return float("inf")


def prepare_trl(model: Path) -> None:
    """OUT/trl: what benchmarks.trl_steps reads; the same questions and reward."""
    folder = OUT / "trl"
    folder.mkdir(exist_ok=True)
    rows = pd.read_parquet(OUT / "data" / "train.parquet")
    rows["reward_model"] = [{"ground_truth": extra["entry"]} for extra in rows["extra_info"]]
    rows.to_parquet(folder / "prompts.parquet")
    (folder / "reward.py").write_text(REWARD.format(source=questions.DATA_SOURCE))
    if not (folder / "model").exists():
        (folder / "model").symlink_to(model)


def in_turn(model: Path) -> list[Row]:
    """A step of ours, and one of TRL at its best number of rows."""
    dtype = default_dtype("cpu")
    prepare_trl(model)
    tried = {rows: tried_step(rows, dtype) for rows in TRL_ROWS}
    say("TRL, seconds of a step by rows at a time: " + ", ".join(f"{rows}: {s:.1f}" for rows, s in tried.items()))
    best = min(tried, key=tried.get)
    if tried[best] == float("inf"):
        raise RuntimeError(f"TRL took no step with any of {TRL_ROWS} rows at a time: see {OUT}/trl_*_rows.log.")
    works: dict[str, Callable[[str], dict[str, float]]] = {
        "ours": lambda name: step(name, model),
        "trl": lambda name: trl_step(name, best, dtype, WARM_UP + 1),
    }
    taken: dict[str, list[dict[str, float]]] = {name: [] for name in works}
    for turn in range(TURNS):
        for name, work in works.items():
            taken[name].append(work(f"{name}_{turn}"))
            say(f"turn {turn}, {name}: {taken[name][-1]}")
    values = {name: [one["seconds"] for one in each] for name, each in taken.items()}
    return [
        row("grpo_step_vs_trl", ratios(values["trl"], values["ours"]), f"times, TRL / ours, both {dtype}"),
        row("grpo_step_ours", values["ours"], "s"),
        row("grpo_step_trl", values["trl"], f"s, {best} rows at a time"),
        *(row(f"grpo_tokens_{name}", [one["tokens"] for one in each], "tokens of an answer, mean")
          for name, each in taken.items()),
    ]  # fmt: skip


def mismatch(model: Path) -> list[Row]:
    """Rollout against trainer at the first step, in both types."""
    rows = []
    for dtype in ("bfloat16", "float32"):
        settings = (f"{ROLLOUT}.dtype={dtype}", f"{ACTOR}.fsdp_config.dtype={dtype}",
                    f"{ROLLOUT}.calculate_log_probs=true")  # fmt: skip
        first = steps(f"first_{dtype}", model, settings, count=1)[0]
        for name, key in (("kl", "rollout_corr/kl"), ("pearson", "training/rollout_actor_probs_pearson_corr")):
            rows.append(row(f"first_step_{name}_{dtype}", [first[key]], "rollout and trainer, vLLM"))
    return rows


def run() -> list[Row]:
    """All rows."""
    OUT.mkdir(parents=True, exist_ok=True)
    model = fetch.main([])
    questions.write(OUT / "data", seed=0)
    begun = time.monotonic()
    rows = [part for work in (mismatch, in_turn) for part in work(model)]
    say(f"{torch.get_num_threads()} threads, {default_dtype('cpu')} by default, {time.monotonic() - begun:.0f} s")
    return gain() + rows
