"""vLLM's OpenAI-compatible server as a process of this machine, which ends with its owner."""

from __future__ import annotations

import hmac
import os
import sys
from pathlib import Path
from typing import Any

import torch

import verl
from verl.rollout.server_process import OwnedServer
from verl.utils.accelerator import default_dtype
from verl.utils.ports import free_port

VARIABLE = "VERL_SERVER_TOKEN"  # of the server's environment: command lines can be read by all users
_GPU_SHARE = 0.5
_KV_CACHE_BYTES = 512 << 20  # on a CPU; vLLM zeroes it before it serves, which takes seconds per GiB


class LocalVllmServer(OwnedServer):
    """vLLM's OpenAI server for the model in a directory, owned by this process. Start it early.

    Its output goes to `log_file`. The supervisor and vLLM with its children end with this process, SIGKILL included.
    `extra_args` follow on vLLM's command line, and win. `host` is the address that it binds. With `token`,
    requests need the header `Authorization: Bearer <token>`.
    """

    def __init__(
        self, model_path: str, log_file: str | Path, max_model_len: int | None, extra_args: list[str] | None = None,
        host: str = "127.0.0.1", token: str = "",
    ) -> None:  # fmt: skip
        port = free_port(host)
        command = [
            sys.executable, "-m", "vllm.entrypoints.openai.api_server",
            "--host", host, "--port", str(port),
            "--model", str(Path(model_path).expanduser()),
            "--disable-uvicorn-access-log",
        ]  # fmt: skip
        if max_model_len is not None:
            command += ["--max-model-len", str(max_model_len)]
        environment: dict[str, str | None] = {"VLLM_NO_USAGE_STATS": "1"}
        if not torch.cuda.is_available():
            command += ["--dtype", default_dtype("cpu"), "--enforce-eager"]
            command += ["--kv-cache-memory-bytes", str(_KV_CACHE_BYTES)]
            # A worker in the engine's process saves one Python start. Its number of threads is then set here; with more
            # threads than free cores a batch costs several times the CPU time.
            environment["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
            environment["OMP_NUM_THREADS"] = str(max(1, len(os.sched_getaffinity(0)) - 1))
        else:  # the trainer uses the same GPU; extra_args may override it
            command += ["--gpu-memory-utilization", str(_GPU_SHARE)]
        if token:
            command += ["--middleware", f"{TokenGuard.__module__}.{TokenGuard.__name__}"]
            paths = [str(Path(verl.__file__).parents[1]), *filter(None, [os.environ.get("PYTHONPATH")])]
            environment |= {VARIABLE: token, "PYTHONPATH": os.pathsep.join(paths)}
            self.api_key = token
        command += list(extra_args or [])
        super().__init__(command, f"http://{host}:{port}", log_file, environment)


class TokenGuard:
    """Middleware of vLLM's server that passes on requests with the header `Authorization: Bearer <token>`, and those
    to /health.

    vLLM's own --api-key guards the paths below /v1 only: not /classify, /pause or /metrics.
    """

    def __init__(self, app: Any) -> None:
        self.app, self.wanted = app, f"Bearer {os.environ[VARIABLE]}".encode()

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] in ("http", "websocket") and scope["path"] != "/health":
            given = b"".join(value for name, value in scope["headers"] if name == b"authorization")
            if not hmac.compare_digest(given, self.wanted):
                if scope["type"] == "websocket":
                    return await send({"type": "websocket.close", "code": 1008})
                from starlette.responses import JSONResponse  # comes with vLLM

                text = "the header Authorization: Bearer <token> of this run is missing or wrong"
                return await JSONResponse({"error": text}, 401)(scope, receive, send)
        await self.app(scope, receive, send)
