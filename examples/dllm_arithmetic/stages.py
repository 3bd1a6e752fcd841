"""Runs the refinement's stages one after the other, each from the last one's model.

    python -m examples.dllm_arithmetic.stages --out DIR --seed N --steps N ...
"""

from __future__ import annotations

import argparse
import signal
import subprocess
import sys
from pathlib import Path

from examples.dllm_arithmetic.demo import stage_command, trained_model
from examples.running import ROOT


def main(argv: list[str] | None = None) -> int:
    """The exit code of the first stage that fails, else 0."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--seed", type=int, required=True)
    parser.add_argument("--steps", type=int, nargs="+", required=True)
    args = parser.parse_args(argv)
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))  # the stage at work ends too
    model = args.out / "base" / "model"
    for number, steps in enumerate(args.steps):
        run = args.out / f"stage{number}"
        child = subprocess.Popen(stage_command(number, model, args.out / "base", run, steps, args.seed), cwd=ROOT)
        try:
            code = child.wait()
        except SystemExit:
            child.terminate()
            child.wait()
            raise
        if code:
            return code
        model = trained_model(run)
    return 0


if __name__ == "__main__":
    sys.exit(main())
