"""A demo repeated on several seeds, by the command that a user types; a seed measured before is not run again."""

import json
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

from benchmarks.harness import commit, say
from examples.demo_runner import ROOT

SEEDS = (0, 1, 2)


def demo_runs(module: str, name: str) -> Iterator[tuple[int, Path, float]]:
    """Run `python -m MODULE` on each seed: gives the seed, the folder of its results and the seconds it took.

    A seed whose folder holds measured.json (seconds, tree) is taken from there, which is logged.
    """
    for seed in SEEDS:
        out = ROOT / "outputs" / "benchmarks" / f"{name}{seed}"
        kept = out / "measured.json"
        if kept.exists():
            measured = json.loads(kept.read_text())
            say(f"seed {seed}: measured before, tree {measured['tree']} (delete {out} to measure it again)")
        else:
            begun = time.monotonic()
            subprocess.run([sys.executable, "-m", module, "--seed", str(seed), "--out", str(out)], cwd=ROOT, check=True)
            measured = {"seconds": time.monotonic() - begun, "tree": commit()}
            kept.write_text(json.dumps(measured) + "\n")
        yield seed, out, measured["seconds"]
