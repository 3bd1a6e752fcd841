"""The scorer of the pretrained pair by the command of `make demo-pretrained-spd`, three seeds of the scorer."""

import json
from collections.abc import Mapping
from typing import Any

from benchmarks.harness import SEEDS, Row, mean_row, run_seeds
from examples.demo_runner import ROOT
from examples.pretrained.spd.gains import DROP

OUT = ROOT / "outputs" / "pretrained_spd"


def run() -> list[Row]:
    """The command, whose stages are kept, with GSM8K in its default folder, and the rows of what it measured."""
    gains = run_seeds("examples.pretrained.spd.demo", OUT, "gains.json")["seeds"]
    served = [json.loads((OUT / f"seed{seed}" / "served" / "served.json").read_text()) for seed in SEEDS]
    return [*gained(gains), *served_rows(served)]


def gained(seeds: Mapping[str, Mapping[str, Any]]) -> list[Row]:
    """Means over the seeds of gains.json; the unit has each seed's 95 % interval over test questions."""
    rows = []
    for name in ("spd_gain_over_best_rule", "spd_gain_over_exact"):
        intervals = ", ".join("{:.2f}-{:.2f}".format(*result[f"{name}_95"]) for result in seeds.values())
        questions = next(iter(seeds.values()))["questions"]
        unit = f"times, accepted draft tokens at a drop of {100 * DROP:g} points, {questions} questions; {intervals}"
        rows.append(mean_row(name, [result[name] for result in seeds.values()], unit))
    return rows


def served_rows(records: list[Mapping[str, Any]]) -> list[Row]:
    """Means over the records that examples.pretrained.spd.serve wrote, with drafts of the model; names end with the
    number of concurrent requests, except of one."""
    unit = f"times, tokens per second in vLLM, {records[0]['questions']} questions, {records[0]['dtype']}"
    of_model = [record["ratios"]["model"] for record in records]
    return [mean_row(name if count == "1" else f"{name}_{count}", [ratios[name][count] for ratios in of_model], unit)
            for name in of_model[0] for count in of_model[0][name]]  # fmt: skip
