"""A local vLLM server on 127.0.0.1, started for one run and gone with its owner."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import time
import urllib.request
from pathlib import Path

import torch
from loguru import logger

SUPERVISOR = Path(__file__).with_name("supervisor.py")
_LOG_TAIL = 25


class ServerError(RuntimeError):
    """The local server did not come up or is gone; the text names its log file."""


def free_port() -> int:
    """A TCP port of 127.0.0.1 that nobody listens on now."""
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return s.getsockname()[1]


class LocalVllmServer:
    """vLLM's OpenAI server for the model in a directory. Start it early, `wait_ready()` before the first request.

    Its output is in `log_file`. Both processes (a supervisor and vLLM with its children) end with this process,
    however that ends.
    """

    def __init__(
        self, model_path: str, log_file: str | Path, max_model_len: int, extra_args: list[str] | None = None
    ) -> None:
        self.model_path = str(Path(model_path).expanduser())
        self.log_file = Path(log_file)
        self.port = free_port()
        self.url = f"http://127.0.0.1:{self.port}"
        self.started = time.monotonic()
        command = [
            sys.executable, "-m", "vllm.entrypoints.openai.api_server",
            "--host", "127.0.0.1", "--port", str(self.port),
            "--model", self.model_path, "--max-model-len", str(max_model_len),
            "--disable-uvicorn-access-log",
        ]  # fmt: skip
        environment = {**os.environ, "HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1", "DO_NOT_TRACK": "1"}
        # A rendezvous of the trainer's ranks in the environment is not the server's.
        for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
            environment.pop(name, None)
        if not torch.cuda.is_available():
            command += ["--dtype", "float32", "--enforce-eager"]
            environment.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")
        command += list(extra_args or [])
        self.log_file.parent.mkdir(parents=True, exist_ok=True)
        with open(self.log_file, "w") as log:
            log.write(" ".join(command) + "\n")
            log.flush()
            self._process = subprocess.Popen(
                [sys.executable, "-I", "-S", str(SUPERVISOR), str(os.getpid()), *command], stdin=subprocess.PIPE,
                stdout=log, stderr=subprocess.STDOUT, env=environment, start_new_session=True,
            )  # fmt: skip
        logger.info("local vLLM server for {} starts at {}; log: {}", self.model_path, self.url, self.log_file)

    def wait_ready(self, timeout_s: float) -> str:
        """Wait for the server, check it with one real completion; gives its URL."""
        while True:
            if self._process.poll() is not None:
                raise ServerError(f"the local vLLM server ended with {self._process.returncode}.{self._tail()}")
            if time.monotonic() - self.started > timeout_s:
                self.stop()
                raise ServerError(
                    f"the local vLLM server was not ready after {timeout_s:.0f} s "
                    f"(spd.rollout.start_timeout_s).{self._tail()}"
                )
            if self._healthy():
                break
            time.sleep(0.5)
        # /health answers 200 also where the engine dies at the first request.
        request = {"model": self.model_path, "prompt": [[0, 1]], "max_tokens": 1, "temperature": 0.0}
        head = {"Content-Type": "application/json"}
        asked = urllib.request.Request(f"{self.url}/v1/completions", json.dumps(request).encode(), headers=head)
        try:
            with urllib.request.urlopen(asked, timeout=120.0) as reply:
                json.load(reply)
        except (OSError, ValueError) as error:
            raise ServerError(f"the local vLLM server failed its first completion: {error}.{self._tail()}") from error
        logger.info("local vLLM server is ready after {:.0f} s", time.monotonic() - self.started)
        return self.url

    def stop(self) -> None:
        """End the server with all its processes; calling it twice does no harm."""
        if self._process.stdin is not None and not self._process.stdin.closed:
            self._process.stdin.close()
        try:
            self._process.wait(timeout=10)
        except subprocess.TimeoutExpired:
            logger.warning("the supervisor {} of the local vLLM server did not end; killing it", self._process.pid)
            self._process.kill()
            self._process.wait(timeout=10)

    def _healthy(self) -> bool:
        try:
            with urllib.request.urlopen(f"{self.url}/health", timeout=5) as reply:
                return reply.status == 200
        except OSError:
            return False

    def _tail(self) -> str:
        lines = self.log_file.read_text(errors="replace").splitlines()[-_LOG_TAIL:]
        return f" Last lines of {self.log_file}:\n" + "\n".join(lines)
