"""Keys that are accepted and have no effect, each with what happens instead.

A key is named Class.field, and holds for subclasses too. NO_EFFECT has fields of config classes that no rollout, or not
every rollout, reads. Keys of scripts for verl that are no fields here stand under UNREAD in old_keys.yaml;
`old_keys_of` looks them up.
"""

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
def old_keys_of(owner: type) -> dict[str, dict[str, Any]]:
    """{key: its row of UNREAD} for the keys of old scripts that the section of the config class `owner` accepts.

    Rows of its base classes hold too, unless `owner` has a field of that name.
    """
    rows: dict[str, dict[str, Any]] = {}
    for base in reversed(owner.__mro__):  # base classes first: rows of `owner` itself win
        prefix = f"{base.__name__}."
        rows |= {key.removeprefix(prefix): row for key, row in OLD_KEYS["UNREAD"].items() if key.startswith(prefix)}
    return {name: row for name, row in rows.items() if name not in owner.__dataclass_fields__}


# Rollouts that generate with the actor's own module: no second engine, no second weights.
ROLLOUTS_OF_THE_ACTOR = ("hf", *sorted(installed_plugins("rollouts_of_the_actor")))
# {rollout "name" or "name/mode": why it does not read} the settings of an engine, of its client, or of agent loops.
_NO_ENGINE = {name: f"rollout {name} generates with the actor's own module" for name in ROLLOUTS_OF_THE_ACTOR}
_NEEDS_ASYNC = "agent loops and servers need rollout.mode=async"
_NO_CLIENT = _NO_ENGINE | {"vllm/sync": _NEEDS_ASYNC}
_NO_SERVER = _NO_ENGINE | {"vllm/sync": _NEEDS_ASYNC, "sglang/sync": _NEEDS_ASYNC}

# The fields that these hold for: _OF_CLIENTS are of ServerConfig, the others of RolloutConfig.
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

# Field -> what happens instead of reading it, or any key below it. A text holds for every run, a mapping for the
# rollouts that it names.
NO_EFFECT: dict[str, str | Mapping[str, str]] = {
    "RolloutConfig.data_parallel_size":
        "each tensor_model_parallel_size ranks are an engine, and all engines split the requests",
    "SeparateAgentLoopConfig.num_workers": "asynchronous training holds all conversations in the trainer's process",
    **{f"ServerConfig.{name}": _NO_CLIENT for name in _OF_CLIENTS},
    **{f"RolloutConfig.{name}": _NO_ENGINE for name in _OF_ENGINES},
    **{f"RolloutConfig.{name}": _NO_SERVER for name in _OF_SERVERS},
}
