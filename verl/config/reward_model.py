"""Settings of the reward model and of the sandbox that grades code."""

from dataclasses import dataclass, field
from typing import Any

from verl.base_config import BaseConfig
from verl.config.common import BaseModelConfig
from verl.config.engine import STRATEGIES, STRATEGY_HINT, FSDPEngineConfig
from verl.config.fields import setting
from verl.config.rollout import RolloutConfig
from verl.config.sandbox import SandboxConfig


@dataclass
class SandboxFusionConfig(BaseConfig, section="reward_model.sandbox_fusion"):
    """A remote sandbox service for code rewards."""

    url: str | None = None
    max_concurrent: int = setting(64, low=1)
    memory_limit_mb: int = setting(1024, low=1)


@dataclass
class RewardModelModelConfig(BaseModelConfig, section="reward_model.model"):
    """The reward model; input_tokenizer is the policy's, whose text is tokenised anew for the reward model."""

    path: str = "~/models/FsfairX-LLaMA3-RM-v0.1"
    input_tokenizer: str | None = None
    use_remove_padding: bool = False
    fsdp_config: FSDPEngineConfig = field(default_factory=lambda: FSDPEngineConfig(forward_only=True))


@dataclass
class RewardModelConfig(BaseConfig, section="reward_model"):
    """Where scores come from: rule rewards through a manager, or a model."""

    reward_manager: str | None = "naive"
    enable: bool = False
    enable_resource_pool: bool = False
    n_gpus_per_node: int = setting(8, low=0)
    nnodes: int = setting(0, low=0)
    strategy: str = setting("fsdp", choices=STRATEGIES, hint=STRATEGY_HINT)
    num_workers: int = setting(1, low=0)
    error: str = setting("raise", choices=("raise", "drop"))
    item_timeout: float = setting(300.0, above=0)
    batch_timeout: float = setting(3600.0, above=0)
    launch_reward_fn_async: bool = False
    use_reward_loop: bool = True
    use_dynamic_bsz: bool = False
    micro_batch_size: int | None = setting(None, low=1)
    micro_batch_size_per_gpu: int | None = setting(None, low=1)
    forward_max_token_len_per_gpu: int = setting(32768, low=1)
    ulysses_sequence_parallel_size: int = setting(1, low=1)
    max_length: int | None = setting(None, low=1)
    reward_kwargs: dict[str, Any] = field(default_factory=dict)
    overlong_buffer: dict[str, Any] | None = None
    rollout: RolloutConfig | None = None
    model: RewardModelModelConfig = field(default_factory=RewardModelModelConfig)
    sandbox_fusion: SandboxFusionConfig = field(default_factory=SandboxFusionConfig)
    sandbox: SandboxConfig = field(default_factory=SandboxConfig)
