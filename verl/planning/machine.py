"""Whether this machine has the memory and the disk space that a run needs."""

import shutil
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path
from typing import Any

from verl.config.common import CheckpointConfig, RunConfig
from verl.config.engine import FSDPEngineConfig
from verl.planning.memory_estimate import BYTES, ModelSize
from verl.training.checkpoint.publish import CheckpointCorruptError, continued_steps, steps_of_run
from verl.training.host_memory import available_memory
from verl.utils.problems import UNUSED, Problem, absent

GIB = 2**30
SAVE_COPIES = "copies for a save in the background"  # checkpoint.async_save, in the memory of CPU ranks
# Shares of what is there above which a plan is warned of. The largest process was measured 39 % above its prediction.
NEAR_MEMORY, NEAR_DISK = 0.7, 0.9


def checkpoints_layers(setting: bool | None, hf_config: Any, tokens: int, dtype: str, ranks: int) -> bool:
    """What enable_gradient_checkpointing means on a CPU for a micro-batch of `tokens` computed in `dtype`.

    `ranks` share the memory of this machine.
    """
    from verl.training.engine.build import needs_checkpointing  # slow

    return needs_checkpointing(setting, hf_config, tokens, BYTES[dtype], available_memory() / ranks)


def check_memory(needed: int, what: str, remedies: Mapping[str, str]) -> Iterator[Problem]:
    """Memory, in bytes, of all processes that the run starts on this machine; `what` names them.

    `remedies`: key -> what to do with it (lower, or set it to a value); the first is the problem's key.
    """
    free = available_memory()
    text = f"{what} need about {needed / GIB:.1f} GiB of memory, and this machine has {free / GIB:.1f} GiB available"
    key, advice = next(iter(remedies)), ", ".join(remedies.values())
    if needed > free:
        yield absent(key, f"{text}. To need less: {advice}.")
    elif needed > NEAR_MEMORY * free:
        more = "which may be too little: measured peaks were up to 39 % higher"
        yield Problem(UNUSED, key, f"{text}, {more}. To need less: {advice}.")


def checkpoint_bytes(size: ModelSize, engine: FSDPEngineConfig, contents: Collection[str]) -> int:
    """Bytes of a model's part of one checkpoint: trained weights, two moments, the full model for transformers."""
    master = BYTES[engine.model_dtype]
    parts = {"model": size.trainable, "optimizer": 2 * size.trainable, "hf_model": size.parameters}
    return master * sum(count for name, count in parts.items() if name in contents)


def copied_bytes(checkpoint: CheckpointConfig, size: ModelSize, engine: FSDPEngineConfig) -> int:
    """Bytes that one save copies. Weights for transformers are written as they are gathered."""
    contents = {*checkpoint.save_contents} - {"hf_model"}
    return checkpoint_bytes(size, engine, contents) if checkpoint.async_save else 0


def check_disk(trainer: RunConfig, one: int, steps: int | None, keep: str, contents: str) -> Iterator[Problem]:
    """Space of trainer.default_local_dir for the checkpoints of `one` bytes that a run of `steps` steps keeps.

    `keep` (below trainer) and `contents` are the keys of their number and of what they hold. Checkpoints of the
    run that are in the folder count as some of them.
    """
    every, kept = trainer.save_freq, trainer[keep]
    if every > 0 and steps:
        saved = -(-steps // every)
    else:
        saved = 0 if every == 0 else 1
    most = saved if kept is None else min(saved, kept + 1)  # the oldest one goes when the next one is complete
    root = Path(trainer.default_local_dir).expanduser().absolute()
    path = trainer.resume_from_path if trainer.resume_mode == "resume_path" else None
    resumed = Path(path).expanduser().absolute() if path else None
    try:
        there = len(steps_of_run(root) if trainer.resume_mode == "auto" else continued_steps(root, resumed))
    except CheckpointCorruptError as error:
        yield absent("trainer.default_local_dir", f"trainer.default_local_dir={root}: {error}")
        return
    needed = one * max(0, most - there)
    free = shutil.disk_usage(next(folder for folder in (root, *root.parents) if folder.exists())).free
    text = f"trainer.default_local_dir={root}: the run has up to {most} checkpoints of {one / GIB:.2f} GiB at a time"
    text += f" in addition to the {there} there" if there else ""
    text += f", and {free / GIB:.2f} GiB are free"
    advice = f"Lower trainer.{keep}" if most > 2 else "Free some space"
    advice += f", leave parts out of {contents}, or name a folder on another disk"
    if needed > free:
        yield absent("trainer.default_local_dir", f"{text}. {advice}.")
    elif needed > NEAR_DISK * free:
        yield Problem(UNUSED, "trainer.default_local_dir", f"{text}, which may be too little. {advice}.")
