"""SGLang's server as a process next to the ranks, and the replica that agent loops see of it."""

from __future__ import annotations

import json
import secrets
import shutil
import sys
import tempfile
from pathlib import Path
from typing import Any

from verl.config.model import HFModelConfig
from verl.config.rollout import CPU_CACHE_BYTES, RolloutConfig
from verl.rollout.base import DTYPES
from verl.rollout.replica import START_KEY, RolloutReplica, ServerHandle
from verl.rollout.server_process import LocalServerError, OwnedServer
from verl.utils.ports import free_port

# Tokens of SGLang's context that it does not fill: beyond max_model_len, which prompt and response may fill together.
CONTEXT_MARGIN = 8
# SGLang's names of sampling parameters that vLLM names differently.
SAMPLING_NAMES = (("max_tokens", "max_new_tokens"), ("min_tokens", "min_new_tokens"), ("seed", "sampling_seed"))


class SGLangHttpServer(OwnedServer):
    """SGLang's native HTTP server with one engine; it ends with the process that starts it.

    `engine_kwargs.sglang`: options of SGLang's command line, with underscores; they replace those made here. Requests
    carry this server's key. `gpus`: the engine's CUDA devices as CUDA_VISIBLE_DEVICES names them; None for a CPU.
    """

    engine = "SGLang"
    path = "/generate"
    first_request = {"input_ids": [0], "sampling_params": {"max_new_tokens": 1, "temperature": 0.0}}

    def __init__(
        self, config: RolloutConfig, model_config: HFModelConfig, gpus: list[str] | None = None, host: str = "127.0.0.1"
    ) -> None:
        self.config, self.model_config, self.gpus = config, model_config, gpus
        self.api_key = secrets.token_hex(16)  # hex never starts with a dash, which SGLang would take for an option
        options = self._options()
        self.folder = Path(tempfile.mkdtemp(prefix="verl_sglang_"))  # readable by this user only
        port = free_port(host)
        self.address = f"{host}:{port}"
        key_file = self.folder / "key.yaml"  # not on the command line, which all users of the machine can read
        key_file.write_text(f"api-key: {self.api_key}\n")
        command = [sys.executable, "-m", "sglang.launch_server", "--config", str(key_file)]
        for name, value in (options | {"host": host, "port": port}).items():
            flag = f"--{name.replace('_', '-')}"
            if isinstance(value, bool):
                if value:
                    command.append(flag)
            elif isinstance(value, list | tuple):
                command += [flag, *map(str, value)]
            elif value is not None:
                command += [flag, json.dumps(value) if isinstance(value, dict) else str(value)]
        # A context of max_model_len tokens and the margin may be more than the model's own.
        environment = {"SGLANG_ALLOW_OVERWRITE_LONGER_CONTEXT_LEN": "1"}
        environment |= {"SGLANG_USE_CPU_ENGINE": "1"} if gpus is None else {"CUDA_VISIBLE_DEVICES": ",".join(gpus)}
        super().__init__(command, f"http://{self.address}", self.folder / "server.log", environment)

    def _options(self) -> dict[str, Any]:
        """{option of SGLang's command line, with underscores: value}; options with None are left out."""
        config, model = self.config, self.model_config
        context = (config.max_model_len or config.prompt_length + config.response_length) + CONTEXT_MARGIN
        given: dict[str, Any] = {
            "model_path": model.local_path, "trust_remote_code": model.trust_remote_code, "skip_tokenizer_init": True,
            "dtype": DTYPES.get(config.dtype, config.dtype), "context_length": context, "random_seed": 0,
            "load_format": config.load_format, "quantization": config.quantization,
            "tp_size": config.tensor_model_parallel_size, "mem_fraction_static": config.gpu_memory_utilization,
            "max_running_requests": config.max_num_seqs, "disable_radix_cache": not config.enable_prefix_caching,
            "chunked_prefill_size": config.max_num_batched_tokens if config.enable_chunked_prefill else -1,
            "max_prefill_tokens": max(config.max_num_batched_tokens, context),
            "disable_cuda_graph": config.enforce_eager, "cuda_graph_bs": config.cudagraph_capture_sizes or None,
            "log_level": "warning" if config.disable_log_stats else "info", "ep_size": config.expert_parallel_size,
            "enable_metrics": config.prometheus.enable,
            "served_model_name": config.prometheus.served_model_name or Path(model.local_path).name,
            "enable_memory_saver": self.gpus is not None and config.enable_sleep_mode and config.free_cache_engine,
        }  # fmt: skip
        if self.gpus is None:
            given |= {
                "device": "cpu", "attention_backend": "torch_native", "sampling_backend": "pytorch",
                "disable_overlap_schedule": True, "disable_cuda_graph": True,
                "max_total_tokens": max(context, CPU_CACHE_BYTES // self._bytes_per_token()),
            }  # fmt: skip
        overrides: dict[str, Any] = {"tie_word_embeddings": False} if model.untied else {}
        if config.quantization_config_file is not None:
            file = Path(config.quantization_config_file).expanduser()
            overrides["quantization_config"] = json.loads(file.read_text())
        given["json_model_override_args"] = overrides or None
        return given | dict(config.engine_kwargs.get("sglang") or {})

    def _bytes_per_token(self) -> int:
        """Bytes of a token's keys and values in all layers."""
        model = self.model_config.hf_config.get_text_config()
        heads = getattr(model, "num_key_value_heads", None) or model.num_attention_heads
        width = getattr(model, "head_dim", None) or model.hidden_size // model.num_attention_heads
        return 2 * model.num_hidden_layers * heads * width * (4 if "32" in self.config.dtype else 2)

    @property
    def server_handle(self) -> ServerHandle:
        """Where it serves; its clients refuse ids outside the vocabulary, which would crash the engine."""
        vocab_size = self.model_config.hf_config.get_text_config().vocab_size
        return ServerHandle(self.address, self.api_key, vocab_size, SAMPLING_NAMES)

    def launch_server(self) -> ServerHandle:
        """Wait until it answers. Raises LocalServerError with the end of its log."""
        try:
            self.wait_ready(self.config.server.max_start_wait_time, START_KEY)
        except LocalServerError:
            self.stop(keep_log=True)
            raise
        return self.server_handle

    def stop(self, keep_log: bool = False) -> None:
        """End the server with all its processes, and delete its folder unless `keep_log`; may be called twice."""
        super().stop()
        if not keep_log:
            shutil.rmtree(self.folder, ignore_errors=True)


class SGLangReplica(RolloutReplica):
    """One SGLang server: of ranks that train the actor and send it their weights, or of ranks of its own."""
