"""Rows of steps against TRL's and against bare parts, from records as their processes write them.

Not covered: the processes (make bench).
"""

import json
from pathlib import Path

import pandas as pd

from benchmarks import against_trl
from benchmarks.against_trl import Case

STEP = {"timing_s/step": 30.0, "timing_s/gen": 6.0, "timing_s/update_actor": 20.0, "response_length/mean": 90.0}
REWARD = "def compute_score(data_source, text, ground_truth): ..."


def value_after(command: list[str], option: str) -> str:
    return command[command.index(option) + 1]


def test_the_fastest_trl_that_fits_and_both_parts(tmp_path, monkeypatch):
    def run_of(command: list[str], log: Path) -> None:
        if command[:1] == ["train"]:
            lines = [{"data": {**STEP, "timing_s/step": seconds}} for seconds in (99.0, 20.0, 40.0)]
            (tmp_path / command[1]).mkdir()
            (tmp_path / command[1] / "metrics.jsonl").write_text("\n".join(map(json.dumps, lines)))
        elif command[2] == "benchmarks.bare_parts":
            Path(value_after(command, "--out")).write_text('{"generation": 5.0, "update": 20.0, "answer_tokens": 45}')
        elif value_after(command, "--rows") == "16":
            raise RuntimeError("killed")
        else:
            seconds = [500.0, 120.0][: int(value_after(command, "--steps"))]
            taken = {"seconds": seconds, "tokens": [80.0] * len(seconds)}
            Path(value_after(command, "--out")).write_text(json.dumps(taken))

    def command(folder: Path, count: int, settings: tuple[str, ...]) -> list[str]:
        return ["train", folder.name, str(count), *settings]

    monkeypatch.setattr(against_trl, "run_alone", run_of)
    (tmp_path / "data").mkdir()
    pd.DataFrame({"prompt": ["q"], "answer": ["7"]}).to_parquet(tmp_path / "data" / "train.parquet")
    case = Case("x", tmp_path, 2, 4, 32, command, (8, 16), REWARD, lambda row: row["answer"])
    rows = {row.name: row for row in case.in_turn(tmp_path) + case.over_parts(tmp_path)}
    assert (rows["x_step_ours"].value, rows["x_step_trl"].value, rows["x_step_vs_trl"].value) == (30.0, 120.0, 4.0)
    assert rows["x_step_trl"].unit == "s, 8 rows at a time" and rows["x_step_trl"].repetitions == 2
    assert (rows["x_tokens_ours"].value, rows["x_tokens_trl"].value) == (90.0, 80.0)
    # 20 and 40 s over 25, for answers that are twice as long
    assert (rows["x_step_over_parts"].low, rows["x_step_over_parts"].high) == (0.4, 0.8)
    assert (rows["x_generation_over_vllm"].value, rows["x_update_over_bare"].value) == (0.6, 0.5)
    read = pd.read_parquet(tmp_path / "trl" / "prompts.parquet")["reward_model"]
    assert list(read) == [{"ground_truth": "7"}] and (tmp_path / "trl" / "reward.py").read_text() == REWARD
