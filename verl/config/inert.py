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

# What happens instead of reading the key, or any key below it; a mapping restricts this to those rollouts, by
# "name" or "name/mode".
UNUSED: dict[str, str | Mapping[str, str]] = {
    "HFModelConfig.fused_kernel_options": "log-probs are always computed by PyTorch; there is no Triton kernel",
    "ServerConfig.timeout": _NO_CLIENT,
    "ServerConfig.max_attempts": _NO_CLIENT,
    "ServerConfig.retry_delay": _NO_CLIENT,
    "ServerConfig.max_connections": _NO_CLIENT,
    "RolloutConfig.mode": NO_ENGINE,
    "RolloutConfig.repetition_penalty": NO_ENGINE,
    "RolloutConfig.dtype": NO_ENGINE,
    "RolloutConfig.gpu_memory_utilization": NO_ENGINE,
    "RolloutConfig.enforce_eager": NO_ENGINE,
    "RolloutConfig.cudagraph_capture_sizes": NO_ENGINE,
    "RolloutConfig.free_cache_engine": NO_ENGINE,
    "RolloutConfig.data_parallel_size": NO_ENGINE,
    "RolloutConfig.expert_parallel_size": NO_ENGINE,
    "RolloutConfig.tensor_model_parallel_size": NO_ENGINE,
    "RolloutConfig.max_num_batched_tokens": NO_ENGINE,
    "RolloutConfig.logprobs_mode": NO_ENGINE,
    "RolloutConfig.max_model_len": NO_ENGINE,
    "RolloutConfig.prompt_queue": NO_ENGINE,
    "RolloutConfig.disable_log_stats": NO_ENGINE,
    "RolloutConfig.multi_stage_wake_up": NO_ENGINE,
    "RolloutConfig.engine_kwargs": NO_ENGINE,
    "RolloutConfig.speculative": NO_ENGINE,
    "RolloutConfig.update_weights_bucket_megabytes": NO_ENGINE,
    "RolloutConfig.enable_chunked_prefill": NO_ENGINE,
    "RolloutConfig.enable_prefix_caching": NO_ENGINE,
    "RolloutConfig.load_format": NO_ENGINE,
    "RolloutConfig.lora_as_adapter": NO_ENGINE,
    "RolloutConfig.layered_summon": NO_ENGINE,
    "RolloutConfig.skip_tokenizer_init": NO_ENGINE,
    "RolloutConfig.quantization": NO_ENGINE,
    "RolloutConfig.quantization_config_file": NO_ENGINE,
    "RolloutConfig.enable_sleep_mode": NO_ENGINE,
    "RolloutConfig.over_sample_rate": _NO_SERVER,
    "RolloutConfig.agent": _NO_SERVER,
    "RolloutConfig.trace": _NO_SERVER,
    "RolloutConfig.multi_turn": _NO_SERVER,
    "RolloutConfig.prometheus": _NO_SERVER,
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
    "McoreEngineConfig.grad_offload": "gradients are freed after each optimizer step",
    "McoreEngineConfig.use_distributed_optimizer": "FSDP2 shards it",
    "McoreEngineConfig.use_mbridge": "weights come from the model's folder, and checkpoints are those of FSDP2",
    "McoreEngineConfig.vanilla_mbridge": "weights come from the model's folder, and checkpoints are those of FSDP2",
    "McoreOptimizerConfig.use_checkpoint_opt_param_scheduler": "a resumed run continues with the checkpoint's",
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
