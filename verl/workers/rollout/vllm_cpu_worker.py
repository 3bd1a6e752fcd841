"""vLLM's CPU worker with shared-memory segments of its own run.

vLLM names the segments of a tensor-parallel group after the port in its init method. With `external_launcher` that is
`env://`, so every run on a machine would use the same name: two runs would share memory, and a killed run's segment
would stop the next one (`create shm ... errno: 17`).
"""

from typing import Any

from verl.workers.rollout.vllm_rollout.platform_worker import PlatformWorker


class SharedMemoryCPUWorker(PlatformWorker):
    """Takes the name from `additional_config.shared_memory_name`, which is the same on every rank of a run."""

    def __init__(self, vllm_config: Any, *args: Any, distributed_init_method: str, **kwargs: Any) -> None:
        name = vllm_config.additional_config["shared_memory_name"]
        method = f"{distributed_init_method}:{name}"  # the process group exists already: only the name is read
        super().__init__(vllm_config, *args, distributed_init_method=method, **kwargs)
