"""Keys without effect, as Class.field (subclasses too): those of old scripts, and those some rollouts do not read."""

import functools
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml

from verl.utils.registry import installed_plugins

OLD_KEYS: dict[str, dict[str, Any]] = yaml.safe_load(
    Path(__file__).with_name("old_keys.yaml").read_text(encoding="utf-8")
)


@functools.cache
def unread(owner: type) -> dict[str, dict[str, Any]]:
    """{name: row of UNREAD in old_keys.yaml} of a class's arguments in scripts for verl that are no fields."""
    rows: dict[str, dict[str, Any]] = {}
    for base in reversed(owner.__mro__):
        start = f"{base.__name__}."
        rows |= {key.removeprefix(start): row for key, row in OLD_KEYS["UNREAD"].items() if key.startswith(start)}
    return {name: row for name, row in rows.items() if name not in owner.__dataclass_fields__}


# These generate with the actor's own module: no second engine, no second weights.
ROLLOUTS_OF_THE_ACTOR = ("hf", *sorted(installed_plugins("rollouts_of_the_actor")))
# What these rollouts do instead of reading the settings of an engine, of its client, or of agent loops.
NO_ENGINE = {name: f"rollout {name} generates with the actor's own module" for name in ROLLOUTS_OF_THE_ACTOR}
_BATCHES = "agent loops and servers need rollout.mode=async"
_NO_CLIENT = NO_ENGINE | {"vllm/sync": _BATCHES}
_NO_SERVER = NO_ENGINE | {"vllm/sync": _BATCHES, "sglang/sync": _BATCHES}

# Keys of ServerConfig and RolloutConfig that these reasons hold for.
_OF_CLIENTS = ("timeout", "max_attempts", "retry_delay", "max_connections")
_OF_ENGINES = (
    "mode", "repetition_penalty", "dtype", "gpu_memory_utilization", "enforce_eager", "cudagraph_capture_sizes",
    "free_cache_engine", "expert_parallel_size", "tensor_model_parallel_size",
    "max_num_batched_tokens", "logprobs_mode", "max_model_len", "prompt_queue", "disable_log_stats",
    "engine_kwargs", "speculative", "update_weights_bucket_megabytes", "enable_chunked_prefill",
    "enable_prefix_caching", "load_format", "lora_as_adapter", "quantization",
    "quantization_config_file", "enable_sleep_mode",
)  # fmt: skip
_OF_SERVERS = ("over_sample_rate", "agent", "trace", "multi_turn", "prometheus")

# What happens instead of reading the key, or any key below it; a mapping restricts this to those rollouts, by
# "name" or "name/mode".
UNUSED: dict[str, str | Mapping[str, str]] = {
    "RolloutConfig.data_parallel_size":
        "each tensor_model_parallel_size ranks are an engine, and all engines split the requests",
    "SeparateAgentLoopConfig.num_workers": "asynchronous training holds all conversations in the trainer's process",
    **{f"ServerConfig.{name}": _NO_CLIENT for name in _OF_CLIENTS},
    **{f"RolloutConfig.{name}": NO_ENGINE for name in _OF_ENGINES},
    **{f"RolloutConfig.{name}": _NO_SERVER for name in _OF_SERVERS},
}
