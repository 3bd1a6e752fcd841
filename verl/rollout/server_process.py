"""A server as a process of this machine, which ends with its owner."""

from __future__ import annotations

import json
import shlex
import signal
import subprocess
import time
import urllib.request
from pathlib import Path
from typing import Any

import psutil
from loguru import logger

from verl.utils.children import supervised
from verl.utils.redact import redact_command

_LOG_TAIL = 25
DIRECT = urllib.request.build_opener(urllib.request.ProxyHandler({}))  # a proxy does not reach this machine's servers


class LocalServerError(RuntimeError):
    """The local server did not start or has ended; the message shows the end of its log file."""


class RunningServer:
    """A server on this machine that may still be loading: call `wait_ready()` before the first request.

    A subclass sets the name of its engine, and the request that shows that the server works, with the key it needs.
    """

    engine = "vLLM"
    api_key = ""
    path: str = "/v1/completions"
    first_request: dict[str, Any] = {"prompt": [[0, 1]], "max_tokens": 1, "temperature": 0.0}

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

    def wait_ready(self, timeout_s: float, key: str = "its time limit") -> str:
        """Wait at most `timeout_s` from its start until it completes a request; returns its URL.

        Raises LocalServerError with the end of the log; `key` is the configuration key of the limit.
        """
        while not self._ready:
            age = self.seconds_up()
            if age > timeout_s:
                raise LocalServerError(
                    f"the local {self.engine} server was not ready after {timeout_s:.0f} s ({key}; raise it if the log "
                    f"shows progress).{self._tail()}"
                )
            try:
                with DIRECT.open(f"{self.url}/health", timeout=5):
                    pass
            except OSError:
                time.sleep(0.2)
                continue
            # /health answers even if the engine dies at the first request.
            body = json.dumps(self.first_request).encode()
            headers = {"Content-Type": "application/json", "Authorization": f"Bearer {self.api_key}"}
            request = urllib.request.Request(self.url + self.path, body, headers=headers)
            try:
                with DIRECT.open(request, timeout=120.0) as reply:
                    json.load(reply)
            except (OSError, ValueError) as error:
                raise LocalServerError(
                    f"the local {self.engine} server failed its first request: {error}.{self._tail()}"
                ) from error
            self._ready = True
            logger.info("local {} server is ready after {:.0f} s", self.engine, age)
        return self.url

    def seconds_up(self) -> float:
        """Seconds since its start. Raises LocalServerError with the end of the log if it has ended."""
        try:
            process = psutil.Process(self.pid)
            if process.status() != psutil.STATUS_ZOMBIE:
                return time.time() - process.create_time()
        except psutil.NoSuchProcess:
            pass
        raise LocalServerError(f"the local {self.engine} server has ended.{self._tail()}")

    def _tail(self) -> str:
        lines = self.log_file.read_text(errors="replace").splitlines()[-_LOG_TAIL:]
        return f" Last lines of {self.log_file}:\n" + "\n".join(lines)


class OwnedServer(RunningServer):
    """A server that this process starts and owns: with all its processes it ends with this one, SIGKILL included.

    `log_file` gets the command line, without secrets, and the output; `environment` adds variables to those of this
    process, where None removes one.
    """

    def __init__(
        self, command: list[str], url: str, log_file: str | Path, environment: dict[str, str | None] | None = None
    ) -> None:
        log_file = Path(log_file).expanduser()
        log_file.parent.mkdir(parents=True, exist_ok=True)
        variables = {"HF_HUB_OFFLINE": "1", "DO_NOT_TRACK": "1"} | (environment or {})
        with open(log_file, "w") as log:
            log.write(shlex.join(redact_command(command)) + "\n")
            log.flush()
            self._process = supervised(command, variables, stdout=log, stderr=subprocess.STDOUT)
        super().__init__(self._process.pid, url, log_file)
        logger.info("local {} server starts at {}; log: {}", self.engine, self.url, self.log_file)

    def stop(self) -> None:
        """End the server with all its processes; may be called twice."""
        if self._process.end(grace=10) == -signal.SIGKILL:
            logger.warning("the supervisor of the local {} server did not end and was killed", self.engine)
