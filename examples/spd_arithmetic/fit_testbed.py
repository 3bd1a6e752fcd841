"""Measure settings of the test bed and rank them by how closely its mismatches resemble those of a real pair of models.

    python -m examples.spd_arithmetic.fit_testbed {--pair DIR | --wanted 0.71 0.64 0.64 0.60 4.7}
        [--softness 0.1 0.2] [--draft-softness 0.0 0.001] [--draft-house-share 0.965 0.975] [--target-steps 1000]
        [--draft-steps 300] [--seeds 0 1 2] [--out DIR]

Compares five numbers of the validation questions: of their labelled mismatches the share of harmless ones, and the
areas under the ROC curves of margin, probability and entropy (scripts.spd_evaluation.rules.STATISTICS); and the draft
tokens that exact match accepts of a block. No scorer is trained, no rule but exact match decodes, and no test question
is read. Every combination of the settings becomes a test bed in OUT; models that several of them use are trained once.
Ends with the combinations, means over the seeds, the closest one first: the largest of its five differences, each
divided by its tolerance, is the smallest. What was measured is kept in OUT/points.jsonl, so that further settings add
to it; delete OUT after a change of the code.
"""

import argparse
import itertools
import json
import shutil
import sys
from collections.abc import Mapping
from operator import itemgetter
from pathlib import Path
from statistics import mean
from typing import Any

from rich.console import Console
from rich.table import Table

from examples.demo_runner import ROOT, console, run_logged
from examples.spd_arithmetic.train_pair import DEFAULTS
from scripts.spd_evaluation import harm
from scripts.spd_evaluation.measures import harmless_share_and_auc
from scripts.spd_evaluation.rules import STATISTICS
from scripts.spd_evaluation.worker import load_model
from verl.utils.fs import output_folder

#: How far each number may be from the wanted one.
TOLERANCES = {"harmless": 0.07, "margin": 0.07, "probability": 0.07, "entropy": 0.07, "exact": 0.5}
#: Of a test bed that is only labelled: blocks of train questions are not used.
SIZES = ("--n-train-questions", 1, "--n-train-blocks", 0, "--drift-share", 0, "--n-val-questions", 600,
         "--n-val-blocks", 1200, "--n-test-questions", 1, "--n-harm-blocks", 1)  # fmt: skip
TABLE_WIDTH = 170  # a pipe counts as 80 columns wide, too narrow for the table


def numbers(folder: Path, dtype: str) -> dict[str, float]:
    """The numbers of TOLERANCES in a folder of prepare_blocks; ValueError without mismatches of both kinds."""
    target, draft = (load_model(str(folder / name), "cpu", dtype) for name in ("target", "draft"))
    blocks = harm.read_labels(folder / "harm_labels_val.jsonl")
    compared = {name: STATISTICS[name] for name in TOLERANCES if name in STATISTICS}
    record = json.loads((folder / "testbed.json").read_text())
    found = {"exact": record["figures"]["exact_accepted_per_forward"]}
    for name, labelled in harm.labelled_scores(compared, target, draft, blocks).items():
        share, area = harmless_share_and_auc(labelled)
        if area is None:
            text = f"{folder}: {share:.0%} of the labelled validation mismatches are harmless; both kinds are needed"
            raise ValueError(f"{text}. Prepare it with a larger --n-val-blocks, or from another pair.")
        found |= {"harmless": share, name: area}
    return {name: found[name] for name in TOLERANCES}


def distance(point: Mapping[str, float], wanted: Mapping[str, float]) -> float:
    """The largest of the differences, each divided by its tolerance."""
    return max(abs(point[name] - wanted[name]) / tolerance for name, tolerance in TOLERANCES.items())


def measure(settings: Mapping[str, float], out: Path, seed: int) -> dict[str, float]:
    """Make the test bed of these settings, and return its numbers; its blocks are not kept."""
    name = "_".join(f"{value:g}" for value in settings.values())
    bed = out / f"bed_{name}"
    options = [word for knob, value in settings.items() for word in (f"--{knob.replace('_', '-')}", f"{value:g}")]
    command = [sys.executable, "-m", "examples.spd_arithmetic.prepare_blocks", "--out", str(bed), "--seed", str(seed),
               "--dtype", "float32", *options, *map(str, SIZES)]  # fmt: skip
    run_logged(command, out / f"{name}_seed{seed}.log")
    found = numbers(bed, "float32")
    shutil.rmtree(bed)
    return found


def table_of(points: list[dict[str, Any]], wanted: Mapping[str, float]) -> Table:
    """A row for each combination, the mean over its seeds, the closest first, after the wanted numbers."""
    table = Table(*(knob.replace("_", " ") for knob in DEFAULTS), "seeds", *TOLERANCES, "largest difference")
    table.add_row(*[""] * (1 + len(DEFAULTS)), *(f"{wanted[name]:.2f}" for name in TOLERANCES), "wanted")
    rows = []
    for settings in {tuple(point["settings"].values()) for point in points}:
        of_these = [point for point in points if tuple(point["settings"].values()) == settings]
        found = {name: mean(point["numbers"][name] for point in of_these) for name in TOLERANCES}
        rows.append((distance(found, wanted), settings, sorted(point["seed"] for point in of_these), found))
    for gap, settings, seeds, found in sorted(rows, key=itemgetter(0)):
        close = " (close)" if gap <= 1 else ""
        table.add_row(*(f"{value:g}" for value in settings), " ".join(map(str, seeds)),
                      *(f"{found[name]:.2f}" for name in TOLERANCES), f"{gap:.2f}{close}")  # fmt: skip
    return table


def main(argv: list[str] | None = None) -> int:
    """Measure what was not measured before; returns the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    given = parser.add_mutually_exclusive_group(required=True)
    given.add_argument("--pair", type=Path, help="folder of prepare_blocks with the real pair's labelled mismatches")
    given.add_argument("--wanted", type=float, nargs=5, metavar=tuple(map(str.upper, TOLERANCES)))
    parser.add_argument("--dtype", default="float32", help="of the real pair's models")
    parser.add_argument("--out", type=output_folder, default=str(ROOT / "outputs" / "spd_fit"))
    parser.add_argument("--seeds", type=int, nargs="+", default=[0])
    for knob, default in DEFAULTS.items():
        parser.add_argument(f"--{knob.replace('_', '-')}", type=type(default), nargs="+", default=[default])
    args = parser.parse_args(argv)
    args.out.mkdir(parents=True, exist_ok=True)
    wanted = dict(zip(TOLERANCES, args.wanted, strict=True)) if args.wanted else numbers(args.pair, args.dtype)
    file = args.out / "points.jsonl"
    points = [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []
    points = [point for point in points if point["settings"].keys() == DEFAULTS.keys()
              and point["numbers"].keys() == TOLERANCES.keys()]  # fmt: skip
    for seed, *values in itertools.product(args.seeds, *(getattr(args, knob) for knob in DEFAULTS)):
        settings = dict(zip(DEFAULTS, values, strict=True))
        if any((point["settings"], point["seed"]) == (settings, seed) for point in points):
            continue
        console.print(f"seed {seed}, {settings}", highlight=False)
        points.append({"settings": settings, "seed": seed, "numbers": measure(settings, args.out, seed)})
        with open(file, "a") as kept:
            kept.write(json.dumps(points[-1]) + "\n")
    Console(width=max(console.width, TABLE_WIDTH)).print(table_of(points, wanted))
    return 0


if __name__ == "__main__":
    sys.exit(main())
