"""The starts of a run: one config and one entry each, so that a resume can say what has changed since."""

import json
import shlex
import sys
from collections.abc import Collection, Mapping
from datetime import datetime
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any, NamedTuple

from omegaconf import OmegaConf

from verl.config.compose import leaves
from verl.utils.jsonl import read_objects
from verl.utils.redact import redact_command, redacted_yaml

STARTS_FILE = "starts.jsonl"
OPTIMIZER = "optimizer state"
# Settings that a checkpoint restores: pattern of a key -> where the value in use comes from, None for the setting.
RESTORED: dict[str, str | None] = {
    "*optim.lr": OPTIMIZER, "*optim.betas": OPTIMIZER, "*optim.weight_decay": OPTIMIZER,
    "*optim.override_optimizer_config*": OPTIMIZER, "*rollout.seed": None, "*seed": "random states",
    "data.shuffle": "position in the data",
}  # fmt: skip


class Origin(NamedTuple):
    """What a start continues."""

    continues: bool = True  # the files of the run's folder are those of the run up to the checkpoint
    leaves: bool = False  # it begins anew, or at an earlier step than the newest checkpoint of the folder
    start: int | None = None  # number of the start that wrote the checkpoint; 0: in another folder, None: not known


class Starts:
    """starts.jsonl and run_configs/ of a run folder; `run_config.yaml` is the config of the newest start."""

    def __init__(self, run_dir: Path) -> None:
        self.run_dir = run_dir
        self.path = run_dir / STARTS_FILE
        self.number = 0  # of this start; 0 until `begin`

    def begin(self, config: Mapping[str, Any], step: int, total_steps: int, writer: int | None = None) -> list[str]:
        """Enter a start from a checkpoint of `step` (0: from the beginning) that the start `writer` wrote.

        Returns a line for each setting that differs from that start (None: the last one before `step`).
        """
        earlier = [row for row in self.read() if "config" in row]
        self.number = len(earlier) + 1
        file = f"run_configs/{self.number}.yaml"
        (self.run_dir / "run_configs").mkdir(exist_ok=True)
        for name in ("run_config.yaml", file):
            (self.run_dir / name).write_text(redacted_yaml(config), encoding="utf-8")
        command = shlex.join(redact_command([Path(sys.executable).name, *sys.orig_argv[1:]]))
        last = None  # the start that is continued
        for row in earlier:
            if row["start"] == writer or (writer is None and row["step"] < step):
                last = row
        lines, in_force = [], {}
        if step and last is not None and (self.run_dir / last["config"]).is_file():
            old, new = OmegaConf.load(self.run_dir / last["config"]), OmegaConf.load(self.run_dir / file)
            words = shlex.split(f"{last['command']} {command}")
            given = [word.lstrip("+").partition("=")[0] for word in words if "=" in word]
            lines, in_force = changed_settings(old, new, last.get("in_force", {}), given)
        self._append(
            start=self.number, step=step, total_steps=total_steps, command=command, config=file, in_force=in_force
        )
        return lines

    def end(self, step: int, how: str) -> None:
        """Enter how this start ended, after `step`."""
        if self.number:
            self._append(start=self.number, step=step, ended=how)

    def read(self) -> list[dict[str, Any]]:
        """Rows of starts (with `config`) and of ends (with `ended`), oldest first."""
        return [row for _, row in read_objects(self.path, growing=True)] if self.path.exists() else []

    def _append(self, **row: Any) -> None:
        row["time"] = datetime.now().isoformat(timespec="seconds")
        with open(self.path, "a", encoding="utf-8") as file:
            file.write(json.dumps(row, default=OmegaConf.to_container) + "\n")


def changed_settings(
    old: Mapping[str, Any], new: Mapping[str, Any], in_force: Mapping[str, Any], given: Collection[str] = ()
) -> tuple[list[str], dict[str, Any]]:
    """A line `key: old -> new (effect)` for each setting that differs, and the old values that remain in use, by key.

    `in_force` are such values at the time of `old`. Settings with the same change as one of those `given` in the
    commands, which mostly are derived from it, are in its line.
    """
    before = {key: value for key, value in leaves(old) if value != {}} | in_force  # {}: an empty section
    after = {key: value for key, value in leaves(new) if value != {}}
    changes, kept = {}, {}
    for key in sorted(before.keys() | after.keys()):
        if before.get(key) == after.get(key) or key.startswith(("trainer.resume_", "trainer.dry_run")):
            continue
        effect = _restored_by_checkpoint(key, after)
        if effect is not None:
            kept[key] = before.get(key)
        values = ("null" if value is None else str(value) for value in (before.get(key), after.get(key)))
        changes[key] = f"{' -> '.join(values)} ({effect or 'applied'})"
    leading = {changes[key] for key in given if key in changes}
    followers = {text: [key for key in changes if changes[key] == text and key not in given] for text in leading}
    lines = []
    for key, text in changes.items():
        if key in given or text not in leading:
            also = followers.pop(text, [])
            lines.append(f"{key}: {text}" + (f", also {', '.join(also)}" if also else ""))
    return lines, kept


def _restored_by_checkpoint(key: str, after: Mapping[str, Any]) -> str | None:
    """Why a changed setting has no effect in a resumed run: "not applied: ..."; None where it has one."""
    source = next((source for pattern, source in RESTORED.items() if fnmatchcase(key, pattern)), None)
    if source == OPTIMIZER:
        contents = f"{key.rpartition('optim.')[0] or 'trainer.'}checkpoint.load_contents"
        if "optimizer" not in after.get(contents, ["optimizer"]):
            return None
        source += f"; {contents}=[model] starts a new one"
    return source and f"not applied: the checkpoint restores its {source}"
