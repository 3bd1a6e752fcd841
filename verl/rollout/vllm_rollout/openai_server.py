"""vLLM's OpenAI-compatible server as a process of this machine, which ends with its owner."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import torch

import verl
from verl.rollout.server_process import OwnedServer
from verl.rollout.vllm_rollout.token_guard import VARIABLE, TokenGuard
from verl.utils.accelerator import default_dtype
from verl.utils.ports import free_port

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
