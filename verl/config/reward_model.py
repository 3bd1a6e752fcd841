"""Settings of the reward model and of the sandbox that grades code."""

from dataclasses import dataclass
from typing import Any

from verl.config.base import BaseConfig
from verl.config.common import SEQUENCE_RANKS, SUM_OVER_RANKS, BaseModelConfig
from verl.config.engine import FSDPEngineConfig
from verl.config.fields import setting
from verl.config.profiler import ProfilerConfig
from verl.config.sandbox import SandboxConfig

_SERVERS = "A rollout of the reward model is vLLM's server; SGLang does not serve reward models here."


@dataclass
class SandboxFusionConfig(BaseConfig, section="reward_model.sandbox_fusion"):
    """A remote sandbox service for code rewards."""

    url: str | None = setting(None, "Address such as http://host:8080/run_code; null uses the local sandbox.")
    max_concurrent: int = setting(64, "Maximum number of concurrent requests.", low=1)
    memory_limit_mb: int = setting(1024, "MiB of memory for one program.", low=1)


@dataclass
class RewardModelModelConfig(BaseModelConfig, section="reward_model.model"):
    """The reward model; input_tokenizer is the policy's, whose text is tokenised again for the reward model."""

    path: str = setting("~/models/FsfairX-LLaMA3-RM-v0.1", "Folder or hub name of the reward model.")
    input_tokenizer: str | None = setting(None, "Tokenizer of the scored text where it is not the reward model's own.")
    use_shm: bool = setting(False, "Copy weights to /dev/shm first, once for all ranks of a machine.")
    use_remove_padding: bool = setting(False, "Remove padding before the forward.")
    fsdp_config: FSDPEngineConfig = setting(lambda: FSDPEngineConfig(forward_only=True), "The reward model's engine.")


@dataclass
class RewardModelRolloutConfig(BaseConfig, section="reward_model.rollout"):
    """Servers of the reward model; without `name` the ranks themselves run the model, on FSDP2."""

    name: str | None = setting(
        None, "vllm serves the reward model; null runs it in the ranks.", choices=("vllm",), hint=_SERVERS
    )
    dtype: str = setting("bfloat16", "Type of weights and computation.")
    gpu_memory_utilization: float = setting(0.5, "Share of the GPU's memory for a server.", above=0, high=1)
    enforce_eager: bool = setting(True, "Run without CUDA graphs.")
    cudagraph_capture_sizes: list[int] | None = setting(
        None, "Batch sizes with CUDA graphs; null lets the engine choose."
    )
    expert_parallel_size: int = setting(1, "Ranks of one server that split the experts; above 1: all of them.", low=1)
    tensor_model_parallel_size: int = setting(1, "Ranks of one server that split each layer.", low=1)
    max_num_batched_tokens: int = setting(8192, "Tokens that a server processes at a time.", low=1)
    max_model_len: int | None = setting(None, "Maximum sequence length; null: prompt plus response.", low=1)
    max_num_seqs: int = setting(1024, "Sequences that a server processes at a time.", low=1)
    load_format: str = setting("auto", "vLLM's format of the weight files.")
    engine_kwargs: dict[str, Any] = setting(dict, "vllm: {option: value} of vLLM's command line, with underscores.")
    limit_images: int | None = setting(None, "Images of a prompt.", low=0)
    enable_chunked_prefill: bool = setting(True, "Prefill long prompts in chunks.")
    enable_prefix_caching: bool = setting(True, "Keep the KV cache of shared prefixes.")
    disable_log_stats: bool = setting(True, "Turn vLLM's own statistics off.")
    prompt_length: int = setting(2048, "Tokens of a prompt.", low=1)
    response_length: int = setting(2048, "Tokens of an answer.", low=1)


@dataclass
class GradingConfig(BaseConfig, section="reward_model"):
    """The processes that call reward functions, and the sandboxes of programs."""

    num_workers: int = setting(1, "Reward processes; 0: in the trainer, without time limits; prime: all cores.", low=0)
    error: str = setting(
        "raise",
        "A reward that raises or hangs: raise ends the run and names the row, drop skips it.",
        choices=("raise", "drop"),
    )
    item_timeout: float = setting(300.0, "Seconds of one row's reward before its process is killed.", above=0)
    sandbox_fusion: SandboxFusionConfig = setting(SandboxFusionConfig, "A remote sandbox service for code rewards.")
    sandbox: SandboxConfig = setting(SandboxConfig, "The local sandbox; limits of one program on one test case.")


@dataclass
class RewardModelConfig(GradingConfig):
    """Where scores come from: rule rewards through a manager, or a model."""

    reward_manager: str | None = setting(
        "naive", "Registered name of the reward manager: naive, batch, dapo, prime, rate_limited, remote."
    )
    enable: bool = setting(False, "Score with the model reward_model.model.path.")
    enable_resource_pool: bool = setting(False, "Give the reward model ranks of its own: nnodes x n_gpus_per_node.")
    n_gpus_per_node: int = setting(8, "Ranks of the reward model on each machine, with enable_resource_pool.", low=0)
    nnodes: int = setting(0, "Machines of the reward model, with enable_resource_pool.", low=0)
    batch_timeout: float = setting(3600.0, "Seconds of one call of a batch reward function.", above=0)
    judged_text: str = setting(
        "model",
        "What built-in rules and reward models read: model, what the model wrote, or conversation, also tools' text.",
        choices=("model", "conversation"),
    )
    launch_reward_fn_async: bool = setting(
        False, "Compute rewards in parallel with old log-probs, reference log-probs and values."
    )
    use_reward_loop: bool = setting(
        True, "With agent loops: grade samples as they finish, if the reward manager scores each by itself."
    )
    reward_loop_source: str = setting(
        "register",
        "importlib takes the manager of single samples that the next two keys name.",
        choices=("register", "importlib"),
    )
    reward_loop_module_path: str | None = setting(
        None, "File or pkg://package.module of the manager with reward_loop_source=importlib."
    )
    reward_loop_class_name: str | None = setting(
        None, "Class of the manager in reward_loop_module_path, a subclass of RewardManagerBase."
    )
    max_concurrent: int = setting(1, "Manager rate_limited: requests at a time.", low=1)
    max_rpm: float | None = setting(None, "Manager rate_limited: requests per minute.", above=0)
    max_tpm: float | None = setting(None, "Manager rate_limited: tokens per minute.", above=0)
    estimated_tokens_per_request: int = setting(2000, "Manager rate_limited: tokens that one request counts.", low=1)
    timeout: float = setting(300.0, "Manager rate_limited: seconds of one request.", above=0)
    use_dynamic_bsz: bool = setting(False, "Cut micro-batches by tokens.")
    micro_batch_size: int | None = setting(None, SUM_OVER_RANKS, low=1)
    micro_batch_size_per_gpu: int | None = setting(None, "Samples per forward of the reward model on one rank.", low=1)
    forward_max_token_len_per_gpu: int = setting(32768, "Tokens per forward on one rank with use_dynamic_bsz.", low=1)
    ulysses_sequence_parallel_size: int = setting(1, SEQUENCE_RANKS, low=1)
    max_length: int | None = setting(None, "Maximum tokens of a sequence; null: prompt plus response.", low=1)
    reward_kwargs: dict[str, Any] = setting(dict, "Keyword arguments of the reward manager; any key.")
    overlong_buffer: dict[str, Any] | None = setting(
        None, "Manager dapo's penalty near the length limit: enable, len, penalty_factor, log."
    )
    profiler: ProfilerConfig = setting(ProfilerConfig, "Profiling of this role.")
    rollout: RewardModelRolloutConfig = setting(RewardModelRolloutConfig, "Servers of the reward model.")
    model: RewardModelModelConfig = setting(RewardModelModelConfig, "The reward model.")
