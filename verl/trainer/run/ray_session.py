"""The driver's side of a run: its own Ray cluster, signals, error messages."""

import json
import logging
import os
import platform
import secrets
import shutil
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import psutil
import ray
from loguru import logger
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from verl.config.ppo import PPOConfig
from verl.trainer.run.failure import failure_message
from verl.trainer.run.stop_signals import StopSignals
from verl.utils import supervisor
from verl.utils.children import Program

WORKER_ENV = {
    "TOKENIZERS_PARALLELISM": "true", "NCCL_DEBUG": "WARN", "NCCL_CUMEM_ENABLE": "0", "VLLM_LOGGING_LEVEL": "WARN",
    "LOGURU_LEVEL": "INFO",
}
FORWARDED = ("LOGURU_LEVEL", "VERL_")  # of the driver's environment, by name or prefix
TEMP_PREFIX = "verl-ray-"
SESSION_FILE = "ray_session.json"  # in the run folder while a session of our own lives


@ray.remote(num_cpus=0)
class StopFlag:
    """A flag that the driver sets and the trainer reads after each step."""

    def __init__(self) -> None:
        self._set = False

    def set(self) -> None:
        self._set = True

    def is_set(self) -> bool:
        return self._set


@contextmanager
def started_session(config: PPOConfig) -> Iterator[bool]:
    """A Ray session for the block: the current one, the cluster of RAY_ADDRESS, or else a new local one.

    Yields whether it is a new one. Only what was started here is stopped at the end.
    """
    if ray.is_initialized():
        yield False
        return
    settings = dict(config.ray_kwargs.ray_init)
    settings["runtime_env"] = with_worker_env(settings.get("runtime_env") or {})
    if os.environ.get("RAY_ADDRESS") or settings.get("address"):
        settings.pop("num_cpus", None)  # the CPUs of a running cluster are fixed
        ray.init(**settings)
        try:
            yield False
        finally:
            ray.shutdown()
    else:
        if settings.get("num_cpus") is None:
            settings["num_cpus"] = logical_cpus(config)
        with new_session(Path(config.trainer.default_local_dir).expanduser(), settings):
            yield True


@contextmanager
def new_session(run_dir: Path, settings: dict[str, Any]) -> Iterator[None]:
    """A local Ray cluster for the block; a file in `run_dir` lets a later start end what a killed run leaves of it."""
    stop_left_session(run_dir)
    remove_dead_sessions()
    # Ray opens its own folder to all users, so it gets one within a folder that stays closed to them. A short path: Ray
    # puts sockets below it, and those allow 107 bytes.
    folder = Path(tempfile.mkdtemp(prefix=f"{TEMP_PREFIX}{os.getpid()}-"))
    keep_token_private()
    record = run_dir / SESSION_FILE
    try:
        run_dir.mkdir(parents=True, exist_ok=True)
        driver = {"pid": os.getpid(), "started": psutil.Process().create_time(), "host": platform.node()}
        record.write_text(json.dumps({**driver, "temp_dir": str(folder)}) + "\n", encoding="utf-8")
        # Our actors have their own environment: Ray's prestarted workers would never be used.
        os.environ.setdefault("RAY_prestart_worker_first_driver", "0")
        # Ray gives its workers niceness 15, with which they hardly run while other processes are busy.
        os.environ.setdefault("RAY_worker_niceness", "0")
        # Ray warns that its token authentication is on, as it should be.
        logging.getLogger("ray._private.authentication").setLevel(logging.ERROR)
        with session_guard(folder):
            ray.init(**{"include_dashboard": False, **settings, "address": "local", "_temp_dir": str(folder / "r")})
            try:
                yield
            finally:
                ray.shutdown()
    finally:
        shutil.rmtree(folder, ignore_errors=True)
        record.unlink(missing_ok=True)


def keep_token_private() -> None:
    """Write the token of Ray's authentication, where Ray would, for this user alone; Ray's own file all could read."""
    file = Path(os.environ.get("RAY_AUTH_TOKEN_PATH") or Path.home() / ".ray" / "auth_token")
    if os.environ.get("RAY_AUTH_TOKEN") or os.environ.get("RAY_AUTH_MODE", "token").lower() != "token":
        return
    file.parent.mkdir(parents=True, exist_ok=True)
    with suppress(FileExistsError), open(os.open(file, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as new:
        new.write(secrets.token_hex(32))
    if file.stat().st_uid == os.getuid():
        file.chmod(0o600)


@contextmanager
def session_guard(folder: Path) -> Iterator[None]:
    """Run a process that ends our Ray session if this one is killed within the block."""
    script = [sys.executable, "-I", supervisor.__file__, "--ray-session"]
    guard = Program(script, [str(os.getpid()), str(folder)], start_new_session=True)
    try:
        yield
    finally:
        guard.stop()
        guard.end(grace=30)


def stop_left_session(run_dir: Path) -> None:
    """End the Ray session that a killed run left in this folder; exit if that run is still alive."""
    record = run_dir / SESSION_FILE
    if not record.is_file():
        return
    try:
        left = json.loads(record.read_text(encoding="utf-8"))
        folder, pid, started = Path(left["temp_dir"]), left["pid"], left["started"]
    except (ValueError, KeyError, TypeError) as e:
        logger.warning(f"{record} cannot be read ({e}): no session is stopped")
        return
    host = left.get("host", platform.node())
    if host != platform.node():
        logger.warning(f"{record} is of process {pid} on {host}, which cannot be checked here: make sure that it ended")
        return
    # The start time distinguishes the driver from a later process with the same number.
    if psutil.pid_exists(pid) and psutil.Process(pid).create_time() == started:
        sys.exit(f"trainer.default_local_dir={run_dir} is in use by the run of process {pid}; stop it first.")
    if folder.name.startswith(TEMP_PREFIX) and folder.is_dir() and folder.stat().st_uid == os.getuid():
        # Workers have another title and end with their raylet, whose command line contains the folder.
        own = []
        for process in psutil.process_iter(["cmdline"]):
            line = " ".join(process.info["cmdline"] or ())
            if str(folder) in line and "/ray/" in line:
                own.append(process)
        logger.warning(f"ending {len(own)} Ray processes of the killed run {pid} in {folder}")
        for process in own:
            with suppress(psutil.NoSuchProcess, psutil.AccessDenied):
                process.kill()
        psutil.wait_procs(own, timeout=10)
        shutil.rmtree(folder, ignore_errors=True)
    record.unlink()


def logical_cpus(config: PPOConfig) -> int:
    """CPUs of a local Ray session: at least one for the task runner, one per CPU rank, one for a reward task."""
    pools = [config.trainer, *([config.rollout] if "rollout" in config else [])]  # the latter of asynchronous training
    return max(os.cpu_count() or 1, sum(pool.nnodes * pool.n_gpus_per_node for pool in pools) + 2)


def with_worker_env(runtime_env: dict[str, Any]) -> dict[str, Any]:
    """The runtime environment: defaults, overridden by the driver's own settings, then by ray_init.runtime_env."""
    forwarded = {key: value for key, value in os.environ.items() if key.startswith(FORWARDED)}
    chosen = {key: os.environ.get(key, value) for key, value in WORKER_ENV.items()}
    return {**runtime_env, "env_vars": {**chosen, **forwarded, **runtime_env.get("env_vars", {})}}


def remove_dead_sessions() -> None:
    """Delete the folders of sessions whose driver was killed; folders of live processes stay."""
    for folder in Path(tempfile.gettempdir()).glob(f"{TEMP_PREFIX}*"):
        pid = folder.name.removeprefix(TEMP_PREFIX).split("-")[0]
        with suppress(FileNotFoundError):  # another run that starts now removes them too
            if pid.isdigit() and folder.stat().st_uid == os.getuid() and not Path("/proc", pid).exists():
                shutil.rmtree(folder, ignore_errors=True)


def run_here(runner: Any, config: Any) -> int:
    """Run the task runner in this process, on its own Ray session; the exit code, see `_exit_code`."""
    for name, value in WORKER_ENV.items():
        os.environ.setdefault(name, value)
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if not config.trainer.local:
        os.environ["CUDA_VISIBLE_DEVICES"] = ""  # Ray assigns the GPUs to the ranks
    try:
        return _exit_code(lambda signals: runner.run(config, lambda: signals.stop_requested), config)
    finally:  # the caller may start another session
        os.environ.pop("CUDA_VISIBLE_DEVICES", None)
        if visible is not None:
            os.environ["CUDA_VISIBLE_DEVICES"] = visible


def run_until_done(runner: Any, config: Any) -> int:
    """Run the task runner, an actor; the exit code, see `_exit_code`."""

    def run(signals: StopSignals) -> bool:
        here = NodeAffinitySchedulingStrategy(ray.get_runtime_context().get_node_id(), soft=False)
        stop = StopFlag.options(scheduling_strategy=here).remote()  # no other node can end the run with it
        running = runner.run.remote(config, lambda: ray.get(stop.is_set.remote()))
        while not ray.wait([running], timeout=0.5)[0]:
            if signals.stop_requested:
                ray.get(stop.set.remote())
        return ray.get(running)

    return _exit_code(run, config)


def _exit_code(run: Callable[[StopSignals], bool], config: Any) -> int:
    """0 if `run` returns true (the last step was done), else that of the signal; 1, with a message, after an error.

    The first signal requests a stop after the current step, a second one ends the process.
    """
    try:
        with StopSignals() as signals:
            # Not by the name of the program: data loaders have the same command line.
            logger.info("to end this run after a step and save: kill {}", os.getpid())
            finished = run(signals)
        return 0 if finished else signals.exit_code
    except Exception as e:
        sys.stderr.write(failure_message(e, config) + "\n")
        return 1
