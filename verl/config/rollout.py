"""Settings of the rollout: sampling, engine, validation, multi-turn."""

from dataclasses import dataclass
from typing import Any

from omegaconf import MISSING

from verl.config.base import BaseConfig
from verl.config.common import SUM_OVER_RANKS, ModuleConfig
from verl.config.fields import setting
from verl.config.inert import ROLLOUTS_OF_THE_ACTOR as ROLLOUTS_OF_THE_ACTOR
from verl.config.profiler import ProfilerConfig

CPU_CACHE_BYTES = 1 << 30  # an engine's keys and values on a CPU rank, unless engine_kwargs says otherwise


@dataclass
class SamplingConfig(BaseConfig, section="sampling"):
    """How tokens are drawn; top_k -1 and top_p 1 turn those filters off."""

    temperature: float = setting(1.0, "Sampling temperature.", low=0)
    top_k: int = setting(-1, "Number of most likely tokens to draw from; -1 for all.", low=-1)
    top_p: float = setting(1.0, "Probability mass to draw from.", above=0, high=1)
    do_sample: bool = setting(True, "Draw tokens; false takes the most likely one.")
    n: int = setting(1, "Samples of each prompt.", low=1)


@dataclass
class MultiTurnConfig(BaseConfig, section="rollout.multi_turn"):
    """Turns with tools and interactions."""

    enable: bool = setting(False, "Conversations of several turns; needs rollout.mode=async and a tool agent loop.")
    max_assistant_turns: int | None = setting(None, "Maximum turns of the assistant; null for no limit.", low=1)
    tool_config_path: str | None = setting(
        None, "Yaml file whose list `tools` has class_name and config of each tool; see docs/agents.md."
    )
    function_tool_path: str | None = setting(None, "Python file whose public functions are tools as well.")
    max_user_turns: int | None = setting(None, "Maximum turns of the user; null for no limit.", low=1)
    max_parallel_calls: int = setting(1, "Tool calls of one turn that run in parallel.", low=1)
    max_tool_response_length: int = setting(256, "Characters of a tool's response that are kept.", low=1)
    tool_response_truncate_side: str = setting(
        "middle", "Side at which a longer response is cut.", choices=("left", "right", "middle")
    )
    tool_timeout: float = setting(60.0, "Seconds for a call of a tool or an answer of an interaction.", above=0)
    interaction_config_path: str | None = setting(
        None, "Yaml file whose list `interaction` has class_name, name and config of each interaction."
    )
    use_inference_chat_template: bool = setting(
        False, "Generate from the messages so far, encoded at once: the template may drop reasoning of earlier turns."
    )
    row_per_turn: bool = setting(
        False,
        "Generate as with use_inference_chat_template, and train each turn as a row after the prompt it was given.",
    )
    tokenization_sanity_check_mode: str = setting(
        "strict",
        "Compare a conversation's ids with its finished messages, encoded at once, and warn of the first difference.",
        choices=("disable", "strict", "ignore_strippable"),
    )
    format: str = setting("hermes", "Format of tool calls: hermes, llama3_json, ... (docs/models.md), or your own.")
    add_turn_rewards: bool = setting(
        False, "Add the rewards of tools and interactions during the conversation to its score."
    )
    journal_tool_calls: bool = setting(
        True,
        "Keep results of tool calls in tool_journal/ of the run, so that a killed run does not repeat them.",
    )


@dataclass
class CustomAsyncServerConfig(ModuleConfig, section="rollout.agent.custom_async_server"):
    """A RolloutReplica of the user's own, by file and name."""


@dataclass
class AgentLoopConfig(BaseConfig, section="rollout.agent"):
    """Workers that drive conversations."""

    num_workers: int = setting(8, "Processes (Ray actors) that hold the conversations.", low=1)
    default_agent_loop: str = setting(
        "single_turn_agent",
        "Agent loop of rows without a column agent_name: single_turn_agent, tool_agent, or your own.",
    )
    agent_loop_config_path: str | None = setting(
        None, "Yaml file with a list of further agent loops, each with name and _target_ (package.module.Class)."
    )
    custom_async_server: CustomAsyncServerConfig = setting(
        CustomAsyncServerConfig, "RolloutReplica class in place of that of rollout.name."
    )
    agent_loop_manager_class: str | None = setting(None, "Class that manages the workers; null for the built-in one.")
    command: str | None = setting(
        None, "Program that holds the conversation of a row through the gateway; see docs/environments.md."
    )
    command_reward: str = setting(
        "program",
        "program: each program reports its reward, and fails if it does not; function: the run's reward function.",
        choices=("program", "function"),
    )
    command_timeout: float = setting(600.0, "Seconds of a program.", above=0)
    command_memory_mb: int = setting(4096, "MiB of memory of a program with all its processes.", low=1)
    command_processes: int = setting(64, "Processes of a program at the same time.", low=1)
    command_requests: int = setting(256, "Requests of a program; it fails if it makes more.", low=1)
    command_concurrency: int = setting(64, "Programs of one worker that run at the same time.", low=1)
    command_journal: bool = setting(
        True,
        "Keep conversations of programs in tool_journal/ of the run, so that a killed run does not repeat them.",
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.command is not None and self.default_agent_loop == AgentLoopConfig.default_agent_loop:
            object.__setattr__(self, "default_agent_loop", "program_agent")

    @property
    def reports_rewards(self) -> bool:
        """Whether programs report the rewards, so that the run needs no reward function."""
        return self.command is not None and self.command_reward == "program"


@dataclass
class TraceConfig(BaseConfig, section="rollout.trace"):
    """Where single rollouts are traced to."""

    backend: str | None = setting(
        None,
        "jsonl (files in rollout_traces/ of the run), mlflow or weave; null for none.",
        choices=("jsonl", "mlflow", "weave"),
    )
    token2text: bool = setting(False, "Store text next to token ids.")
    max_samples_per_step_per_worker: int | None = setting(
        None, "Traced samples per step and worker; null for all.", low=1
    )


@dataclass
class ServerConfig(BaseConfig, section="rollout.server"):
    """Time limits and retries with a server: seconds, attempts, connections."""

    timeout: float = setting(60.0, "Seconds to wait for a response.", above=0)
    max_attempts: int = setting(3, "Attempts of one request.", low=1)
    retry_delay: float = setting(2.0, "Seconds before the next attempt.", low=0)
    max_connections: int = setting(1000, "Maximum number of connections.", low=1)
    max_start_wait_time: float = setting(
        300.0, "Seconds until a server of SGLang, of a reward model or of a replica's own ranks must be ready.", above=0
    )


@dataclass
class PrometheusConfig(BaseConfig, section="rollout.prometheus"):
    """The servers' metrics, at /metrics, for a Prometheus on the trainer's machine."""

    enable: bool = setting(False, "Let engines keep statistics, and enter the servers into Prometheus' config file.")
    port: int = setting(9090, "Port at which that Prometheus reloads its configuration.", low=1, high=65535)
    file: str = setting(
        "/tmp/ray/session_latest/metrics/prometheus/prometheus.yml", "Prometheus' config file; other jobs in it stay."
    )
    served_model_name: str | None = setting(None, "Name of the model in the metrics; null: last part of its path.")


@dataclass
class SpeculativeConfig(BaseConfig, section="rollout.speculative"):
    """Drafts that the engine verifies several at a time; samples keep the model's distribution."""

    method: str | None = setting(
        None,
        "ngram (tokens that followed the same tokens before), draft_model, or null for none.",
        choices=("ngram", "draft_model"),
    )
    draft_path: str | None = setting(None, "Folder of the draft model.")
    num_tokens: int = setting(4, "Draft tokens per forward of the model.", low=1)
    refresh_every: int = setting(
        0, "Train the draft model on the samples of every so many weight updates (mode=sync); 0: never.", low=0
    )
    refresh_lr: float = setting(1e-4, "Learning rate of that training.", above=0)

    def __post_init__(self) -> None:
        super().__post_init__()
        if (self.method == "draft_model") != (self.draft_path is not None):
            raise ValueError(
                f"rollout.speculative.method={self.method} with rollout.speculative.draft_path={self.draft_path}: "
                "draft_model needs the folder of a draft model, the other methods have none."
            )
        if self.refresh_every and self.method != "draft_model":
            raise ValueError(
                f"rollout.speculative.refresh_every={self.refresh_every} needs rollout.speculative.method=draft_model, "
                f"not {self.method}: set that, or refresh_every=0."
            )


@dataclass
class RolloutConfig(BaseConfig, section="rollout"):
    """How completions are generated; prompt_length and response_length are in tokens."""

    name: str | None = setting(
        MISSING, "Registered name of the rollout: hf and refine (the actor's own module), vllm, sglang, spd."
    )
    mode: str = setting(
        "sync",
        "sync: the ranks answer batches of prompts; async: agent loops hold conversations against the ranks' servers.",
        choices=("sync", "async"),
    )
    temperature: float = setting(1.0, "Sampling temperature; log-probs are taken at the same one.", low=0)
    top_k: int = setting(-1, "Number of most likely tokens to draw from; -1 for all.", low=-1)
    top_p: float = setting(1.0, "Probability mass to draw from.", above=0, high=1)
    do_sample: bool = setting(True, "Draw tokens; false takes the most likely one.")
    seed: int = setting(42, "Seed of the samples, in validation too.", low=0)
    n: int = setting(1, "Samples of each prompt.", low=1)
    repetition_penalty: float = setting(1.0, "Penalty of repeated tokens; 1 for none.", above=0)
    over_sample_rate: float = setting(
        0.0, "Share of a step's samples that are cancelled once the others have ended.", low=0, high=1
    )
    prompt_length: int = setting(512, "Tokens of a prompt.", low=1)
    response_length: int = setting(512, "Tokens of a response.", low=1)
    dtype: str = setting(
        "bfloat16",
        "Type of weights and computation.",
        choices=("bfloat16", "float16", "float32", "bf16", "fp16", "fp32", "auto"),
    )
    gpu_memory_utilization: float = setting(
        0.5, "Share of the GPU's memory for vLLM's weights and KV cache.", above=0, high=1
    )
    ignore_eos: bool = setting(False, "Continue after the end-of-sequence token.")
    stop_token_ids: list[int] | None = setting(
        None,
        "Ids that end an answer; null: the tokenizer's eos_token and every eos_token_id of generation_config.json.",
    )
    enforce_eager: bool = setting(False, "Run without CUDA graphs, as vLLM on a CPU always does.")
    cudagraph_capture_sizes: list[int] | None = setting(
        None, "Batch sizes with CUDA graphs; null lets the engine choose."
    )
    free_cache_engine: bool = setting(True, "Free the KV cache during training.")
    data_parallel_size: int = setting(1, "Engines that split the requests.", low=1)
    expert_parallel_size: int = setting(
        1, "Ranks of one engine that split the experts: 1, or tensor_model_parallel_size.", low=1
    )
    tensor_model_parallel_size: int = setting(1, "Ranks of one engine that split each layer.", low=1)
    max_num_batched_tokens: int = setting(8192, "Tokens that the engine processes at a time.", low=1)
    logprobs_mode: str | None = setting(
        "processed_logprobs",
        "Which log-probs the engine returns; SGLang's are those after temperature, before top-k and top-p.",
    )
    val_kwargs: SamplingConfig = setting(lambda: SamplingConfig(temperature=0, do_sample=False), "Validation sampling.")
    max_model_len: int | None = setting(None, "Maximum sequence length; null: prompt plus response.", low=1)
    max_num_seqs: int = setting(1024, "Sequences that the engine processes at a time.", low=1)
    prompt_queue: bool = setting(
        False,
        "Engines take prompts from one queue as they have room (max_num_seqs) instead of an equal share each; offline "
        "generation always does.",
    )
    log_prob_micro_batch_size: int | None = setting(None, SUM_OVER_RANKS, low=1)
    log_prob_micro_batch_size_per_gpu: int | None = setting(
        None, "Samples per old log-prob forward of one rank.", low=1
    )
    log_prob_use_dynamic_bsz: bool = setting(
        False, "Cut micro-batches of old log-probs by tokens (log_prob_max_token_len_per_gpu), not by samples."
    )
    log_prob_max_token_len_per_gpu: int = setting(16384, "Tokens per forward of the old log-probs on one rank.", low=1)
    disable_log_stats: bool = setting(True, "Turn the engine's own statistics off.")
    engine_kwargs: dict[str, Any] = setting(
        lambda: {"vllm": {}, "sglang": {}}, "Engine arguments without a key of their own, by engine; any key."
    )
    speculative: SpeculativeConfig = setting(SpeculativeConfig, "Speculative decoding.")
    calculate_log_probs: bool = setting(False, "Return the engine's log-probs and compare them with the actor's.")
    agent: AgentLoopConfig = setting(AgentLoopConfig, "Agent loop workers.")
    trace: TraceConfig = setting(TraceConfig, "Traces of single rollouts.")
    multi_turn: MultiTurnConfig = setting(MultiTurnConfig, "Conversations with tools.")
    server: ServerConfig = setting(ServerConfig, "Server time limits and retries.")
    prometheus: PrometheusConfig = setting(PrometheusConfig, "Server metrics.")
    custom: dict[str, Any] | None = setting(dict, "Settings for a rollout of your own; any key.")
    update_weights_bucket_megabytes: int = setting(
        512, "MiB of weights that the ranks gather at a time for the engine.", low=1
    )
    record_sampling_mask: bool = setting(
        True,
        "With top_p below 1 or top_k above 0, record the tokens that they leave, and renormalise the trainer's "
        "log-probs over them (docs/trust.md says which rollouts can).",
    )
    verify_weights_every: int = setting(
        50,
        "Compare the log-probs of a few samples with those of the trained weights: at the first weight update and at "
        "every so many; 1: at each, 0: never. A difference ends the run.",
        low=0,
    )
    skip_rollout: bool = setting(False, "Reuse the first generations, in later runs too.")
    skip_dump_dir: str = setting("/tmp/rollout_dump", "Folder of the generations that skip_rollout reuses.")
    profiler: ProfilerConfig | None = setting(ProfilerConfig, "Profiling of this role.")
    enable_chunked_prefill: bool = setting(True, "Prefill long prompts in chunks.")
    enable_prefix_caching: bool = setting(True, "Keep the KV cache of shared prefixes.")
    load_format: str = setting("dummy", "The engine's first weights: dummy (replaced by the actor's) or auto.")
    lora_as_adapter: bool = setting(
        False,
        "Send LoRA weights alone, as an adapter that the engine applies, instead of merged weights. In bfloat16 its "
        "log-probs are then closer to the trainer's.",
    )
    quantization: str | None = setting(None, "Quantization of the engine's weights; null for none.")
    quantization_config_file: str | None = setting(None, "JSON file with settings of `quantization`.")
    enable_sleep_mode: bool = setting(True, "Let the engine sleep.")

    @property
    def engine_returns_kept_tokens(self) -> bool:
        """Whether the engine's log-probs show which tokens top_k and top_p left: vLLM returns those of top_k tokens."""
        return self.name == "vllm" and self.top_k > 0 and self.logprobs_mode == "processed_logprobs"

    def __post_init__(self) -> None:
        super().__post_init__()
        size = self.tensor_model_parallel_size
        if self.expert_parallel_size not in (1, size, size * self.data_parallel_size):
            raise ValueError(
                f"rollout.expert_parallel_size={self.expert_parallel_size} must be 1, or the ranks of an engine: "
                f"rollout.tensor_model_parallel_size={size}. Set one of the two to the other."
            )
        if self.prompt_queue and self.name not in ROLLOUTS_OF_THE_ACTOR and (self.name, self.mode) != ("vllm", "sync"):
            raise ValueError(
                f"rollout.prompt_queue=true needs rollout.name=vllm and rollout.mode=sync, not {self.name} and "
                f"{self.mode}: agent loops (mode=async) always give a prompt to the server with the fewest requests. "
                "Leave the key out."
            )
        if self.prompt_queue and self.speculative["refresh_every"]:
            raise ValueError(
                "rollout.prompt_queue=true does not work with rollout.speculative.refresh_every, which trains an "
                "engine's draft model on the samples of its own ranks. Leave one of them out."
            )
        if self.name == "sglang":
            self._check_sglang()

    def _check_sglang(self) -> None:
        """Raise ValueError for settings that only vLLM has."""
        if self.logprobs_mode not in (None, RolloutConfig.logprobs_mode):
            key = f"logprobs_mode={self.logprobs_mode}"
            instead = "SGLang returns log-probs after temperature, before top-k and top-p. Leave the key out"
        elif (method := self.speculative["method"]) is not None:
            key = f"speculative.method={method}"
            instead = "leave it out; SGLang's own options (speculative_algorithm) go in rollout.engine_kwargs.sglang"
        elif self.lora_as_adapter:
            key, instead = "lora_as_adapter=true", "SGLang receives merged weights. Set the key to false"
        else:
            return
        raise ValueError(f"rollout.{key} does not work with rollout.name=sglang: {instead}.")
