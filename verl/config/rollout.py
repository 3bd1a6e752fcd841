"""Settings of the rollout: sampling, engine, validation, multi-turn."""

from dataclasses import dataclass, field
from typing import Any

from omegaconf import MISSING

from verl.base_config import BaseConfig
from verl.config.common import ModuleConfig
from verl.config.fields import setting
from verl.utils.profiler import ProfilerConfig

ROLLOUTS_OF_THE_ACTOR = ("hf", "spd")  # these generate with the actor's own module: no second engine, no second weights


@dataclass
class SamplingConfig(BaseConfig, section="sampling"):
    """How tokens are drawn; top_k -1 and top_p 1 turn those filters off."""

    temperature: float = setting(1.0, low=0)
    top_k: int = setting(-1, low=-1)
    top_p: float = setting(1.0, above=0, high=1)
    do_sample: bool = True
    n: int = setting(1, low=1)


@dataclass
class MultiTurnConfig(BaseConfig, section="rollout.multi_turn", mutable=("max_assistant_turns", "max_user_turns")):
    """Turns with tools and interactions."""

    enable: bool = False
    max_assistant_turns: int | None = setting(None, low=1)
    tool_config_path: str | None = None
    max_user_turns: int | None = setting(None, low=1)
    max_parallel_calls: int = setting(1, low=1)
    max_tool_response_length: int = setting(256, low=1)
    tool_response_truncate_side: str = setting("middle", choices=("left", "right", "middle"))
    interaction_config_path: str | None = None
    use_inference_chat_template: bool = False
    tokenization_sanity_check_mode: str = setting("strict", choices=("disable", "strict", "ignore_strippable"))
    format: str = "hermes"
    num_repeat_rollouts: int | None = setting(None, low=1)


@dataclass
class CustomAsyncServerConfig(ModuleConfig, section="rollout.agent.custom_async_server"):
    """A server class of the user's own, by file and name."""


@dataclass
class AgentLoopConfig(BaseConfig, section="rollout.agent"):
    """Workers that drive conversations."""

    num_workers: int = setting(8, low=1)
    default_agent_loop: str = "single_turn_agent"
    agent_loop_config_path: str | None = None
    custom_async_server: CustomAsyncServerConfig = field(default_factory=CustomAsyncServerConfig)
    agent_loop_manager_class: str | None = None


@dataclass
class TraceConfig(BaseConfig, section="rollout.trace"):
    """Where single rollouts are traced to."""

    backend: str | None = setting(None, choices=("mlflow", "weave"))
    token2text: bool = False
    max_samples_per_step_per_worker: int | None = setting(None, low=1)


@dataclass
class ServerConfig(BaseConfig, section="rollout.server"):
    """Patience with a server: seconds, attempts, connections."""

    timeout: float = setting(60.0, above=0)
    max_attempts: int = setting(3, low=1)
    retry_delay: float = setting(2.0, low=0)
    max_connections: int = setting(1000, low=1)
    max_start_wait_time: float = setting(300.0, above=0)


@dataclass
class PrometheusConfig(BaseConfig, section="rollout.prometheus"):
    """Scraping of the servers' metrics."""

    enable: bool = False
    port: int = setting(9090, low=1, high=65535)
    file: str = "/tmp/ray/session_latest/metrics/prometheus/prometheus.yml"
    served_model_name: str | None = None


@dataclass
class RolloutConfig(BaseConfig, section="rollout", mutable=("max_model_len", "load_format")):
    """How completions are generated; prompt_length and response_length are in tokens."""

    name: str | None = MISSING
    mode: str = setting("sync", choices=("sync", "async"))
    temperature: float = setting(1.0, low=0)
    top_k: int = setting(-1, low=-1)
    top_p: float = setting(1.0, above=0, high=1)
    do_sample: bool = True
    n: int = setting(1, low=1)
    repetition_penalty: float = setting(1.0, above=0)
    over_sample_rate: float = setting(0.0, low=0, high=1)
    prompt_length: int = setting(512, low=1)
    response_length: int = setting(512, low=1)
    dtype: str = setting("bfloat16", choices=("bfloat16", "float16", "float32", "bf16", "fp16", "fp32", "auto"))
    gpu_memory_utilization: float = setting(0.5, above=0, high=1)
    ignore_eos: bool = False
    enforce_eager: bool = False
    cudagraph_capture_sizes: list[int] | None = None
    free_cache_engine: bool = True
    data_parallel_size: int = setting(1, low=1)
    expert_parallel_size: int = setting(1, low=1)
    tensor_model_parallel_size: int = setting(1, low=1)
    pipeline_model_parallel_size: int = setting(1, low=1)
    max_num_batched_tokens: int = setting(8192, low=1)
    logprobs_mode: str | None = "processed_logprobs"
    val_kwargs: SamplingConfig = field(default_factory=lambda: SamplingConfig(temperature=0, do_sample=False))
    max_model_len: int | None = setting(None, low=1)
    max_num_seqs: int = setting(1024, low=1)
    log_prob_micro_batch_size: int | None = setting(None, low=1)
    log_prob_micro_batch_size_per_gpu: int | None = setting(None, low=1)
    log_prob_use_dynamic_bsz: bool = False
    log_prob_max_token_len_per_gpu: int = setting(16384, low=1)
    disable_log_stats: bool = True
    multi_stage_wake_up: bool = False
    engine_kwargs: dict[str, Any] = field(default_factory=lambda: {"vllm": {}, "sglang": {}})
    calculate_log_probs: bool = False
    agent: AgentLoopConfig = field(default_factory=AgentLoopConfig)
    trace: TraceConfig = field(default_factory=TraceConfig)
    multi_turn: MultiTurnConfig = field(default_factory=MultiTurnConfig)
    server: ServerConfig = field(default_factory=ServerConfig)
    prometheus: PrometheusConfig = field(default_factory=PrometheusConfig)
    custom: dict[str, Any] | None = field(default_factory=dict)
    update_weights_bucket_megabytes: int = setting(512, low=1)
    skip_rollout: bool = False
    skip_dump_dir: str = "/tmp/rollout_dump"
    profiler: ProfilerConfig | None = None
    enable_chunked_prefill: bool = True
    enable_prefix_caching: bool = True
    load_format: str = "dummy"
    layered_summon: bool = False
    layer_name_map: dict[str, Any] = field(default_factory=dict)
    sglang_engine_mode: str = "local"
    limit_images: int | None = setting(None, low=0)
    skip_tokenizer_init: bool = False
    quantization: str | None = None
    quantization_config_file: str | None = None
    enable_sleep_mode: bool = True
