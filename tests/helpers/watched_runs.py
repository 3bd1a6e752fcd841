"""Waiting for a running job, and what it must not do: leave a secret in a file, listen beyond this machine."""

import subprocess
import time
from collections.abc import Callable
from pathlib import Path

import psutil

CANARY = "canary-7f3a9c51d2"
_NAMES = ("WANDB_API_KEY", "HF_TOKEN", "HUGGING_FACE_HUB_TOKEN", "OPENAI_API_KEY", "AWS_SECRET_ACCESS_KEY",
          "MLFLOW_TRACKING_PASSWORD", "SWANLAB_API_KEY", "RAY_REDIS_PASSWORD", "RAY_SERVE_API_TOKEN")  # fmt: skip
SECRETS = {name: f"{CANARY}-{name}" for name in _NAMES}  # for the environment of the job


def files_with_secrets(directory: Path) -> list[str]:
    """Files below the folder that hold the canary."""
    files = (f for f in directory.rglob("*") if f.is_file())
    return [str(f.relative_to(directory)) for f in files if CANARY.encode() in f.read_bytes()]


def family(pid: int) -> list[psutil.Process]:
    """A process with all that it started."""
    return [psutil.Process(pid), *psutil.Process(pid).children(recursive=True)]


def wait_until(true: Callable[[], bool], run: subprocess.Popen, log: Path, seconds: float = 300) -> None:
    """Return once `true()` is; the run, which writes to `log`, must go on until then."""
    deadline = time.monotonic() + seconds
    while not true():
        assert run.poll() is None and time.monotonic() < deadline, log.read_text()[-3000:]
        time.sleep(0.01)


def listening(processes: list[psutil.Process]) -> list[tuple[str, int, str, int]]:
    """(name and number of the process, address, port) of each TCP socket on which one of the processes listens."""
    sockets = []
    for process in processes:
        try:
            name = Path((process.cmdline() or [process.name()])[0]).name.split(" ")[0].split("(")[0]
            name = next((a for a in process.cmdline()[1:3] if "dashboard" in a or "agent" in a), name)
            ours = [c for c in process.net_connections("tcp") if c.status == psutil.CONN_LISTEN]
            sockets += [(Path(name).name, process.pid, *c.laddr) for c in ours]
        except (psutil.NoSuchProcess, psutil.AccessDenied):
            continue
    return sockets


def becomes(true: Callable[[], bool], seconds: float = 20) -> bool:
    """Whether `true()` is so within a time."""
    deadline = time.monotonic() + seconds
    while not (reached := true()) and time.monotonic() < deadline:
        time.sleep(0.02)
    return bool(reached)
