"""Keys without effect: scripts for verl set them, but no run reads them, or what they request is always on.

A row names a field as Class.field and holds for subclasses too.
"""

from collections.abc import Mapping

from verl.utils.registry import installed_plugins

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
    "free_cache_engine", "data_parallel_size", "expert_parallel_size", "tensor_model_parallel_size",
    "max_num_batched_tokens", "logprobs_mode", "max_model_len", "prompt_queue", "disable_log_stats",
    "multi_stage_wake_up", "engine_kwargs", "speculative", "update_weights_bucket_megabytes", "enable_chunked_prefill",
    "enable_prefix_caching", "load_format", "lora_as_adapter", "layered_summon", "skip_tokenizer_init", "quantization",
    "quantization_config_file", "enable_sleep_mode",
)  # fmt: skip
_OF_SERVERS = ("over_sample_rate", "agent", "trace", "multi_turn", "prometheus")

# What happens instead of reading the key, or any key below it; a mapping restricts this to those rollouts, by
# "name" or "name/mode".
UNUSED: dict[str, str | Mapping[str, str]] = {
    "HFModelConfig.fused_kernel_options": "log-probs are always computed by PyTorch; there is no Triton kernel",
    "SeparateAgentLoopConfig.num_workers": "asynchronous training holds all conversations in the trainer's process",
    **{f"ServerConfig.{name}": _NO_CLIENT for name in _OF_CLIENTS},
    **{f"RolloutConfig.{name}": NO_ENGINE for name in _OF_ENGINES},
    **{f"RolloutConfig.{name}": _NO_SERVER for name in _OF_SERVERS},
}

# The reason why this behaviour is always on; setting the key to false is reported.
ALWAYS: dict[str, str] = {
    "ActorConfig.use_fused_kernels": "log-probs come from hidden states, a chunk of logits at a time",
    "FSDPActorConfig.entropy_from_logits_with_chunking": "logits are computed in chunks",
    "FSDPActorConfig.entropy_checkpointing": "chunks of logits are recomputed in the backward",
    "FSDPRefConfig.entropy_from_logits_with_chunking": "logits are computed in chunks",
    "FSDPRefConfig.entropy_checkpointing": "chunks of logits are recomputed in the backward",
    "RunConfig.use_legacy_worker_impl": "there is only one implementation",
    "DataConfig.return_raw_chat": "rows have them",
    "FSDPEngineConfig.use_orig_params": "FSDP2 keeps them",
    "FSDPEngineConfig.entropy_from_logits_with_chunking": "logits are computed in chunks",
    "FSDPEngineConfig.entropy_checkpointing": "chunks of logits are recomputed in the backward",
    "HFModelConfig.use_fused_kernels": "log-probs come from hidden states, a chunk of logits at a time",
    "RewardModelModelConfig.use_fused_kernels": "a value head has none",
    "RewardModelRolloutConfig.data_parallel_size":
        "each tensor_model_parallel_size ranks have a server, and all servers split the requests",
    "RolloutConfig.data_parallel_size":
        "each tensor_model_parallel_size ranks are an engine, and all engines split the requests",
    "RolloutConfig.multi_stage_wake_up": "weights wake before the cache",
    "RolloutConfig.layered_summon": "weights are gathered update_weights_bucket_megabytes at a time",
    "RolloutConfig.skip_tokenizer_init": "engines take and give token ids",
    "SFTDataConfig.balance_dp_token": "the loss is divided by the learned tokens of the global batch",
}
