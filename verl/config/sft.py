"""Settings of supervised fine-tuning: data, model, optimizer, run."""

from dataclasses import dataclass, field
from typing import Any

from verl.base_config import BaseConfig
from verl.config.common import CheckpointConfig, ModuleConfig
from verl.config.fields import setting

STRATEGIES = ("fsdp", "fsdp2")
DTYPES = ("fp32", "float32", "bf16", "bfloat16")
SCHEDULES = ("cosine", "wsd", "linear", "constant")


@dataclass
class SFTMultiturnConfig(BaseConfig, section="data.multiturn"):
    """Columns of conversations."""

    enable: bool = False
    messages_key: str = "messages"
    tools_key: str = "tools"
    enable_thinking_key: str = "enable_thinking"


@dataclass
class SFTDataConfig(BaseConfig, section="data"):
    """SFT data; train_batch_size counts samples over all ranks, lengths count tokens."""

    train_batch_size: int = setting(256, low=1)
    micro_batch_size: int | None = setting(None, low=1)
    micro_batch_size_per_gpu: int = setting(4, low=1)
    packing: bool = False
    train_files: str | list[str] = "~/data/gsm8k/train.parquet"
    val_files: str | list[str] | None = "~/data/gsm8k/test.parquet"
    train_max_samples: int = setting(-1, low=-1)
    val_max_samples: int = setting(-1, low=-1)
    prompt_key: str = "question"
    response_key: str = "answer"
    prompt_dict_keys: list[str] | None = None
    response_dict_keys: list[str] | None = None
    multiturn: SFTMultiturnConfig = field(default_factory=SFTMultiturnConfig)
    max_length: int = setting(1024, low=2)
    truncation: str = setting("error", choices=("error", "left", "right"))
    balance_dp_token: bool = False
    chat_template: str | None = None
    custom_cls: ModuleConfig = field(default_factory=ModuleConfig)
    use_shm: bool = False
    apply_chat_template_kwargs: dict[str, Any] = field(default_factory=dict)
    dataloader_num_workers: int = setting(2, low=0)


@dataclass
class SFTEngineConfig(BaseConfig, section="model.fsdp_config"):
    """How the weights lie on the ranks; `dtype` is the type of autocast, float32 turns it off."""

    model_dtype: str = setting("fp32", choices=DTYPES)
    dtype: str = setting("bfloat16", choices=DTYPES)
    wrap_policy: dict[str, Any] = field(default_factory=lambda: {"min_num_params": 0})
    cpu_offload: bool = False
    offload_params: bool = False
    fsdp_size: int = setting(-1, low=-1)
    full_determinism: bool = False


@dataclass
class SFTModelConfig(BaseConfig, section="model"):
    """The model to start from, and what of it is trained."""

    partial_pretrain: str = "~/models/gemma-1.1-7b-it"
    use_shm: bool = False
    fsdp_config: SFTEngineConfig = field(default_factory=SFTEngineConfig)
    external_lib: str | None = None
    enable_gradient_checkpointing: bool = True
    trust_remote_code: bool = False
    lora_rank: int = setting(0, low=0)
    lora_alpha: int = setting(16, above=0)
    target_modules: Any = "all-linear"
    use_liger: bool = False
    strategy: str = setting("fsdp2", choices=STRATEGIES, hint="Both mean FSDP2 here; Megatron is not supported.")


@dataclass
class SFTOptimConfig(BaseConfig, section="optim"):
    """The optimizer (a class of any module), warm-up, schedule."""

    optimizer: str = "AdamW"
    optimizer_impl: str = "torch.optim"
    override_optimizer_config: dict | None = None
    lr: float = setting(1e-5, low=0)
    betas: list[float] = field(default_factory=lambda: [0.9, 0.95])
    weight_decay: float = setting(0.01, low=0)
    lr_warmup_steps_ratio: float = setting(0.1, low=0, high=1)
    clip_grad: float = setting(1.0, above=0)
    lr_scheduler: str = setting("cosine", choices=SCHEDULES)


@dataclass
class SFTTrainerConfig(BaseConfig, section="trainer"):
    """One run under torchrun; -1 turns a frequency off, the last step is saved and validated all the same."""

    default_local_dir: str = "checkpoints/gsm8k-sft/test"
    default_hdfs_dir: str | None = None
    project_name: str = "gsm8k-sft"
    experiment_name: str = "test"
    total_epochs: int = setting(4, low=1)
    total_training_steps: int | None = setting(None, low=1)
    logger: Any = field(default_factory=lambda: ["console", "tensorboard"])
    seed: int = setting(1, low=0)
    save_freq: int = setting(-1, low=-1)
    test_freq: int = setting(-1, low=-1)
    nnodes: int = setting(1, low=1)
    n_gpus_per_node: int = setting(8, low=1)
    max_ckpt_to_keep: int | None = setting(None, low=1)
    resume_mode: str = setting("auto", choices=("auto", "disable", "resume_path"))
    resume_from_path: str | None = None
    allow_data_change: bool = False
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)
    device: str = setting("cuda", choices=("cuda", "cpu"))
    nonfinite_steps_max: int = setting(5, low=1)
    dry_run: bool = False
    report: bool = True
    use_legacy_worker_impl: str = setting("auto", choices=("auto", "enable", "disable"))


@dataclass
class SFTConfig(BaseConfig, section=""):
    """The whole tree of sft_trainer.yaml; a trainer that adds a section subclasses it."""

    data: SFTDataConfig = field(default_factory=SFTDataConfig)
    model: SFTModelConfig = field(default_factory=SFTModelConfig)
    optim: SFTOptimConfig = field(default_factory=SFTOptimConfig)
    ulysses_sequence_parallel_size: int = setting(1, low=1)
    use_remove_padding: bool = False
    trainer: SFTTrainerConfig = field(default_factory=SFTTrainerConfig)
