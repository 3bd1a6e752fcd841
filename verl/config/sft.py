"""Settings of supervised fine-tuning: data, model, optimizer, run."""

from dataclasses import dataclass
from typing import Any

from verl.config import common
from verl.config.base import BaseConfig
from verl.config.common import CheckpointConfig, ModuleConfig, RunConfig
from verl.config.engine import STABLE_DTYPES
from verl.config.fields import setting
from verl.config.optimizer import SCHEDULES

EACH_EPOCH = "after_each_epoch"


@dataclass
class SFTMultiturnConfig(BaseConfig, section="data.multiturn"):
    """Columns of conversations."""

    enable: bool = setting(False, "Rows hold conversations.")
    messages_key: str = setting("messages", "Column of the messages, a list of {role, content}.")
    tools_key: str = setting("tools", "Column of the tools for the chat template; optional.")
    enable_thinking_key: str = setting("enable_thinking", "Column that turns thinking on or off; optional.")
    row_per_turn: bool = setting(
        False, "Each turn of the assistant is a sample, after the prompt that the template renders of those before."
    )


@dataclass
class SFTDataConfig(BaseConfig, section="data"):
    """SFT data; train_batch_size counts samples over all ranks, lengths count tokens."""

    train_batch_size: int = setting(256, "Samples per step, over all ranks.", low=1)
    micro_batch_size: int | None = setting(
        None, "Deprecated: samples per forward over all ranks; replaces micro_batch_size_per_gpu.", low=1
    )
    micro_batch_size_per_gpu: int = setting(4, "Samples per forward on one rank, in validation too.", low=1)
    packing: bool = setting(
        False, "Pack samples without padding: up to max_token_len_per_gpu tokens a forward, not a number of samples."
    )
    max_token_len_per_gpu: int | None = setting(
        None, "Tokens of a packed forward on one rank; null: micro_batch_size_per_gpu x max_length.", low=2
    )
    train_files: str | list[str] = setting(
        "~/data/gsm8k/train.parquet",
        "Parquet, jsonl or json file, or a list of files; docs/sft.md has the columns.",
    )
    val_files: str | list[str] | None = setting(
        "~/data/gsm8k/test.parquet", "File or list of files for validation, as train_files; null for none."
    )
    train_max_samples: int = setting(-1, "Rows to train on, the first ones; -1 for all.", low=-1)
    val_max_samples: int = setting(-1, "Rows to validate on, the first ones; -1 for all.", low=-1)
    prompt_key: str = setting("question", "Column of the question in single-turn data.")
    response_key: str = setting("answer", "Column of the answer in single-turn data.")
    prompt_dict_keys: list[str] | None = setting(None, "Path of the question inside that column; null: itself.")
    response_dict_keys: list[str] | None = setting(None, "Path of the answer inside that column; null: itself.")
    multiturn: SFTMultiturnConfig = setting(SFTMultiturnConfig, "Multi-turn conversations.")
    max_length: int = setting(1024, "Maximum tokens of a sample.", low=2)
    truncation: str = setting(
        "error",
        "What happens to a longer sample: an error, or the side that is cut.",
        choices=("error", "left", "right"),
    )
    chat_template: str | None = setting(None, "Replaces the tokenizer's chat template: text or a .jinja file.")
    custom_cls: ModuleConfig = setting(ModuleConfig, "Data set class, a subclass of torch.utils.data.Dataset.")
    use_shm: bool = setting(False, "Copy data files to shared memory first.")
    apply_chat_template_kwargs: dict[str, Any] = setting(dict, "Further arguments of the chat template; any key.")
    dataloader_num_workers: int = setting(2, "Processes per rank that read ahead; 0 reads between steps.", low=0)

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.packing and self.max_token_len_per_gpu is not None and self.max_token_len_per_gpu < self.max_length:
            raise ValueError(
                f"data.max_token_len_per_gpu={self.max_token_len_per_gpu} is less than one sample of "
                f"data.max_length={self.max_length} tokens; raise it."
            )


@dataclass
class SFTEngineConfig(BaseConfig, section="model.fsdp_config"):
    """How the weights are sharded and of what types they are."""

    model_dtype: str = setting("fp32", "Type of the weights that the optimizer updates.", choices=STABLE_DTYPES)
    dtype: str = setting("bfloat16", "Type of the computation; float32 turns autocast off.", choices=STABLE_DTYPES)
    wrap_policy: dict[str, Any] = setting(
        lambda: {"min_num_params": 0}, "Submodules that are sharded on their own; min_num_params 0: by layer class."
    )
    cpu_offload: bool = setting(False, "FSDP2's own CPU offload of weights, gradients and optimizer state.")
    offload_params: bool = setting(False, "Keep weights and optimizer state on the CPU between steps.")
    fsdp_size: int = setting(-1, "Ranks that share one copy of the weights; -1 for all.", low=-1)
    tensor_parallel_size: int = setting(1, common.LAYER_RANKS, low=1)
    sequence_parallel: bool = setting(False, common.TOKEN_PARTS)
    full_determinism: bool = setting(False, "Use deterministic kernels, which are slower; warn where none exists.")


@dataclass
class SFTModelConfig(BaseConfig, section="model"):
    """The model to start from, and what of it is trained."""

    partial_pretrain: str = setting("~/models/gemma-1.1-7b-it", "Folder or hub name of the model to start from.")
    use_shm: bool = setting(False, "Copy the model's files to shared memory first.")
    fsdp_config: SFTEngineConfig = setting(SFTEngineConfig, "How weights are sharded over the ranks.")
    external_lib: str | None = setting(None, common.EXTERNAL_LIB)
    enable_gradient_checkpointing: bool | None = setting(True, common.RECOMPUTED)
    trust_remote_code: bool = setting(False, "Let the model run code that comes with it.")
    lora_rank: int = setting(0, "Rank of LoRA; 0 trains all weights.", low=0)
    lora_alpha: int = setting(16, "Alpha of LoRA: the update is scaled by alpha / rank.", above=0)
    target_modules: Any = setting("all-linear", "Layers that get LoRA: all-linear, or a list of names.")
    use_liger: bool = setting(False, common.LIGER)


@dataclass
class SFTOptimConfig(BaseConfig, section="optim"):
    """The optimizer (a class of any module), warm-up, schedule."""

    optimizer: str = setting("AdamW", "Class of the optimizer in optimizer_impl.")
    optimizer_impl: str = setting("torch.optim", "Module of the optimizer's class.")
    override_optimizer_config: dict | None = setting(None, "Further keyword arguments of the optimizer; any key.")
    lr: float = setting(1e-5, "Learning rate after warm-up.", low=0)
    betas: list[float] = setting(lambda: [0.9, 0.95], "Decay rates of the optimizer's moments.")
    weight_decay: float = setting(0.01, "Weight decay.", low=0)
    lr_warmup_steps_ratio: float = setting(
        0.1, "Warm-up as a share of all steps, without lr_warmup_steps.", low=0, high=1
    )
    lr_warmup_steps: int = setting(-1, "Warm-up steps; negative uses lr_warmup_steps_ratio.")
    min_lr_ratio: float | None = setting(
        None, "Final learning rate of cosine and wsd as a share of lr; null means 0.", low=0, high=1
    )
    num_cycles: float = setting(0.5, "Cycles of the cosine, with wsd of its decay; 0.5 decays once.", above=0)
    clip_grad: float = setting(1.0, "Maximum gradient norm.", above=0)
    lr_scheduler: str = setting("cosine", "Schedule after warm-up.", choices=SCHEDULES)


@dataclass
class SFTTrainerConfig(RunConfig):
    """One run under torchrun, whose last step is validated, and saved unless save_freq is 0."""

    default_local_dir: str = "checkpoints/gsm8k-sft/test"  # plain fields have help and range of RunConfig
    project_name: str = "gsm8k-sft"
    experiment_name: str = "test"
    total_epochs: int = 4
    seed: int = setting(1, "Seed of data order, new weights and dropout.", low=0)
    test_freq: int | str = setting(-1, "Steps between validations, or after_each_epoch; -1 or 0: at the end only.")
    save_freq: int | str = setting(
        -1, "Steps between checkpoints, or after_each_epoch; -1 for one at the end only, 0 for none."
    )
    nnodes: int = setting(1, "Machines, for the plan of a dry run; torchrun decides.", low=1)
    n_gpus_per_node: int = setting(8, "Ranks on each machine, for the plan of a dry run; torchrun decides.", low=1)
    max_ckpt_to_keep: int | None = setting(None, "Newest checkpoints to keep; null keeps all.", low=1)
    checkpoint: CheckpointConfig = setting(CheckpointConfig, "Contents of checkpoints.")

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in ("test_freq", "save_freq"):
            value = getattr(self, name)
            if value != EACH_EPOCH and (isinstance(value, str) or value < -1):
                raise ValueError(f"trainer.{name}={value} must be a number of steps, -1 or more, or {EACH_EPOCH}.")


@dataclass
class SFTConfig(BaseConfig, section=""):
    """The full tree of sft_trainer.yaml; a trainer that adds a section subclasses it."""

    data: SFTDataConfig = setting(SFTDataConfig, "The data and its batches.")
    model: SFTModelConfig = setting(SFTModelConfig, "The model that is trained.")
    optim: SFTOptimConfig = setting(SFTOptimConfig, "The optimizer and its schedule.")
    ulysses_sequence_parallel_size: int = setting(1, common.SEQUENCE_RANKS, low=1)
    use_remove_padding: bool = setting(False, "Remove padding before the forward; data.packing does so too.")
    trainer: SFTTrainerConfig = setting(SFTTrainerConfig, "The run.")
