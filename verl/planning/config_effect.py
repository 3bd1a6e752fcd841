"""Settings that this version accepts and does not read."""

from collections.abc import Callable, Mapping
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

import verl.trainer.config
from verl.config.rollout import ROLLOUTS_OF_THE_ACTOR
from verl.planning.config_check import SECTIONS, is_interpolation, paths, select, text
from verl.planning.problems import UNUSED, Problem

# Pattern of a key (a * spans dots) -> what is done instead.
NOT_READ = {
    "actor_rollout_ref.*.use_torch_compile": "nothing is compiled",
    "actor_rollout_ref.*.entropy_checkpointing": "chunks of logits are always computed again in the backward",
    "actor_rollout_ref.*.entropy_from_logits_with_chunking": "logits are always taken in chunks",
    "*.ulysses_sequence_parallel_size": "each rank keeps whole sequences, which takes more memory for the same loss",
    "actor_rollout_ref.model.use_liger": "the model's own layers run, and logits are always taken in chunks",
    "actor_rollout_ref.model.use_fused_kernels": "the model's own layers run, and logits are always taken in chunks",
    "actor_rollout_ref.rollout.mode": "a step generates in one call on the ranks (sync)",
    "critic.*.use_orig_params": "FSDP2 always keeps the original parameters",
    "critic.model.enable_activation_offload": "activations stay on the device",
    "critic.model.use_shm": "weights are read where they lie",
    "actor_rollout_ref.*.use_orig_params": "FSDP2 always keeps the original parameters",
    "actor_rollout_ref.model.enable_activation_offload": "activations stay on the device",
    "actor_rollout_ref.model.hf_config_path": "the model is built from the config.json in its own folder",
    "actor_rollout_ref.model.use_shm": "weights are read where they lie",
    "actor_rollout_ref.model.fused_kernel_options.*": "there are no fused kernels",
    "actor_rollout_ref.actor.use_rollout_log_probs": "old log-probs always come from the actor",
    "actor_rollout_ref.actor.rollout_n": "actor_rollout_ref.rollout.n decides",
    "actor_rollout_ref.actor.optim.clip_grad": "actor_rollout_ref.actor.grad_clip decides",
    "actor_rollout_ref.actor.checkpoint.async_save": "saving is finished before the next step",
    "actor_rollout_ref.rollout.multi_turn.*": "there is no multi-turn rollout",
    "actor_rollout_ref.rollout.agent.*": "there is no multi-turn rollout",
    "actor_rollout_ref.rollout.trace.*": "single rollouts are not traced",
    "actor_rollout_ref.rollout.server.*": "there is no server mode",
    "actor_rollout_ref.rollout.prometheus.*": "there is no server mode",
    "data.tokenizer": "the data use the model's tokenizer",
    "data.trust_remote_code": "actor_rollout_ref.model.trust_remote_code decides",
    "data.return_raw_chat": "rows always carry the chat messages",
    "data.filter_overlong_prompts_workers": "one process looks for such prompts",
    "data.datagen.*": "no prompts are generated",
    "reward_model.launch_reward_fn_async": "rewards are computed after generation",
    "reward_model.use_reward_loop": "rewards are computed after generation",
    "reward_model.model.use_remove_padding": "the reward model reads padded rows",
    "trainer.esi_redundant_time": "no instance's expiry is watched",
    "trainer.default_hdfs_dir": "checkpoints stay in trainer.default_local_dir",
    "trainer.use_legacy_worker_impl": "there is one worker implementation",
    "global_profiler.*": "no profiler is built in",
}
# Settings of a rollout engine other than the actor's own module.
ENGINE_KEYS = (
    "dtype", "gpu_memory_utilization", "enforce_eager", "cudagraph_capture_sizes", "free_cache_engine",
    "data_parallel_size", "expert_parallel_size", "tensor_model_parallel_size", "pipeline_model_parallel_size",
    "max_num_batched_tokens", "max_model_len", "enable_chunked_prefill", "enable_prefix_caching", "load_format",
    "logprobs_mode", "disable_log_stats", "skip_tokenizer_init", "quantization", "quantization_config_file",
    "multi_stage_wake_up", "enable_sleep_mode", "update_weights_bucket_megabytes", "layered_summon", "engine_kwargs.*",
    "repetition_penalty", "over_sample_rate",
)  # fmt: skip

VLLM_NOT_READ = {
    f"actor_rollout_ref.rollout.{name}": why
    for why, names in {
        "an engine lives on one rank, or on tensor_model_parallel_size of them":
            ("data_parallel_size", "expert_parallel_size", "pipeline_model_parallel_size"),
        "weights are handed over tensor by tensor": ("update_weights_bucket_megabytes", "layered_summon"),
        "weights wake before the cache": ("multi_stage_wake_up",),
        "the engine takes and gives token ids": ("skip_tokenizer_init",),
        "every prompt asked is answered": ("over_sample_rate",),
        "engine_kwargs.vllm.hf_overrides takes such settings": ("quantization_config_file",),
    }.items()
    for name in names
}  # fmt: skip


def settings_without_effect(config: DictConfig) -> list[Problem]:
    """One sentence for each key of an RL config that is set to another value than its default and is not read."""
    table = dict(NOT_READ)
    rollout = OmegaConf.select(config, "actor_rollout_ref.rollout.name", throw_on_missing=False)
    if rollout in ROLLOUTS_OF_THE_ACTOR:
        why = f"rollout {rollout} generates with the actor's own module"
        table.update({f"actor_rollout_ref.rollout.{name}": why for name in ENGINE_KEYS})
    elif rollout == "vllm":
        table.update(VLLM_NOT_READ)
    top = OmegaConf.to_container(OmegaConf.load(Path(verl.trainer.config.__file__).with_name("ppo_trainer.yaml")))
    return unread(config, table, lambda key: _default(key, top))


def unread(config: DictConfig, table: Mapping[str, str], default: Callable[[str], Any]) -> list[Problem]:
    """Keys that `table` (pattern -> what is done instead) covers and whose value is not the default."""
    try:
        plain, raw = (OmegaConf.to_container(config, resolve=r) for r in (True, False))
    except OmegaConfBaseException:  # tree_problems reports it
        return []
    unused = []
    for key in paths(plain):
        why = next((table[pattern] for pattern in table if fnmatchcase(key, pattern)), None)
        value = select(plain, key, None)
        if why is None or key.endswith("._target_") or isinstance(value, Mapping):
            continue
        if not is_interpolation(select(raw, key, None)) and value != default(key):
            unused.append(Problem(UNUSED, key, f"{key}={text(value)} has no effect in this version: {why}."))
    return unused


def _default(key: str, top: Mapping[str, Any]) -> Any:
    """From the section's dataclass, or from ppo_trainer.yaml (`top`) where a section has none."""
    for section, dataclass_type in SECTIONS.items():
        if key.startswith(f"{section}."):
            return select(dataclass_type(), key.removeprefix(f"{section}."), None)
    return select(top, key, None)
