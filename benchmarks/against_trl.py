"""Steps of a training command against those of TRL's GRPOTrainer: the same model, prompts, reward, type and threads.

Everything that has been measured is kept in the case's folder, so that a stopped command resumes; delete that folder to
measure again.
"""

import json
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from statistics import mean
from typing import Any

import pandas as pd

from benchmarks.harness import Row, commit, ratios, row, run_alone, say
from examples.demo_runner import python
from verl.utils.accelerator import default_dtype

TURNS, STEPS, WARM_UP = 2, 3, 1  # turns of each variant, steps of a turn, of which the first are left out
ACTOR, ROLLOUT = "actor_rollout_ref.actor", "actor_rollout_ref.rollout"


@dataclass(frozen=True)
class Case:
    """What is compared; all steps have the file's prompts in their order, and learning rate 0, so that the answers of
    all variants come from the same model.

    Attributes:
        prefix: of the rows' names.
        out: folder of what was measured; out/data has train.parquet.
        prompts, samples, limit: prompts of a step, answers to each, tokens of an answer.
        command: the training command of a folder, a number of steps and further settings.
        trl_rows: numbers of samples that TRL may forward at a time; the fastest one counts.
        reward: text of a Python file with compute_score(data_source, text, ground_truth), which gives TRL's reward.
        truth: of a row, what that function gets as ground_truth.
        temperature: of sampling.
    """

    prefix: str
    out: Path
    prompts: int
    samples: int
    limit: int
    command: Callable[[Path, int, tuple[str, ...]], list[str]]
    trl_rows: tuple[int, ...]
    reward: str
    truth: Callable[[dict[str, Any]], str]
    temperature: float = 1.0

    def kept(self, name: str, command: list[str], read: Callable[[], Any]) -> Any:
        """What `read` gives after the command has run, now or in an earlier run of the same command."""
        file = self.out / f"{name}.record.json"
        record = json.loads(file.read_text()) if file.exists() else {}
        if record.get("command") == command:
            say(f"{name}: measured before, tree {record['tree']} (delete {file} to measure it again)")
        else:
            shutil.rmtree(self.out / name, ignore_errors=True)  # a run would resume from what it holds
            run_alone(command, self.out / f"{name}.log")
            record = {"command": command, "value": read(), "tree": commit()}
            file.write_text(json.dumps(record) + "\n")
        return record["value"]

    def written(self, name: str, module: str, *arguments: Any) -> dict[str, Any]:
        """What a benchmark module that samples as this case does writes to its --out; RuntimeError if it fails."""
        out = self.out / f"{name}.json"
        options = {"out": out, "prompts": self.prompts, "samples": self.samples, "limit": self.limit,
                   "temperature": self.temperature, "dtype": default_dtype("cpu")}  # fmt: skip
        words = [part for key, value in options.items() for part in (f"--{key}", value)]
        return self.kept(name, python(module, *arguments, *words), lambda: json.loads(out.read_text()))

    def steps(self, name: str, settings: tuple[str, ...] = (), count: int = STEPS) -> list[dict[str, float]]:
        """Metrics of steps of the command with more settings; no validation, a checkpoint after the last step only."""
        file = self.out / name / "metrics.jsonl"
        command = self.command(file.parent, count, (
            f"data.train_batch_size={self.prompts}", "data.shuffle=false",
            f"{ACTOR}.ppo_mini_batch_size={self.prompts}", f"{ROLLOUT}.n={self.samples}",
            "trainer.val_before_train=false", "trainer.test_freq=-1", "trainer.save_freq=-1",
            "trainer.report=false", "trainer.logger=[]", *settings,
        ))  # fmt: skip

        def read() -> list[dict[str, float]]:
            rows = [json.loads(line)["data"] for line in file.read_text().splitlines()]
            return [metrics for metrics in rows if "timing_s/step" in metrics]

        return self.kept(name, command, read)

    def step(self, name: str) -> dict[str, float]:
        """Means of the steps after the first: `seconds`, and tokens of an answer."""
        rows = self.steps(name)[WARM_UP:]
        return {"seconds": mean(row["timing_s/step"] for row in rows),
                "tokens": mean(row["response_length/mean"] for row in rows)}  # fmt: skip

    def trl_step(self, name: str, rows: int, count: int) -> dict[str, float]:
        """A step of TRL's GRPOTrainer like `step`; the first of several is left out. RuntimeError if it fails."""
        taken = self.written(
            name, "benchmarks.trl_steps", self.out / "trl", "--chat", "--steps", count, "--rows", rows, "--lr", 0.0
        )
        return {key: mean(taken[key][min(WARM_UP, count - 1) :]) for key in ("seconds", "tokens")}

    def tried_step(self, rows: int) -> float:
        """Seconds of one step of TRL; inf where it fails, as with more rows than fit in memory."""
        try:
            return self.trl_step(f"trl_{rows}_rows", rows, 1)["seconds"]
        except RuntimeError as error:
            say(f"TRL with {rows} rows at a time: {str(error).splitlines()[0]}")
            return float("inf")

    def prepare_trl(self, model: Path) -> None:
        """out/trl: what benchmarks.trl_steps reads; the same questions and reward."""
        folder = self.out / "trl"
        folder.mkdir(exist_ok=True)
        rows = pd.read_parquet(self.out / "data" / "train.parquet")
        rows["reward_model"] = [{"ground_truth": self.truth(row)} for row in rows.to_dict("records")]
        rows.to_parquet(folder / "prompts.parquet")
        (folder / "reward.py").write_text(self.reward)
        if not (folder / "model").exists():
            (folder / "model").symlink_to(model)

    def in_turn(self, model: Path) -> list[Row]:
        """A step of ours, and one of TRL at its best number of rows."""
        self.prepare_trl(model)
        tried = {rows: self.tried_step(rows) for rows in self.trl_rows}
        say("TRL, seconds of a step by rows at a time: " + ", ".join(f"{rows}: {s:.1f}" for rows, s in tried.items()))
        best = min(tried, key=tried.get)
        if tried[best] == float("inf"):
            raise RuntimeError(
                f"TRL took no step with any of {self.trl_rows} rows at a time: see {self.out}/trl_*_rows.log."
            )
        works: dict[str, Callable[[str], dict[str, float]]] = {
            "ours": self.step,
            "trl": lambda name: self.trl_step(name, best, WARM_UP + 1),
        }
        taken: dict[str, list[dict[str, float]]] = {name: [] for name in works}
        for turn in range(TURNS):
            for name, work in works.items():
                taken[name].append(work(f"{name}_{turn}"))
                say(f"turn {turn}, {name}: {taken[name][-1]}")
        values = {name: [one["seconds"] for one in each] for name, each in taken.items()}
        times = f"times, TRL / ours, both {default_dtype('cpu')}"
        return [
            row(f"{self.prefix}_step_vs_trl", ratios(values["trl"], values["ours"]), times),
            row(f"{self.prefix}_step_ours", values["ours"], "s"),
            row(f"{self.prefix}_step_trl", values["trl"], f"s, {best} rows at a time"),
            *(row(f"{self.prefix}_tokens_{name}", [one["tokens"] for one in each], "tokens of an answer, mean")
              for name, each in taken.items()),
        ]  # fmt: skip

    def over_parts(self, model: Path) -> list[Row]:
        """A step of ours over the sum of its bare parts (benchmarks.bare_parts), and both parts over the bare ones."""
        ours = [step for turn in range(TURNS) for step in self.steps(f"ours_{turn}")[WARM_UP:]]
        bare = self.written("parts", "benchmarks.bare_parts", model, self.out / "data" / "train.parquet")
        bare["step"] = bare["generation"] + bare["update"]
        compared = {"step_over_parts": ("step", "step"), "generation_over_vllm": ("gen", "generation"),
                    "update_over_bare": ("update_actor", "update")}  # fmt: skip
        rows = []
        for name, (timer, part) in compared.items():
            # Both sample their answers, so that one may have longer ones.
            times = [step[f"timing_s/{timer}"] / step["response_length/mean"] * bare["answer_tokens"] / bare[part]
                     for step in ours]  # fmt: skip
            unit = f"times, ours / {bare[part]:.1f} s, per token of an answer"
            rows.append(row(f"{self.prefix}_{name}", times, unit))
        return rows
