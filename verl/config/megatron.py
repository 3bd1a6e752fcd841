"""The settings of ppo_megatron_trainer, which runs on FSDP2: what FSDP2 has as well is mapped, the rest is refused.

Mapped: offloading, seed, dtype, padding, tensor parallelism, the optimizer and its schedule. Ranks shard layers (FSDP2)
instead of sharing them out, so that the other parallel sizes must be 1.
"""

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from verl.config.actor import FSDPActorConfig, FSDPRefConfig
from verl.config.asynchronous import AsyncPPOConfig
from verl.config.base import BaseConfig
from verl.config.common import tensor_parallel_size
from verl.config.compose import select
from verl.config.critic import FSDPCriticConfig
from verl.config.engine import EngineConfig
from verl.config.fields import setting
from verl.config.optimizer import FSDPOptimizerConfig
from verl.config.ppo import ActorRolloutRefConfig, PPOConfig

STRATEGY = "Megatron's settings, on FSDP2."
SHARDED = "FSDP2 shards every layer, with all its experts, over the ranks"
WEIGHTS = "weights come from the model's folder, and checkpoints are those of FSDP2"
MODELS = "models are those of transformers"
SCHEDULES = {"constant": "constant", "linear": "linear", "cosine": "cosine", "WSD": "wsd"}
OPTIMIZERS = {"adam": "AdamW", "sgd": "SGD"}


@dataclass
class TransformerOverrides(BaseConfig, section="megatron.override_transformer_config"):
    """Megatron's settings of layers, as far as transformers' layers follow them."""

    recompute_granularity: str | None = setting(
        None,
        "full: recompute layers; selective: recompute_modules; null: as the model's enable_gradient_checkpointing.",
        choices=("full", "selective"),
    )
    recompute_modules: list[str] | None = setting(
        lambda: ["core_attn"],
        "Parts to recompute with selective: core_attn, which fused attention always does.",
        each_of=("core_attn",),
    )
    recompute_method: str | None = setting(None, "uniform, or null: recompute every layer.", choices=("uniform",))
    recompute_num_layers: int | None = setting(
        None, "1, or null: recompute each layer by itself.", low=1, high=1, hint="Layers are recomputed one by one."
    )
    attention_backend: str = setting(
        "flash",
        "Each of flash, fused and auto is PyTorch's fused attention, which takes its fastest kernel.",
        choices=("flash", "fused", "auto"),
        hint="Set attn_implementation in the model's override_config for another one.",
    )


def _check_recomputation(engine: Mapping[str, Any], model: Mapping[str, Any], keys: tuple[str, str]) -> None:
    """Raise ValueError where Megatron's key asks for another recomputation than the model's; `keys`: their sections."""
    asked = TransformerOverrides(**engine["override_transformer_config"]).recompute_granularity
    if asked is not None and model["enable_gradient_checkpointing"] not in (None, asked == "full"):
        rule = f"{keys[0]}.override_transformer_config.recompute_granularity={asked} contradicts"
        key, value = f"{keys[1]}.enable_gradient_checkpointing", model["enable_gradient_checkpointing"]
        raise ValueError(f"{rule} {key}={json.dumps(value)}. Set {key}={json.dumps(not value)}.")


@dataclass
class McoreEngineConfig(EngineConfig, section="megatron"):
    """Megatron's settings of a role, as far as FSDP2 has them."""

    _mutable_fields: ClassVar[Iterable[str]] = ("sequence_parallel",)
    strategy: str | None = setting("megatron", choices=("megatron",))
    grad_offload: bool = setting(False, "Free the GPU of gradients between updates.")
    use_remove_padding: bool = setting(True, "Remove padding before the forward.")
    tensor_model_parallel_size: int = tensor_parallel_size()
    expert_model_parallel_size: int = setting(1, "Ranks that share the experts.", fixed=SHARDED)
    expert_tensor_parallel_size: int | None = setting(None, "Ranks that split each expert.", fixed=SHARDED)
    pipeline_model_parallel_size: int = setting(1, "Stages of the pipeline.", fixed=SHARDED)
    virtual_pipeline_model_parallel_size: int | None = setting(None, "Virtual stages.", fixed=SHARDED)
    context_parallel_size: int = setting(1, "Ranks that share one sequence.", fixed="each rank keeps full sequences")
    sequence_parallel: bool = setting(True, "Split activations between layers among tensor parallel ranks.")
    use_distributed_optimizer: bool = setting(True, "Shard the optimizer's state.")
    use_dist_checkpointing: bool = setting(False, "Load weights from Megatron's checkpoint format.", fixed=WEIGHTS)
    dist_checkpointing_path: str | None = setting(None, "Folder of such a checkpoint.", fixed=WEIGHTS)
    dist_checkpointing_prefix: str = setting("", "Prefix of its keys.", fixed=WEIGHTS)
    override_ddp_config: dict[str, Any] = setting(dict, "Megatron's DDP settings; any key.", fixed="there is no DDP")
    override_transformer_config: TransformerOverrides = setting(TransformerOverrides, "Megatron's layer settings.")
    override_mcore_model_config: dict[str, Any] = setting(dict, "Settings of Megatron's models; any key.", fixed=MODELS)
    use_mbridge: bool = setting(True, "Convert weights by mbridge.")
    vanilla_mbridge: bool = setting(True, "Take the version of mbridge of its own repository.")

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.tensor_model_parallel_size == 1:
            self.sequence_parallel = False  # there is no other rank to keep parts of the tokens


@dataclass
class McoreOptimizerConfig(FSDPOptimizerConfig):
    """Megatron's names of the optimizer's and the schedule's settings; sets those of FSDPOptimizerConfig.

    `min_lr` becomes min_lr_ratio = min_lr / lr.
    """

    optimizer: str = setting("adam", "adam (AdamW) or sgd.", choices=(*OPTIMIZERS, *OPTIMIZERS.values()))
    lr_warmup_init: float = setting(0.0, "Learning rate at the first step.", fixed="warm-up begins at 0")
    lr_decay_steps: int | None = setting(None, "Steps of the decay.", fixed="the decay covers all steps")
    lr_decay_style: str = setting("constant", "Schedule after warm-up.", choices=tuple(SCHEDULES))
    min_lr: float = setting(0.0, "Final learning rate.", low=0)
    weight_decay_incr_style: str = setting("constant", "Schedule of weight decay.", fixed="weight decay is constant")
    lr_wsd_decay_style: str = setting("exponential", "Decay of WSD.")
    lr_wsd_decay_steps: int | None = setting(None, "Steps of WSD's decay; null: a tenth of those after the warm-up.")
    use_checkpoint_opt_param_scheduler: bool = setting(False, "Take the learning rate from the checkpoint.")

    def __post_init__(self) -> None:
        super().__post_init__()
        object.__setattr__(self, "optimizer", OPTIMIZERS.get(self.optimizer, self.optimizer))
        object.__setattr__(self, "lr_scheduler_type", SCHEDULES[self.lr_decay_style])
        if self.min_lr and self.lr:
            object.__setattr__(self, "min_lr_ratio", min(1.0, self.min_lr / self.lr))


@dataclass
class McoreActorConfig(FSDPActorConfig):
    """The actor of ppo_megatron_trainer."""

    strategy: str = setting("megatron", STRATEGY, choices=("megatron",))
    load_weight: bool = setting(True, "Load the model's weights.", fixed=WEIGHTS)
    megatron: McoreEngineConfig = setting(McoreEngineConfig, "The actor's engine.")
    profile: dict[str, Any] = setting(dict)
    optim: McoreOptimizerConfig = setting(lambda: McoreOptimizerConfig(lr=1e-6))


@dataclass
class McoreRefConfig(FSDPRefConfig):
    """The reference policy of ppo_megatron_trainer."""

    strategy: str = setting("megatron", STRATEGY, choices=("megatron",))
    load_weight: bool = setting(True, "Load the model's weights.", fixed=WEIGHTS)
    megatron: McoreEngineConfig = setting(McoreEngineConfig, "The reference's engine.")


@dataclass
class McoreCriticConfig(FSDPCriticConfig):
    """The critic of ppo_megatron_trainer."""

    strategy: str = setting("megatron", STRATEGY, choices=("megatron",))
    nccl_timeout: int = setting(
        600, "Seconds after which a collective ends the run; of this and the actor's, the larger one.", low=1
    )
    load_weight: bool = setting(True, "Load the model's weights.", fixed=WEIGHTS)
    megatron: McoreEngineConfig = setting(McoreEngineConfig, "The critic's engine.")
    optim: McoreOptimizerConfig = setting(lambda: McoreOptimizerConfig(lr=1e-5))

    def __post_init__(self) -> None:
        super().__post_init__()
        _check_recomputation(self.megatron, self.model, ("critic.megatron", "critic.model"))


@dataclass
class MegatronActorRolloutRefConfig(ActorRolloutRefConfig):
    """Policy, rollout and reference with Megatron's settings."""

    actor: McoreActorConfig = setting(McoreActorConfig)
    ref: McoreRefConfig = setting(McoreRefConfig)

    def __post_init__(self) -> None:
        super().__post_init__()
        keys = ("actor_rollout_ref.actor.megatron", "actor_rollout_ref.model")
        _check_recomputation(self.actor["megatron"], self.model, keys)


@dataclass
class MegatronPPOConfig(PPOConfig):
    """The tree of ppo_megatron_trainer."""

    actor_rollout_ref: MegatronActorRolloutRefConfig = setting(MegatronActorRolloutRefConfig)
    critic: McoreCriticConfig = setting(McoreCriticConfig)



def tree_type(config_type: type, plain: Mapping[str, Any]) -> type:
    """The dataclass that checks a tree: `config_type`, or that of a tree which has more keys than PPOConfig."""
    if config_type is not PPOConfig:
        return config_type
    if "async_training" in plain:
        return AsyncPPOConfig
    return MegatronPPOConfig if select(plain, "actor_rollout_ref.actor.megatron") is not None else config_type
