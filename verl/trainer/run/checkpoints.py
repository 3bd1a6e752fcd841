"""Checkpoints of a run: models, data position, counters, KL controller, random states; saved, rotated, resumed from."""

import io
import json
import os
import subprocess
import sys
import time
from collections.abc import Mapping
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from loguru import logger

from verl.config.common import RunConfig
from verl.trainer.run.prompt_stream import PromptStream
from verl.trainer.run.ranks import from_first_rank, is_first_rank
from verl.trainer.run.starts import Origin
from verl.training.checkpoint import rng, should_save_ckpt_esi
from verl.training.checkpoint.publish import (
    OTHERS,
    TRACKER,
    CheckpointCorruptError,
    CheckpointWriter,
    begin_run,
    continued_steps,
    find_valid_checkpoint,
    steps_of_run,
    verify_manifest,
)
from verl.utils.distributed import host_barrier
from verl.utils.fs import copy_into
from verl.utils.problems import one_line

STATE_FILE = "trainer_state.json"
DATA_FILE = "data.pt"
RNG_FILE = "driver_rng.pt"
STATE_FORMAT = 1


@dataclass
class TrainerState:
    """Contents of trainer_state.json."""

    global_step: int
    position: dict[str, int]
    counters: dict[str, int]
    best: dict[str, Any]
    data: dict[str, Any]
    kl_controller: dict[str, float] = field(default_factory=dict)
    variant: dict[str, Any] = field(default_factory=dict)
    start: int | None = None  # number of the start that wrote it
    format: int = STATE_FORMAT


class Checkpoints:
    """The checkpoints of one run: published complete or not at all, rotated, and resumed from.

    `parts`: subfolder of the checkpoint ("" is the checkpoint itself) -> the engine or worker group that saves itself
    there by `save_checkpoint` and loads itself by `load_checkpoint`.
    `fingerprint` identifies the training data; a resume refuses other data unless `trainer.allow_data_change` is set.
    Where a process group exists, every rank calls each method and rank 0 publishes; random states of other ranks are
    then the engine's own (`restores_rng=False`).
    """

    def __init__(
        self, trainer: RunConfig, parts: Mapping[str, Any], stream: PromptStream, fingerprint: dict[str, Any],
        max_to_keep: int | None, restores_rng: bool = True, delete_after_load: bool = False,
    ) -> None:
        self.trainer, self.parts, self.stream, self.fingerprint = trainer, parts, stream, fingerprint
        self.max_to_keep = max_to_keep
        self.restores_rng = restores_rng
        self.delete_after_load = delete_after_load
        self.saved_step: int | None = None
        self.origin = Origin()  # set by `resume`
        self.pending: tuple[int, ExitStack] | None = None  # step and writer of a save that is not published yet
        self.publishing: Future | None = None  # of the pending save, once its files are written
        self.publisher = ThreadPoolExecutor(1)
        sizes = {os.environ[n] for n in ("LOCAL_WORLD_SIZE", "WORLD_SIZE") if n in os.environ}  # equal on a single node
        if trainer.save_freq != 0 and (trainer.nnodes > 1 or len(sizes) > 1):
            self._refuse_separate_folders()

    def _refuse_separate_folders(self) -> None:
        """Raise, before anything is trained, if some node does not see what another writes into the run's folder."""
        root = Path(self.trainer.default_local_dir)
        mark = root / ".seen_by_all_nodes"
        if is_first_rank():
            root.mkdir(parents=True, exist_ok=True)
            mark.touch()
        host_barrier()
        try:
            answers = [answer for part in self.parts.values() for answer in part.nodes_that_see(str(mark))]
        finally:
            host_barrier()
            if is_first_rank():
                mark.unlink(missing_ok=True)
        # An engine answers with a pair, a group with a list of those of each worker.
        seen = [pair for answer in answers for pair in (answer if isinstance(answer, list) else [answer])]
        if blind := sorted({node for node, sees in seen if not sees}):
            raise ValueError(
                f"trainer.default_local_dir={str(root)!r} is not the same folder on every node: {', '.join(blind)} "
                "cannot see a file that was just written there. Name a folder of a shared file system."
            )

    def is_due(self, step: int, last: bool, step_seconds: float = 0.0) -> bool:
        """By save_freq (0: never), or because a rented instance expires before another step of that length is done."""
        every = self.trainer.save_freq
        spare = self.trainer.esi_redundant_time if "esi_redundant_time" in self.trainer else 0
        expires = should_save_ckpt_esi(step_seconds, redundant_time=spare)
        return every != 0 and (last or expires or (every > 0 and step % every == 0))

    def save(self, step: int, **state: Any) -> None:
        """Publish global_step_<step>; `state`: counters, best, kl_controller, variant and start of TrainerState.

        Where a part writes in the background (checkpoint.async_save), a later `advance` or `complete` publishes it.
        """
        self.complete()
        writer = CheckpointWriter(self.trainer.default_local_dir, step, self.max_to_keep)
        with ExitStack() as stack:
            if is_first_rank():
                stack.enter_context(writer)
            host_barrier()
            for name, part in self.parts.items():
                part.save_checkpoint(str(writer.path / name), None, step, None)
            if is_first_rank():
                position = self.stream.position()
                saved = TrainerState(global_step=step, position=position, data=self.fingerprint, **state)
                write_trainer_state(writer.path, saved, self.stream.loader_state())
            host_barrier()
            self.pending = step, stack.pop_all()
        if self._is_written():
            self.complete()

    def advance(self) -> None:
        """Publish, in a thread, a checkpoint whose files are written by now; call it between steps."""
        if self.pending is None:
            return
        step, writer = self.pending
        if self.publishing is None and self._is_written():
            self.publishing = self.publisher.submit(self._publish, step, writer)  # hashes all files
        if self.publishing is not None and self.publishing.done():
            publishing = self.publishing
            self.publishing = self.pending = None
            publishing.result()
            self.saved_step = step

    def _publish(self, step: int, writer: ExitStack) -> None:
        """Publish a checkpoint, and copy it with the tracker file to trainer.default_hdfs_dir, if that is set."""
        writer.close()
        root, remote = Path(self.trainer.default_local_dir), self.trainer.default_hdfs_dir
        if remote is None or not is_first_rank():
            return
        names = (f"global_step_{step}", OTHERS, TRACKER)
        try:
            copy_into([root / name for name in names if (root / name).exists()], remote)
        except (OSError, subprocess.CalledProcessError) as error:
            what = f"trainer.default_hdfs_dir={remote}: global_step_{step} could not be copied there"
            raise RuntimeError(f"{what} ({one_line(error)}); it is complete in {root}.") from error

    def complete(self) -> None:
        """Publish what is being written, and wait for it."""
        while self.pending is not None:
            self.advance()
            if self.publishing is not None:
                wait([self.publishing])
            elif self.pending is not None:
                time.sleep(0.05)
        host_barrier()

    def _is_written(self) -> bool:
        """Whether all parts have written their files; raises, and removes the folder, if one could not."""
        try:
            parts = [part for part in self.parts.values() if hasattr(part, "save_is_finished")]
            return all(np.all(part.save_is_finished()) for part in parts)
        except BaseException:
            _, writer = self.pending
            self.pending = None
            writer.__exit__(*sys.exc_info())
            raise

    def resume(self) -> tuple[TrainerState, bool] | None:
        """Load the checkpoint that `trainer.resume_mode` names, data position included; None: start from step 0.

        Returns its state and whether the training data are unchanged.
        """
        path = from_first_rank(lambda: checkpoint_to_resume(self.trainer))
        resumed = None if path is None else self._load(path)
        self.origin = from_first_rank(lambda: self._begin(path, None if resumed is None else resumed[0].start))
        return resumed

    def _begin(self, path: Path | None, start: int | None) -> Origin:
        """Make this run the folder's, whose checkpoints are rotated and resumed from; log the steps that others left.

        `path` is the checkpoint that it resumes, which the start of number `start` wrote.
        """
        root = Path(self.trainer.default_local_dir)
        steps_before, steps_continued = steps_of_run(root), continued_steps(root, path)
        continues = bool(steps_continued) and steps_continued[-1] in steps_before
        if not steps_continued:
            start = 0  # numbers of starts count in their own folder only
        if "val_only" in self.trainer and self.trainer.val_only:  # it saves nothing
            return Origin(continues, start=start)
        others = begin_run(root, path)
        if others:
            names = ", ".join(f"global_step_{step}" for step in others[:5])
            names += f" and {len(others) - 5} more" if len(others) > 5 else ""
            logger.warning(
                f"{root} has {names} of another run, or of later steps that this run left. This run does not resume "
                "from them and does not rotate them out; it replaces one when it saves the same step. To continue one, "
                "set trainer.resume_mode=resume_path and trainer.resume_from_path."
            )
        leaves = self.trainer.resume_mode == "disable" or not set(steps_before).isdisjoint(others)
        return Origin(continues, leaves, start)

    def _load(self, path: Path) -> tuple[TrainerState, bool]:
        logger.info(f"resuming from {path}")
        state, loader_state = read_trainer_state(path, with_rng=self.restores_rng)
        same_data = check_same_data(state.data, self.fingerprint, self.trainer.allow_data_change)
        if same_data:
            self.stream.resume(state.position, loader_state)
        else:
            self.stream.restart(state.position)
        for name, part in self.parts.items():
            part.load_checkpoint(str(path / name), None, self.delete_after_load)
        self.saved_step = state.global_step
        return state, same_data


def write_trainer_state(directory: Path, state: TrainerState, loader_state: dict[str, Any]) -> None:
    """Write state, data position and the driver's random states into a checkpoint that is being built.

    The tensors go through memory: on a full disk torch's archive writer raises a RuntimeError about positions.
    """
    for value, name in ((loader_state, DATA_FILE), (rng.get_rng_state(), RNG_FILE)):
        archive = io.BytesIO()
        torch.save(value, archive)
        (directory / name).write_bytes(archive.getbuffer())
    (directory / STATE_FILE).write_text(json.dumps(asdict(state), indent=1) + "\n", encoding="utf-8")


def read_trainer_state(directory: Path, with_rng: bool = True) -> tuple[TrainerState, dict[str, Any]]:
    """State and loader state of a checkpoint; the driver's random states are set as a side effect (`with_rng`)."""
    raw = json.loads((directory / STATE_FILE).read_text(encoding="utf-8"))
    if raw["format"] != STATE_FORMAT:
        raise ValueError(
            f"{directory / STATE_FILE} has format {raw['format']}; this version reads {STATE_FORMAT}. "
            "Resume with the version that wrote it, or start again with trainer.resume_mode=disable."
        )
    loader_state = _load_plain(directory / DATA_FILE)
    if with_rng:
        rng.load_rng_state(_load_plain(directory / RNG_FILE))
    return TrainerState(**raw), loader_state


def _load_plain(file: Path) -> Any:
    """Load a file of tensors and plain values; anything else is refused."""
    try:
        return torch.load(file, weights_only=True)
    except Exception as error:  # damaged bytes make an unpickler raise almost anything
        raise CheckpointCorruptError(f"{file} cannot be loaded: {one_line(error)}") from error


def checkpoint_to_resume(trainer_config: RunConfig) -> Path | None:
    """The folder that `trainer.resume_mode` points to, its manifest checked; None: start from step 0."""
    if trainer_config.resume_mode == "disable":
        return None
    if trainer_config.resume_mode == "auto":
        return find_valid_checkpoint(trainer_config.default_local_dir)
    if not trainer_config.resume_from_path:
        raise ValueError("trainer.resume_mode=resume_path needs trainer.resume_from_path: .../global_step_<N>.")
    path = Path(trainer_config.resume_from_path).expanduser().absolute()
    if not path.is_dir():
        raise FileNotFoundError(f"trainer.resume_from_path={str(path)!r} does not exist.")
    verify_manifest(path)
    return path


def check_same_data(saved: dict[str, Any], present: dict[str, Any], allow_change: bool) -> bool:
    """True when the data are those of the checkpoint. Changed data are refused, unless allowed (then False)."""
    known = [key for key in saved if key in present]  # checkpoints of older versions have fewer
    changes = [f"{key}: {saved[key]} -> {present[key]}" for key in known if saved[key] != present[key]]
    if not changes:
        return True
    text = f"the training data or its batches changed since the checkpoint was written ({'; '.join(changes)})"
    if not allow_change:
        raise ValueError(
            f"{text}; the saved position does not apply to them. Restore the old files and settings, or set "
            "trainer.allow_data_change=true to begin at the first batch of the new data."
        )
    logger.warning(f"{text}; trainer.allow_data_change=true: the run begins at the first batch of the new data")
    return False
