"""What a failed run prints: one message, the user's own frame, and the file with the full traceback."""

import os
from pathlib import Path
from typing import Any

from ray.exceptions import RayActorError

from verl.trainer.run.timing import StepFailed, root_cause
from verl.utils.redact import redact_text
from verl.utils.user_code import full_traceback, user_frame
from verl.utils.visible_text import visible


def failure_message(error: Exception, config: Any) -> str:
    """Why a run ended; writes traceback.txt (other ranks: traceback_rankN.txt) into trainer.default_local_dir."""
    cause = root_cause(error)
    if isinstance(cause, StepFailed):
        text = str(cause)
    elif isinstance(cause, RayActorError):
        text = f"a process of the run died: {cause}"
    else:
        text = f"{type(cause).__name__}: {cause}"
    trace, rank = visible(redact_text(full_traceback(error))), int(os.environ.get("RANK", "0"))
    name = f"traceback_rank{rank}.txt" if rank else "traceback.txt"
    file = Path(config.trainer.default_local_dir).expanduser() / name
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(trace, encoding="utf-8")
        end = f"Full traceback: {file}"
    except OSError as e:
        end = f"{trace}\n(traceback printed because {file} cannot be written: {e})"
    frame = user_frame(trace)
    return "\n".join(["", f"Training failed: {visible(redact_text(text))}", *([f"  at {frame}"] if frame else []), end])
