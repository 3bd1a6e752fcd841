"""Stages of a long command: each is a command that runs once for its settings and those of the stages it reads."""

import argparse
import hashlib
import json
import os
import shlex
import shutil
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from examples.demo_runner import (
    ROOT,
    PhaseFailed,
    TrainingWatch,
    console,
    make_progress,
    out_folder,
    run_logged,
)
from examples.pretrained import fetch


@dataclass(frozen=True)
class Stage:
    """A command with what it writes; every setting that changes the result is in the command or in `given`.

    Commands resume by themselves what they have begun with the same settings.
    """

    name: str
    command: Sequence[str]
    result: Path  # file or folder, removed before a run with other settings
    reads: tuple["Stage", ...] = ()
    before: Callable[[], None] | None = None  # prepares the command's input; cheap, and the same each time
    given: str = ""  # the settings of `before` that are neither in the command nor in a stage that is read
    training: tuple[Path, int] | None = None  # folder of metrics and steps of a training, which has a progress bar

    @property
    def key(self) -> str:
        """Hash of the command and `given`, whatever the folders of the project and of the interpreter, and of the
        stages that it reads."""
        own = [shlex.join(map(str, self.command[self.command[0] == sys.executable :])), self.given]
        parts = [part.replace(str(ROOT), ".") for part in own if part] + [stage.key for stage in self.reads]
        return hashlib.sha256("\n".join(parts).encode()).hexdigest()[:16]


def record_of(stage: Stage, out: Path) -> dict[str, Any]:
    """What OUT/stages has of this stage with these settings: key, command, seconds and whether it has ended."""
    file = out / "stages" / f"{stage.name}.json"
    kept = json.loads(file.read_text()) if file.exists() else {}
    if kept.get("key") == stage.key:
        return kept
    return {"key": stage.key, "command": [str(part) for part in stage.command], "seconds": 0.0, "ended": False}


def has_other_settings(stage: Stage, out: Path) -> bool:
    """Whether OUT/stages has a record of this stage with other settings, whose result `run` would remove."""
    file = out / "stages" / f"{stage.name}.json"
    return file.exists() and json.loads(file.read_text())["key"] != stage.key


def refuse_other_settings(stage: Stage, out: Path) -> None:
    """Raise SystemExit if OUT has a result of this stage with other settings, such as that of another model, or one
    without a record, which may be that of another command."""
    file, advice = out / "stages" / f"{stage.name}.json", "Name another folder with --out (OUT=DIR of make)"
    if stage.result.exists() and not file.exists():
        raise SystemExit(f"{stage.result} exists, but was not made by this command. {advice}, or delete it.")
    if has_other_settings(stage, out):
        before = json.loads(file.read_text())["command"]
        new = [str(part) for part in stage.command[1:] if str(part) not in before]
        differs = f"now with {' '.join(new)}" if new else "now with other data, or after other stages"
        raise SystemExit(f"{file}: {stage.name} was made by another command ({differs}). {advice}, or delete {out}.")


def run(stage: Stage, out: Path, watch: Callable[[], None] | None = None) -> float:
    """Run a stage unless it ended with the same key; returns its seconds over all attempts.

    OUT/stages/NAME.json records key, command and time, and OUT/stages/NAME.log has the output. A stopped stage is run
    again and resumes from its own files; if its key has changed, they are removed first.
    """
    record, kept = out / "stages" / f"{stage.name}.json", record_of(stage, out)
    if kept["ended"]:
        console.print(f"{stage.name}: made before, in {kept['seconds']:.0f} s", highlight=False)
        return kept["seconds"]
    if not record.exists() or has_other_settings(stage, out):
        if stage.result.is_dir() and not stage.result.is_symlink():
            shutil.rmtree(stage.result)
        else:
            stage.result.unlink(missing_ok=True)
    console.print(f"[bold]{stage.name}[/bold]  {record.with_suffix('.log')}", highlight=False)
    record.parent.mkdir(parents=True, exist_ok=True)
    record.write_text(json.dumps(kept, indent=1))
    begun = time.monotonic()
    try:
        if stage.before is not None:
            stage.before()
        run_logged([str(part) for part in stage.command], record.with_suffix(".log"), watch,
                   {"OMP_NUM_THREADS": str(os.cpu_count()), **os.environ})  # fmt: skip
        kept["ended"] = True
    finally:
        kept["seconds"] += time.monotonic() - begun
        record.write_text(json.dumps(kept, indent=1))
    console.print(f"  took {kept['seconds']:.0f} s")
    return kept["seconds"]


def run_stages(stages: Sequence[Stage], out: Path, describe: Callable[[Mapping[str, float]], str]) -> bool:
    """Run the stages that have not ended; False, with the end of its log printed, if one fails.

    `describe` makes the text next to the progress bar of a training from its metrics.
    """
    try:
        for stage in stages:
            if stage.training is None or record_of(stage, out)["ended"]:
                run(stage, out)
                continue
            with make_progress() as progress:
                run(stage, out, TrainingWatch(progress, {stage.name: stage.training}, describe))
    except PhaseFailed as failure:
        console.print(str(failure), style="red", markup=False)  # a log may contain brackets
        return False
    return True


def options(doc: str, sizes: Any, out: Path, seeds_of: str) -> argparse.ArgumentParser:
    """The options that commands of stages share: `sizes` has the default of each size."""
    parser = argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0], help=f"of the {seeds_of}")
    parser.add_argument("--out", type=out_folder, default=str(out), help=f"default: {out.relative_to(ROOT)}")
    parser.add_argument("--until", help="the last stage to run")
    for name, value in vars(sizes).items():
        parser.add_argument(f"--{name.replace('_', '-')}", type=int, default=value, help=f"default: {value}")
    return parser


def run_and_report(
    stages: Sequence[Stage], last: str | None, out: Path, describe: Callable[[Mapping[str, float]], str],
    show: Callable[[], None], fetched: bool,
) -> int:  # fmt: skip
    """Run the stages up to the one named `last`, all without a name, then show the results, with a note on the weights
    of fetched models; returns the exit code. `describe`: see run_stages.

    Raises SystemExit if no stage has that name.
    """
    names = [stage.name for stage in stages]
    if last and last not in names:
        raise SystemExit(f"--until {last}: the stages are {', '.join(names)}")
    out.mkdir(parents=True, exist_ok=True)
    if not run_stages(stages[: names.index(last) + 1 if last else None], out, describe):
        return 1
    show()
    if fetched:
        console.print(f"The models: {fetch.NOTE}.")
    return 0
