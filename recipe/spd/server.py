"""A local vLLM server on 127.0.0.1, started for one run and ended with its owner."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import psutil
import torch
from loguru import logger
from omegaconf import DictConfig, OmegaConf

if TYPE_CHECKING:
    from recipe.spd.settings import SPDSettings

SUPERVISOR = Path(__file__).with_name("supervisor.py")
LOCAL_VARIABLE = "SPD_LOCAL_SERVER"  # handle of the server that the run's entry started, for its other processes
_LOG_TAIL = 25
_GPU_SHARE = 0.5  # spd.rollout.server_args=[--gpu-memory-utilization,...] sets another
_KV_CACHE_BYTES = 512 << 20  # on a CPU; vLLM zeroes it before it serves, which takes seconds per GiB


class ServerError(RuntimeError):
    """The local server did not start or has ended; the message shows the end of its log file."""


def free_port() -> int:
    """A TCP port of 127.0.0.1 that is not in use now."""
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return s.getsockname()[1]


class RunningServer:
    """A server on this machine that may still be loading: call `wait_ready()` before the first request."""

    def __init__(self, pid: int, url: str, log_file: str | Path) -> None:
        self.pid = pid  # of its supervisor
        self.url = url
        self.log_file = Path(log_file)
        self._ready = False

    def handle(self) -> str:
        """Text from which another process of this machine makes this object by `from_handle`."""
        return f"{self.pid} {self.url} {self.log_file}"

    @staticmethod
    def from_handle(text: str) -> RunningServer:
        """The server of a `handle`."""
        pid, url, log_file = text.split(" ", 2)
        return RunningServer(int(pid), url, log_file)

    def wait_ready(self, timeout_s: float) -> str:
        """Wait at most `timeout_s` from its start until it completes a request; returns its URL.

        Raises ServerError with the end of the log.
        """
        while not self._ready:
            try:
                supervisor = psutil.Process(self.pid)
                ended, age = supervisor.status() == psutil.STATUS_ZOMBIE, time.time() - supervisor.create_time()
            except psutil.NoSuchProcess:
                ended, age = True, 0.0
            if ended:
                raise ServerError(f"the local vLLM server has ended.{self._tail()}")
            if age > timeout_s:
                raise ServerError(
                    f"the local vLLM server was not ready after {timeout_s:.0f} s "
                    f"(spd.rollout.start_timeout_s).{self._tail()}"
                )
            try:
                with urllib.request.urlopen(f"{self.url}/health", timeout=5):
                    pass
            except OSError:
                time.sleep(0.2)
                continue
            # /health answers even if the engine dies at the first request.
            body = json.dumps({"prompt": [[0, 1]], "max_tokens": 1, "temperature": 0.0}).encode()
            request = urllib.request.Request(
                f"{self.url}/v1/completions", body, headers={"Content-Type": "application/json"}
            )
            try:
                with urllib.request.urlopen(request, timeout=120.0) as reply:
                    json.load(reply)
            except (OSError, ValueError) as error:
                raise ServerError(
                    f"the local vLLM server failed its first completion: {error}.{self._tail()}"
                ) from error
            self._ready = True
            logger.info("local vLLM server is ready after {:.0f} s", age)
        return self.url

    def _tail(self) -> str:
        lines = self.log_file.read_text(errors="replace").splitlines()[-_LOG_TAIL:]
        return f" Last lines of {self.log_file}:\n" + "\n".join(lines)


class LocalVllmServer(RunningServer):
    """vLLM's OpenAI server for the model in a directory, owned by this process. Start it early.

    Its output goes to `log_file`. The supervisor and vLLM with its children end with this process, SIGKILL included.
    """

    def __init__(
        self, model_path: str, log_file: str | Path, max_model_len: int, extra_args: list[str] | None = None
    ) -> None:
        port = free_port()
        model_path, log_file = str(Path(model_path).expanduser()), Path(log_file).expanduser()
        command = [
            sys.executable, "-m", "vllm.entrypoints.openai.api_server",
            "--host", "127.0.0.1", "--port", str(port),
            "--model", model_path, "--max-model-len", str(max_model_len),
            "--disable-uvicorn-access-log",
        ]  # fmt: skip
        environment = {**os.environ, "HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1", "DO_NOT_TRACK": "1"}
        # The rendezvous of the trainer's ranks must not reach vLLM.
        for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
            environment.pop(name, None)
        if not torch.cuda.is_available():
            command += ["--dtype", "float32", "--enforce-eager", "--kv-cache-memory-bytes", str(_KV_CACHE_BYTES)]
            # A worker in the engine's process saves one Python start. Its number of threads is then set here; with more
            # threads than free cores a batch costs several times the CPU time.
            environment["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
            environment["OMP_NUM_THREADS"] = str(max(1, len(os.sched_getaffinity(0)) - 1))
        else:  # the trainer uses the same GPU; extra_args may override it
            command += ["--gpu-memory-utilization", str(_GPU_SHARE)]
        command += list(extra_args or [])
        log_file.parent.mkdir(parents=True, exist_ok=True)
        with open(log_file, "w") as log:
            log.write(" ".join(command) + "\n")
            log.flush()
            self._process = subprocess.Popen(
                [sys.executable, "-I", "-S", str(SUPERVISOR), str(os.getpid()), *command], stdin=subprocess.PIPE,
                stdout=log, stderr=subprocess.STDOUT, env=environment, start_new_session=True,
            )  # fmt: skip
        super().__init__(self._process.pid, f"http://127.0.0.1:{port}", log_file)
        logger.info("local vLLM server for {} starts at {}; log: {}", model_path, self.url, self.log_file)

    def stop(self) -> None:
        """End the server with all its processes; may be called twice."""
        if self._process.stdin is not None and not self._process.stdin.closed:
            self._process.stdin.close()
        try:
            self._process.wait(timeout=10)
        except subprocess.TimeoutExpired:
            logger.warning("the supervisor {} of the local vLLM server did not end; killing it", self._process.pid)
            self._process.kill()
            self._process.wait(timeout=10)


def server_of(settings: SPDSettings, prompt_length: int, response_length: int) -> LocalVllmServer:
    """Start the server of a run, for context, rounds of blocks and completion unless max_model_len is set."""
    rollout = settings.rollout
    length = rollout.max_model_len or prompt_length + rollout.rounds * (response_length + 1) + rollout.max_tokens
    return LocalVllmServer(settings.target_path, rollout.server_log, length, rollout.server_args)


@contextmanager
def local_server(config: DictConfig) -> Iterator[None]:
    """Run a server during a training; it loads while Ray and the ranks start, which find it by LOCAL_VARIABLE.

    Not where the config names servers, on a running cluster, or on several nodes.
    """
    from recipe.spd.settings import SPDSettings

    if os.environ.get("RAY_ADDRESS") or config.trainer.nnodes > 1 or config.spd.rollout.servers:
        yield
        return
    settings = SPDSettings.from_custom(OmegaConf.to_container(config.spd, resolve=True))
    server = server_of(settings, config.data.max_prompt_length, config.data.max_response_length)
    os.environ[LOCAL_VARIABLE] = server.handle()
    try:
        yield
    finally:
        del os.environ[LOCAL_VARIABLE]
        server.stop()
