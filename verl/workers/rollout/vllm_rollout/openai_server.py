"""vLLM's OpenAI-compatible server as a process of this machine, which ends with its owner."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import time
import urllib.request
from pathlib import Path

import psutil
import torch
from loguru import logger

from verl.utils import supervisor

SUPERVISOR = Path(supervisor.__file__)
_LOG_TAIL = 25
_GPU_SHARE = 0.5
_KV_CACHE_BYTES = 512 << 20  # on a CPU; vLLM zeroes it before it serves, which takes seconds per GiB


class LocalServerError(RuntimeError):
    """The local server did not start or has ended; the message shows the end of its log file."""


def free_port(host: str = "127.0.0.1") -> int:
    """A TCP port of an address of this machine that is not in use now."""
    with socket.socket() as s:
        s.bind((host, 0))
        return s.getsockname()[1]


class RunningServer:
    """A server on this machine that may still be loading: call `wait_ready()` before the first request.

    A subclass for another kind of model sets the request that shows that the server works, and the configuration key of
    its start's time limit.
    """

    path, first_request = "/v1/completions", {"prompt": [[0, 1]], "max_tokens": 1, "temperature": 0.0}
    timeout_key = "spd.rollout.start_timeout_s"

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

        Raises LocalServerError with the end of the log.
        """
        while not self._ready:
            try:
                supervisor = psutil.Process(self.pid)
                ended, age = supervisor.status() == psutil.STATUS_ZOMBIE, time.time() - supervisor.create_time()
            except psutil.NoSuchProcess:
                ended, age = True, 0.0
            if ended:
                raise LocalServerError(f"the local vLLM server has ended.{self._tail()}")
            if age > timeout_s:
                raise LocalServerError(
                    f"the local vLLM server was not ready after {timeout_s:.0f} s ({self.timeout_key}).{self._tail()}"
                )
            try:
                with urllib.request.urlopen(f"{self.url}/health", timeout=5):
                    pass
            except OSError:
                time.sleep(0.2)
                continue
            # /health answers even if the engine dies at the first request.
            body = json.dumps(self.first_request).encode()
            request = urllib.request.Request(self.url + self.path, body, headers={"Content-Type": "application/json"})
            try:
                with urllib.request.urlopen(request, timeout=120.0) as reply:
                    json.load(reply)
            except (OSError, ValueError) as error:
                raise LocalServerError(
                    f"the local vLLM server failed its first request: {error}.{self._tail()}"
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
    `extra_args` follow on vLLM's command line, and win. `host` is the address that it binds.
    """

    def __init__(
        self, model_path: str, log_file: str | Path, max_model_len: int | None, extra_args: list[str] | None = None,
        host: str = "127.0.0.1",
    ) -> None:  # fmt: skip
        port = free_port(host)
        model_path, log_file = str(Path(model_path).expanduser()), Path(log_file).expanduser()
        command = [
            sys.executable, "-m", "vllm.entrypoints.openai.api_server",
            "--host", host, "--port", str(port),
            "--model", model_path,
            "--disable-uvicorn-access-log",
        ]  # fmt: skip
        if max_model_len is not None:
            command += ["--max-model-len", str(max_model_len)]
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
        super().__init__(self._process.pid, f"http://{host}:{port}", log_file)
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
