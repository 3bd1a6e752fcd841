"""Runs the benchmarks and writes benchmarks/results/*.json: `python -m benchmarks.run [name ...]`."""

from __future__ import annotations

import importlib
import sys

from benchmarks.harness import save

NAMES = ("spd", "dataproto")


def main(names: list[str]) -> int:
    """Run the named benchmarks, all by default; gives the exit code."""
    if unknown := sorted(set(names) - set(NAMES)):
        sys.stderr.write(f"no benchmark {', '.join(unknown)}; known: {', '.join(NAMES)}\n")
        return 2
    for name in names or NAMES:
        save(name, importlib.import_module(f"benchmarks.{name}").run())
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
