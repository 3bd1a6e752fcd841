"""Compatibility with verl: the import paths of verl and of earlier versions that are not those of live modules here.

MODULES: old path -> the live module that it stands for.
PACKAGES: old package -> the live package that it and all its modules stand for.
NAMES: old path -> names of live modules, "module:name,other=live_name" or "module:*".
LIVE_PACKAGES: names that live packages have for imports of verl -> their modules.
REMOVED: old path -> what to use instead.
"""

_ASYNC, _ENTRY = "verl.trainer.fully_async", "verl.trainer.fully_async.fully_async_main"
_LOOPS, _TOOLS, _INTERACTIONS = "verl.agents.agent_loop", "verl.agents.tools", "verl.agents.interactions"
_RULES, _MANAGERS = "verl.reward.rules", "verl.reward.managers"

PACKAGES = {
    "verl.checkpoint": "verl.training.checkpoint",
    "verl.environments": "verl.agents.environments",
    "verl.interactions": _INTERACTIONS,
    "verl.tools": _TOOLS,
    "verl.utils.reward_score": _RULES,
    "verl.workers.actor": "verl.training.actor",
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
    "recipe.fully_async_policy": _ASYNC,
    "recipe.fully_async_policy.fully_async_main": _ENTRY,
    "recipe.one_step_off_policy": _ASYNC,
    "recipe.one_step_off_policy.main_ppo": "verl.compat.one_step_off",
    "verl.base_config": "verl.config.base",
    "verl.experimental.agent_loop.agent_loop": "verl.compat.agent_loop",
    "verl.experimental.agent_loop.prometheus_utils": f"{_LOOPS}.prometheus_utils",
    "verl.experimental.agent_loop.single_turn_agent_loop": f"{_LOOPS}.single_turn_agent_loop",
    "verl.experimental.agent_loop.tool_agent_loop": f"{_LOOPS}.tool_agent_loop",
    "verl.experimental.agent_loop.tool_parser": f"{_LOOPS}.tool_parser",
    "verl.experimental.dataset.sampler": "verl.data.sampler",
    "verl.experimental.dynamic_dataset.dynamicgen_dataset": "verl.data.dynamicgen_dataset",
    "verl.experimental.fully_async_policy": _ASYNC,
    "verl.experimental.fully_async_policy.fully_async_main": _ENTRY,
    "verl.experimental.one_step_off_policy": _ASYNC,
    "verl.experimental.one_step_off_policy.main_ppo": "verl.compat.one_step_off",
    "verl.experimental.reward_loop.reward_loop": "verl.compat.reward_loop",
    "verl.experimental.reward_loop.reward_manager.base": "verl.compat.reward_loop_managers",
    "verl.experimental.reward_loop.reward_manager.dapo": "verl.compat.reward_loop_managers",
    "verl.experimental.reward_loop.reward_manager.limited": "verl.compat.reward_loop_managers",
    "verl.experimental.reward_loop.reward_manager.naive": "verl.compat.reward_loop_managers",
    "verl.experimental.reward_loop.reward_manager.registry": "verl.compat.reward_loop_managers",
    "verl.experimental.reward_loop.reward_manager.remote": "verl.compat.reward_loop_managers",
    "verl.experimental.reward_loop.reward_model": "verl.reward.served",
    "verl.interactions.utils.interaction_registry": f"{_INTERACTIONS}.interaction_registry",
    "verl.models.transformers.monkey_patch": "verl.compat.monkey_patch",
    "verl.single_controller.base.decorator": "verl.compat.decorator",
    "verl.single_controller.ray.base": "verl.compat.ray_base",
    "verl.tools.function_tool": "verl.compat.function_tool",
    "verl.tools.utils.tool_registry": f"{_TOOLS}.tool_registry",
    "verl.trainer.config.algorithm": "verl.config.algorithm",
    "verl.trainer.config.config": "verl.config.common",
    "verl.trainer.main_ppo_v0": "verl.compat.main_ppo_v0",
    "verl.trainer.ppo.core_algos": "verl.compat.core_algos",
    "verl.trainer.ppo.reward": "verl.compat.reward",
    "verl.trainer.sft_trainer": "verl.compat.sft_trainer",
    "verl.utils.attention_utils": "verl.compat.attention_utils",
    "verl.utils.chat_template": "verl.compat.chat_template",
    "verl.utils.checkpoint.checkpoint_manager": "verl.compat.checkpoint_manager",
    "verl.utils.checkpoint.fsdp_checkpoint_manager": "verl.training.checkpoint.fsdp_checkpoint_manager",
    "verl.utils.dataset.rl_dataset": "verl.data.rl_dataset",
    "verl.utils.dataset.sft_dataset": "verl.data.sft_dataset",
    "verl.utils.dataset.spd_dataset": "recipe.spd.data.dataset",
    "verl.utils.debug.metrics": "verl.algos.log_prob_metrics",
    "verl.utils.debug.performance": "verl.compat.profiler",
    "verl.utils.device": "verl.compat.device",
    "verl.utils.flops_counter": "verl.training.flops_counter",
    "verl.utils.fsdp_utils": "verl.compat.fsdp_utils",
    "verl.utils.metric.validation": "verl.trainer.run.validation_metrics",
    "verl.utils.model": "verl.compat.model",
    "verl.utils.profiler.config": "verl.config.profiler",
    "verl.utils.profiler.performance": "verl.compat.profiler",
    "verl.utils.py_functional": "verl.compat.py_functional",
    "verl.utils.ray_utils": "verl.compat.ray_utils",
    "verl.utils.reward_score.sandbox_fusion.utils": "verl.compat.sandbox_fusion",
    "verl.utils.reward_score.spd_scorer_reward": "recipe.spd.reward",
    "verl.utils.rollout_skip": "verl.compat.rollout_skip",
    "verl.utils.rollout_trace": "verl.agents.rollout_trace",
    "verl.utils.tensordict_utils": "verl.compat.tensordict_utils",
    "verl.utils.torch_dtypes": "verl.compat.torch_dtypes",
    "verl.utils.torch_functional": "verl.compat.torch_functional",
    "verl.utils.ulysses": "verl.compat.ulysses",
    "verl.workers.config.critic": "verl.config.critic",
    "verl.workers.config.engine": "verl.config.engine",
    "verl.workers.config.model": "verl.config.model",
    "verl.workers.config.optimizer": "verl.config.optimizer",
    "verl.workers.config.reward_model": "verl.config.reward_model",
    "verl.workers.config.rollout": "verl.config.rollout",
    "verl.workers.fsdp_workers": "verl.compat.fsdp_workers",
    "verl.workers.reward_manager.abstract": f"{_MANAGERS}.base",
    "verl.workers.reward_manager.registry": f"{_MANAGERS}.base",
    "verl.workers.rollout.llm_server": "verl.compat.llm_server",
    "verl.workers.rollout.spd_rollout": "recipe.spd.rollout.spd_rollout",
}

_HELPERS = "verl.compat.helpers"
_PROFILER = (
    "verl.config.profiler:*", "verl.profiling.profile:*", "verl.compat.profiler:*",
    "verl.single_controller.base.profiling:DistProfilerExtension", "verl.utils.import_utils:is_nvtx_available",
)
NAMES = {
    "verl.experimental": (),
    "verl.experimental.agent_loop": (f"{_LOOPS}:*", "verl.compat.agent_loop:AgentLoopManager"),
    "verl.experimental.agent_loop.base": (
        f"{_LOOPS}.base:AgentLoopBase,AgentLoopOutput", "verl.utils.tokenizer:stop_ids"
    ),
    "verl.experimental.agent_loop.utils": (f"{_LOOPS}.registry:resolve_config_path",),
    "verl.experimental.dataset": (),
    "verl.experimental.dynamic_dataset": (),
    "verl.experimental.reward_loop": (
        "verl.compat.reward_loop:RewardLoopManager,RewardLoopWorker", "verl.reward.served:RewardModelManager",
    ),
    "verl.experimental.reward_loop.reward_manager": (
        "verl.compat.reward_loop_managers:DAPORewardManager,NaiveRewardManager,RateLimitedRewardManager",
        "verl.compat.reward_loop_managers:RemoteRewardManager,get_reward_manager_cls,register",
    ),
    "verl.interactions.utils": (),
    "verl.models.transformers": (),
    "verl.tools": (f"{_TOOLS}:*",),
    "verl.tools.tool_registry": (
        f"{_TOOLS}.tool_registry:ToolType,get_tool_class,initialize_tools_from_config", f"{_HELPERS}:load_all_tools",
    ),
    "verl.tools.utils": (),
    "verl.trainer.constants_ppo": (f"{_HELPERS}:PPO_RAY_RUNTIME_ENV,get_ppo_ray_runtime_env",),
    "verl.trainer.ppo.rollout_corr_helper": (
        "verl.algos.rollout_correction:*", f"{_HELPERS}:apply_bypass_mode",
    ),
    "verl.utils.checkpoint": ("verl.training.checkpoint:*", "verl.compat.checkpoint_manager:*"),
    "verl.utils.config": (
        "verl.config.compose:forced_override,hydra_main,omega_conf_to_dataclass",
        f"{_HELPERS}:update_dict_with_config,validate_config",
    ),
    "verl.utils.dataset": ("verl.data:RLHFDataset,SFTDataset,collate_fn,get_dataset_class",),
    "verl.utils.dataset.multiturn_sft_dataset": (
        "verl.data.multiturn_sft_dataset:MultiTurnSFTDataset", f"{_HELPERS}:convert_nested_value_to_list_recursive",
    ),
    "verl.utils.debug": _PROFILER,
    "verl.utils.groupwise": ("verl.algos.advantage:as_torch_index",),
    "verl.utils.hdfs_io": ("verl.utils.fs:copy,exists,makedirs",),
    "verl.utils.memory_utils": (f"{_HELPERS}:aggressive_empty_cache",),
    "verl.utils.profiler": _PROFILER,
    "verl.utils.profiler.profile": (
        "verl.profiling.profile:*", "verl.single_controller.base.profiling:DistProfilerExtension",
    ),
    "verl.utils.seqlen_balancing": (
        "verl.protocol.seqlen_balancing:*", f"{_HELPERS}:get_reverse_idx,restore_dynamic_batch",
    ),
    "verl.utils.reward_score.sandbox_fusion": (
        f"{_RULES}.sandbox_fusion:SandboxServiceError,check_correctness,compute_score",
    ),
    "verl.workers": (),
    "verl.workers.config": (
        "verl.config.common:BaseModelConfig,CheckpointConfig,ModuleConfig,RewardManagerConfig",
        "verl.config.profiler:ProfilerConfig,TorchMemoryToolConfig",
        "verl.config.sandbox:SandboxConfig",
        "verl.config.actor:ActorConfig,FSDPActorConfig,FSDPRefConfig,PolicyLossConfig",
        "verl.config.critic:CriticConfig,FSDPCriticConfig,FSDPCriticModelCfg",
        "verl.config.engine:EngineConfig,FSDPEngineConfig",
        "verl.config.model:HFModelConfig,PluginConfig",
        "verl.config.optimizer:FSDPOptimizerConfig,OptimizerConfig,build_optimizer",
        "verl.config.reward_model:RewardModelConfig,RewardModelModelConfig,SandboxFusionConfig",
        "verl.config.rollout:AgentLoopConfig,CustomAsyncServerConfig,MultiTurnConfig,PrometheusConfig",
        "verl.config.rollout:RolloutConfig,SamplingConfig,ServerConfig,TraceConfig",
    ),
    "verl.workers.engine_workers": ("verl.compat.fsdp_workers:ActorRolloutRefWorker",),
    "verl.workers.config.actor": ("verl.config.actor:*", f"{_HELPERS}:RouterReplayConfig"),
}

_CONFIG = {
    "verl.config.algorithm": ("AlgoConfig", "FilterGroupsConfig", "KLControlConfig", "RolloutCorrectionConfig"),
    "verl.config.common": (
        "BaseModelConfig", "CheckpointConfig", "ModuleConfig", "ProfileConfig", "RewardManagerConfig", "TrainerConfig",
    ),
    "verl.config.data": ("DataConfig", "SamplerConfig"),
    "verl.config.sft": ("SFTConfig", "SFTDataConfig", "SFTModelConfig", "SFTOptimConfig", "SFTTrainerConfig"),
}
LIVE_PACKAGES = {
    "verl.trainer.config": {name: home for home, names in _CONFIG.items() for name in names},
    "verl.utils": {
        "as_torch_index": "verl.algos.advantage",
        "hf_processor": "verl.utils.tokenizer",
        "hf_tokenizer": "verl.utils.tokenizer",
        "omega_conf_to_dataclass": "verl.config.compose",
        "validate_config": _HELPERS,
    },
}

REMOVED = {
    "verl.utils.checkpoint.checkpoint_handler": "verl.training.checkpoint.publish writes and finds checkpoints.",
    "verl.utils.dataset.rm_dataset": "reward models are served, not trained; see docs/rewards.md.",
    "verl.workers.rollout.schemas": "verl.agents.conversation holds the tokens of a conversation; see docs/agents.md.",
}
