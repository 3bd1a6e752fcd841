"""Compatibility with verl: the import paths of verl and of earlier versions that are not those of live modules here.

PACKAGES: old package -> the live package whose modules are those of the old one, and itself unless NAMES has it.
MODULES: old path -> the live module that it stands for.
NAMES: old path -> names of live modules, "module:name,other=live_name" or "module:*".
LIVE_PACKAGES: live package -> names that it also has for imports of verl, as in NAMES.
REMOVED: old path -> what to use instead.
"""

_ASYNC, _LOOPS = "verl.trainer.fully_async", "verl.agents.agent_loop"
_TOOLS, _INTERACTIONS = "verl.agents.tools", "verl.agents.interactions"
_RULES, _MANAGERS, _DISPATCH = "verl.reward.rules", "verl.reward.managers", "verl.single_controller.base.dispatch"

PACKAGES = {
    "recipe.fully_async_policy": _ASYNC,
    "recipe.one_step_off_policy": _ASYNC,
    "verl.checkpoint": "verl.training.checkpoint",
    "verl.environments": "verl.agents.environments",
    "verl.experimental.agent_loop": _LOOPS,
    "verl.experimental.dataset": "verl.data",
    "verl.experimental.dynamic_dataset": "verl.data",
    "verl.experimental.fully_async_policy": _ASYNC,
    "verl.experimental.one_step_off_policy": _ASYNC,
    "verl.interactions": _INTERACTIONS,
    "verl.interactions.utils": _INTERACTIONS,
    "verl.tools": _TOOLS,
    "verl.tools.utils": _TOOLS,
    "verl.utils.checkpoint": "verl.training.checkpoint",
    "verl.utils.dataset": "verl.data",
    "verl.utils.reward_score": _RULES,
    "verl.workers.actor": "verl.training.actor",
    "verl.workers.config": "verl.config",
    "verl.workers.critic": "verl.training.critic",
    "verl.workers.engine": "verl.training.engine",
    "verl.workers.policy": "verl.training.policy",
    "verl.workers.reward_manager": _MANAGERS,
    "verl.workers.roles": "verl.roles",
    "verl.workers.rollout": "verl.rollout",
    "verl.workers.rollout.agent_loop": _LOOPS,
    "verl.workers.rollout.gateway": "verl.agents.gateway",
    "verl.workers.rollout.interactions": _INTERACTIONS,
    "verl.workers.rollout.tools": _TOOLS,
}

MODULES = {
    "verl.base_config": "verl.config.base",
    "verl.experimental.reward_loop.reward_loop": "verl.compat.reward",
    **{
        f"verl.experimental.reward_loop.reward_manager.{name}": "verl.compat.reward"
        for name in ("base", "dapo", "limited", "naive", "registry", "remote")
    },
    "verl.experimental.reward_loop.reward_model": "verl.reward.served",
    "verl.tools.function_tool": "verl.compat.function_tool",
    "verl.trainer.config.algorithm": "verl.config.algorithm",
    "verl.trainer.config.config": "verl.config.common",
    "verl.trainer.main_ppo_v0": "verl.compat.main_ppo_v0",
    "verl.trainer.ppo.core_algos": "verl.compat.core_algos",
    "verl.utils.dataset.spd_dataset": "recipe.spd.data.dataset",
    "verl.utils.debug.metrics": "verl.algos.log_prob_metrics",
    "verl.utils.debug.performance": "verl.profiling.performance",
    "verl.utils.flops_counter": "verl.training.flops_counter",
    "verl.utils.metric.validation": "verl.trainer.run.validation_metrics",
    "verl.utils.profiler.config": "verl.config.profiler",
    "verl.utils.profiler.performance": "verl.profiling.performance",
    "verl.utils.reward_score.spd_scorer_reward": "recipe.spd.reward",
    "verl.utils.reward_score.sandbox_fusion.utils": f"{_RULES}.sandbox_fusion",
    "verl.utils.rollout_skip": "verl.trainer.ppo.rollout_skip",
    "verl.utils.rollout_trace": "verl.agents.rollout_trace",
    "verl.utils.seqlen_balancing": "verl.protocol.seqlen_balancing",
    "verl.utils.tensordict_utils": "verl.compat.tensordict_utils",
    "verl.utils.torch_functional": "verl.compat.torch_functional",
    "verl.utils.ulysses": "verl.compat.ulysses",
    "verl.workers.fsdp_workers": "verl.compat.fsdp_workers",
    f"{_MANAGERS}.registry": f"{_MANAGERS}.base",  # by `from verl.workers.reward_manager import registry`
    "verl.workers.reward_manager.abstract": f"{_MANAGERS}.base",
    "verl.workers.reward_manager.registry": f"{_MANAGERS}.base",
    "verl.workers.rollout.spd_rollout": "recipe.spd.rollout.spd_rollout",
}

_HELPERS, _BASICS, _MODELS = "verl.compat.helpers", "verl.compat.basics", "verl.compat.models"
_PROFILE = ("verl.profiling.profile:*", "verl.single_controller.base.profiling:DistProfilerExtension")
_PROFILER = (
    "verl.config.profiler:*", *_PROFILE, "verl.profiling.performance:*", "verl.utils.import_utils:is_nvtx_available",
)
_TRACKER = f"{_BASICS}:TRACKER,find_latest_ckpt_path,get_checkpoint_tracker_filename,read_tracker"
_SECTIONS = "common profiler sandbox actor critic engine model optimizer reward_model rollout".split()
NAMES = {
    **dict.fromkeys(("verl.experimental", "verl.models.transformers", "verl.workers"), ()),
    "verl.experimental.agent_loop": (f"{_LOOPS}:*", "verl.compat.agent_loop:AgentLoopManager"),
    "verl.experimental.agent_loop.agent_loop": (
        f"{_LOOPS}.base:AgentLoopBase,AgentLoopMetrics,AgentLoopOutput,DictConfigWrap,ToolListWrap",
        f"{_LOOPS}.registry:_agent_loop_registry,register", f"{_LOOPS}.server_manager:AsyncLLMServerManager",
        f"{_LOOPS}.worker:AgentLoopWorker,AgentLoopWorkerBase,get_trajectory_info",
        "verl.rollout.replica:TokenOutput", "verl.compat.agent_loop:*",
    ),
    "verl.experimental.agent_loop.base": (
        f"{_LOOPS}.base:AgentLoopBase,AgentLoopOutput", "verl.utils.tokenizer:stop_ids"
    ),
    "verl.experimental.agent_loop.utils": (f"{_LOOPS}.registry:resolve_config_path",),
    "verl.experimental.reward_loop": (
        "verl.compat.reward:RewardLoopManager,RewardLoopWorker", "verl.reward.served:RewardModelManager",
    ),
    "verl.experimental.reward_loop.reward_manager": (
        "verl.compat.reward:DAPORewardManager,NaiveRewardManager,RateLimitedRewardManager,RemoteRewardManager",
        "verl.compat.reward:get_reward_manager_cls,register",
    ),
    "verl.models.transformers.monkey_patch": (
        f"{_MODELS}:apply_monkey_patch,patch_forward_with_backends,patch_vlm_for_ulysses_input_slicing,repeat_kv",
    ),
    "verl.single_controller.base.decorator": (
        f"{_DISPATCH}:*",
        f"{_DISPATCH}:_check_dispatch_mode=check_dispatch_mode,_check_execute_mode=check_execute_mode",
    ),
    "verl.single_controller.ray.base": (
        "verl.single_controller.base.worker:get_master_addr_port",
        "verl.single_controller.base.worker_group:func_generator", "verl.single_controller.ray.fetch:WorkerDiedError",
        "verl.single_controller.ray.ray_class:*", "verl.single_controller.ray.resource_pool:*",
        "verl.single_controller.ray.worker_group:RayWorkerGroup",
    ),
    "verl.tools": (f"{_TOOLS}:*",),
    "verl.tools.tool_registry": (
        f"{_TOOLS}.tool_registry:ToolType,get_tool_class,initialize_tools_from_config", f"{_HELPERS}:load_all_tools",
    ),
    "verl.trainer.constants_ppo": (f"{_HELPERS}:PPO_RAY_RUNTIME_ENV,get_ppo_ray_runtime_env",),
    "verl.trainer.ppo.reward": (
        "verl.reward.loading:*", "verl.reward.rows:drop_failed",
        "verl.compat.reward:compute_reward,compute_reward_async",
    ),
    "verl.trainer.ppo.rollout_corr_helper": ("verl.algos.rollout_correction:*", f"{_HELPERS}:apply_bypass_mode"),
    "verl.utils.attention_utils": (
        "transformers.modeling_flash_attention_utils:pad_input=_pad_input,unpad_input=_unpad_input",
        "operator:index_first_axis=getitem", "einops:rearrange",
    ),
    "verl.utils.chat_template": (f"{_HELPERS}:extract_system_prompt_and_generation,initialize_system_prompt",),
    "verl.utils.checkpoint": ("verl.training.checkpoint:*", _TRACKER),
    "verl.utils.checkpoint.checkpoint_manager": (
        "verl.training.checkpoint:BaseCheckpointManager,CheckpointCorruptError,should_save_ckpt_esi", _TRACKER,
    ),
    "verl.utils.config": (
        "verl.config.compose:forced_override,hydra_main,omega_conf_to_dataclass",
        f"{_HELPERS}:update_dict_with_config,validate_config",
    ),
    "verl.utils.dataset": ("verl.data:*",),
    "verl.utils.dataset.multiturn_sft_dataset": (
        "verl.data.multiturn_sft_dataset:MultiTurnSFTDataset", f"{_BASICS}:convert_nested_value_to_list_recursive",
    ),
    "verl.utils.debug": _PROFILER,
    "verl.utils.device": (
        "verl.utils.accelerator:get_device_id,get_device_name,get_nccl_backend",
        f"{_BASICS}:auto_set_device,get_device_capability,get_torch_device,get_visible_devices_keyword",
        f"{_BASICS}:is_cuda_available,is_npu_available,set_expandable_segments",
        "transformers.utils:is_torch_npu_available",
    ),
    "verl.utils.fsdp_utils": (
        "verl.training.parallel.sharding:*",
        f"{_MODELS}:collect_lora_params,fsdp2_load_full_state_dict,fsdp_version,get_fsdp_wrap_policy,init_fn",
    ),
    "verl.utils.groupwise": ("verl.algos.advantage:as_torch_index",),
    "verl.utils.hdfs_io": ("verl.utils.fs:copy,exists,makedirs",),
    "verl.utils.memory_utils": (f"{_BASICS}:aggressive_empty_cache",),
    "verl.utils.model": (
        "verl.models.loading:*",
        f"{_MODELS}:convert_weight_keys,create_huggingface_critic,create_random_mask,load_valuehead_model",
    ),
    "verl.utils.profiler": _PROFILER,
    "verl.utils.profiler.profile": _PROFILE,
    "verl.utils.py_functional": (
        "verl.protocol.merge:deep_equal", "verl.single_controller.base.dispatch:DynamicEnum,DynamicEnumMeta",
        "verl.data.time_limit:timeout_limit",
        f"{_BASICS}:NestedNamespace,append_to_dict,convert_to_regular_types,rename_dict,temp_env_var,union_two_dict",
    ),
    "verl.utils.ray_utils": (
        f"{_BASICS}:get_event_loop,parallel_put", "verl.single_controller.base.worker:ray_noset_visible_devices",
    ),
    "verl.utils.reward_score.sandbox_fusion": (
        f"{_RULES}.sandbox_fusion:SandboxServiceError,check_correctness,compute_score",
    ),
    "verl.utils.torch_dtypes": (f"{_BASICS}:BFLOAT_LIST,FLOAT_LIST,HALF_LIST,PrecisionType",),
    "verl.workers.config": tuple(f"verl.config.{name}:*" for name in _SECTIONS),
    "verl.workers.config.actor": ("verl.config.actor:*", f"{_HELPERS}:RouterReplayConfig"),
    "verl.workers.engine_workers": ("verl.compat.fsdp_workers:ActorRolloutRefWorker",),
    "verl.workers.rollout.llm_server": ("verl.compat.agent_loop:LLMServerClient,LLMServerManager",),
}

LIVE_PACKAGES = {
    "verl.trainer.config": (
        "verl.config.algorithm:AlgoConfig,FilterGroupsConfig,KLControlConfig,RolloutCorrectionConfig",
        "verl.config.common:BaseModelConfig,CheckpointConfig,ModuleConfig,ProfileConfig,RewardManagerConfig",
        "verl.config.common:TrainerConfig",
    ),
    "verl.utils": (
        "verl.algos.advantage:as_torch_index", "verl.config.compose:omega_conf_to_dataclass",
        "verl.utils.tokenizer:hf_processor,hf_tokenizer", f"{_HELPERS}:validate_config",
    ),
}

REMOVED = {
    "verl.utils.checkpoint.checkpoint_handler": "verl.training.checkpoint.publish writes and finds checkpoints.",
    "verl.utils.dataset.rm_dataset": "reward models are served, not trained; see docs/rewards.md.",
    "verl.workers.rollout.schemas": "verl.agents.conversation holds the tokens of a conversation; see docs/agents.md.",
}
