"""One rank of a reward model that is served: it owns, or shares with its neighbours, a vLLM server."""

import json
import os
import secrets
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch.distributed as dist

from verl.config.reward_model import RewardModelConfig
from verl.roles.ranks import ModelWorker
from verl.rollout.replica import START_KEY, ServerHandle, host_to_bind
from verl.rollout.vllm_rollout.openai_server import LocalVllmServer
from verl.single_controller.base.dispatch import Dispatch, register
from verl.utils.accelerator import visible_device

# Settings of reward_model.rollout that have vLLM's own names.
_PASSED_ON = ("enforce_eager", "enable_chunked_prefill", "enable_prefix_caching", "dtype", "gpu_memory_utilization",
              "max_num_batched_tokens", "max_num_seqs", "load_format")  # fmt: skip


class RewardModelServer(LocalVllmServer):
    """vLLM's server of a reward model: POST /classify for a discriminative one, else OpenAI's API."""

    def __init__(
        self, config: RewardModelConfig, log_file: Path, discriminative: bool, host: str, token: str,
        gpus: list[str] | None = None,
    ) -> None:  # fmt: skip
        rollout, model = config.rollout, config.model
        sizes, images = rollout.cudagraph_capture_sizes, rollout.limit_images
        settings = {name: rollout[name] for name in _PASSED_ON} | {  # None: vLLM's own default
            "tensor_parallel_size": rollout.tensor_model_parallel_size,
            "disable_log_stats": rollout.disable_log_stats or None,  # vLLM has no --no- form of it
            "trust_remote_code": model.trust_remote_code or None,
            "tokenizer": os.path.expanduser(model.tokenizer_path) if model.tokenizer_path else None,
            "runner": "pooling" if discriminative else None,
            "enable_expert_parallel": True if rollout.expert_parallel_size > 1 else None,
            "compilation_config": {"cudagraph_capture_sizes": list(sizes)} if sizes else None,
            "limit_mm_per_prompt": None if images is None else {"image": images},
            **(rollout.engine_kwargs.get("vllm") or {}),
        }
        arguments: list[str] = []
        for name, value in settings.items():
            flag = name.replace("_", "-")
            if isinstance(value, bool):
                arguments.append(f"--{flag}" if value else f"--no-{flag}")
            elif value is not None:
                arguments += [f"--{flag}", json.dumps(value) if isinstance(value, Mapping) else str(value)]
        if discriminative:
            self.path, self.first_request = "/classify", {"input": [[0, 1]]}  # token ids; `wait_ready` sends it
        length = rollout.max_model_len or rollout.prompt_length + rollout.response_length
        super().__init__(model.path, log_file, length, arguments, host, token, gpus)


class RewardServerWorker(ModelWorker):
    """A rank of a served reward model; `tensor_model_parallel_size` neighbours share the server that the first owns."""

    config_type = RewardModelConfig
    server: RewardModelServer | None = None

    def __init__(
        self, config: Any, *args: Any, discriminative: bool = True, log_dir: str = ".",
        start_timeout: float = 600.0, **kwargs: Any,
    ) -> None:  # fmt: skip
        """`discriminative`: serve scores, not text. `log_dir`: folder of the logs. `start_timeout`: seconds."""
        super().__init__(config, *args, **kwargs)
        self.discriminative, self.log_dir, self.start_timeout = discriminative, log_dir, start_timeout

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def init_model(self) -> None:
        """Start the server and wait until it answers. Raises LocalServerError with the end of its log."""
        self.join_ranks("reward")
        config: RewardModelConfig = self.config
        size = config.rollout.tensor_model_parallel_size
        if self.world_size % size:
            raise ValueError(
                f"reward_model.rollout.tensor_model_parallel_size={size} does not divide the {self.world_size} ranks "
                "of the reward model's pool; use a divisor."
            )
        gpus: list[str | None] = [None] * self.world_size  # by rank
        dist.all_gather_object(gpus, visible_device() if self.device_name == "cuda" else None)
        if self.rank % size == 0:
            own = gpus[self.rank : self.rank + size] if self.device_name == "cuda" else None
            log = Path(self.log_dir).expanduser() / f"reward_model_{self.rank}.log"
            token = secrets.token_urlsafe(16)
            self.server = RewardModelServer(config, log, self.discriminative, host_to_bind(), token, own)
            self.server.wait_ready(self.start_timeout, START_KEY)
        dist.barrier()

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def server_handle(self) -> ServerHandle | None:
        """Address and token of this rank's server; None for a rank without one."""
        if self.server is None:
            return None
        return ServerHandle(self.server.url.removeprefix("http://"), self.server.api_key)

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def close_rollout(self) -> None:
        """End the server. Worker groups call this name at the end of a run."""
        if self.server is not None:
            self.server.stop()
