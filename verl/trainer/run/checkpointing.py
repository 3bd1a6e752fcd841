"""The trainer's own part of a checkpoint: data position, counters, KL controller, random states of the driver."""

from __future__ import annotations

import io
import json
import os
import re
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from loguru import logger
from omegaconf import DictConfig

from verl.planning.problems import one_line
from verl.utils.checkpoint import rng
from verl.utils.checkpoint.publish import CheckpointCorruptError, find_valid_checkpoint, verify_manifest

STATE_FILE = "trainer_state.json"
DATA_FILE = "data.pt"
RNG_FILE = "driver_rng.pt"
STATE_FORMAT = 1


@dataclass
class TrainerState:
    """What trainer_state.json holds."""

    global_step: int
    position: dict[str, int]
    counters: dict[str, int]
    best: dict[str, Any]
    data: dict[str, Any]
    kl_controller: dict[str, float] = field(default_factory=dict)
    variant: dict[str, Any] = field(default_factory=dict)
    format: int = STATE_FORMAT


def write_trainer_state(directory: str | os.PathLike, state: TrainerState, loader_state: dict[str, Any]) -> None:
    """Write state, data position and the driver's random states into a checkpoint that is being built."""
    directory = Path(directory)
    _save_plain(loader_state, directory / DATA_FILE)
    _save_plain(rng.get_rng_state(), directory / RNG_FILE)
    (directory / STATE_FILE).write_text(json.dumps(asdict(state), indent=1) + "\n", encoding="utf-8")


def read_trainer_state(
    directory: str | os.PathLike, with_rng: bool = True
) -> tuple[TrainerState, dict[str, Any]]:
    """State and loader state of a checkpoint; the driver's random states are set as a side effect (`with_rng`)."""
    directory = Path(directory)
    raw = json.loads((directory / STATE_FILE).read_text(encoding="utf-8"))
    if raw["format"] != STATE_FORMAT:
        raise ValueError(
            f"{directory / STATE_FILE} has format {raw['format']}; this version reads {STATE_FORMAT}. "
            "Resume with the version that wrote it, or start anew with trainer.resume_mode=disable."
        )
    loader_state = _load_plain(directory / DATA_FILE)
    if with_rng:
        rng.load_rng_state(_load_plain(directory / RNG_FILE))
    return TrainerState(**raw), loader_state


def _save_plain(value: Any, file: Path) -> None:
    """By way of memory: torch's archive writer tells a full disk as a RuntimeError about positions."""
    archive = io.BytesIO()
    torch.save(value, archive)
    file.write_bytes(archive.getbuffer())


def _load_plain(file: Path) -> Any:
    """A file of tensors and plain values; anything else is not unpickled."""
    try:
        return torch.load(file, weights_only=True)
    except Exception as error:  # torn bytes make an unpickler raise almost anything
        raise CheckpointCorruptError(f"{file} is not loaded: {one_line(error)}") from error


def step_of(path: str | os.PathLike) -> int:
    """N of .../global_step_N."""
    found = re.fullmatch(r"global_step_(\d+)", Path(path).name)
    if found is None:
        raise ValueError(
            f"trainer.resume_from_path={os.fspath(path)!r} names no checkpoint; expected a folder 'global_step_<N>'."
        )
    return int(found.group(1))


def checkpoint_to_resume(trainer_config: DictConfig) -> Path | None:
    """The folder that `trainer.resume_mode` points to, its manifest checked; None: start from step 0."""
    mode = trainer_config.resume_mode
    if mode == "disable":
        return None
    if mode == "auto":
        found = find_valid_checkpoint(trainer_config.default_local_dir)
        return None if found is None else Path(found)
    if mode != "resume_path":
        raise ValueError(f"trainer.resume_mode={mode!r} is unknown. Known: auto, disable, resume_path.")
    if not trainer_config.resume_from_path:
        raise ValueError("trainer.resume_mode=resume_path needs trainer.resume_from_path: .../global_step_<N>.")
    path = Path(trainer_config.resume_from_path).expanduser().absolute()
    step_of(path)
    if not path.is_dir():
        raise FileNotFoundError(f"trainer.resume_from_path={str(path)!r} does not exist.")
    verify_manifest(path)
    return path


def check_same_data(saved: dict[str, Any], present: dict[str, Any], allow_change: bool) -> bool:
    """True when the data are those of the checkpoint. Changed data are refused, unless allowed (then False)."""
    if saved == present:
        return True
    changes = [f"{key}: {saved[key]} -> {present[key]}" for key in saved if saved[key] != present[key]]
    text = f"data.train_files changed since the checkpoint was written ({'; '.join(changes)})"
    if not allow_change:
        raise ValueError(
            f"{text}; its data position means nothing there. Put the old files back, or set "
            "trainer.allow_data_change=true to begin the changed data at its first batch."
        )
    logger.warning(f"{text}; trainer.allow_data_change=true: the changed data begins at its first batch")
    return False
