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

TOKEN_VARIABLE = "VERL_SERVER_TOKEN"  # in the server's environment: all users can read command lines
_GPU_SHARE = 0.5
_KV_CACHE_BYTES = 512 << 20  # on a CPU; vLLM zeroes it before it serves, which takes seconds per GiB


class LocalVllmServer(OwnedServer):
    """vLLM's OpenAI server for the model in a directory, owned by this process.

    It loads in the background: create it early, and call `wait_ready` before the first request.

    Args:
        log_file: gets its output.
        max_model_len: tokens of prompt and answer; None is vLLM's default.
        extra_args: follow on vLLM's command line, and win.
        host: the address that it binds.
        token: if not empty, requests need the header `Authorization: Bearer <token>`.
        gpus: its GPUs, as CUDA_VISIBLE_DEVICES names them; None: those of this process.
    """

    def __init__(
        self, model_path: str, log_file: str | Path, max_model_len: int | None, extra_args: list[str] | None = None,
        host: str = "127.0.0.1", token: str = "", gpus: list[str] | None = None,
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
        if gpus is not None:
            environment["CUDA_VISIBLE_DEVICES"] = ",".join(gpus)
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
            # The server imports TokenGuard, also where verl is not installed but only on sys.path.
            paths = filter(None, [str(Path(verl.__file__).parents[1]), os.environ.get("PYTHONPATH")])
            environment |= {TOKEN_VARIABLE: token, "PYTHONPATH": os.pathsep.join(paths)}
            self.api_key = token  # of `wait_ready`
        command += list(extra_args or [])
        super().__init__(command, f"http://{host}:{port}", log_file, environment)


class TokenGuard:
    """ASGI middleware of vLLM's server that refuses requests without the header `Authorization: Bearer <token>`.

    /health stays open. vLLM's own --api-key guards the paths below /v1 only: not /classify, /pause or /metrics.
    """

    def __init__(self, app: Any) -> None:
        self.app, self.wanted = app, f"Bearer {os.environ[TOKEN_VARIABLE]}".encode()

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
