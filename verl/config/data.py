"""Settings of the data: files, columns, lengths, batches, order."""

from dataclasses import dataclass, field
from typing import Any

from verl.base_config import BaseConfig
from verl.config.common import ModuleConfig
from verl.config.fields import setting


@dataclass
class SamplerConfig(BaseConfig, section="data.sampler"):
    """A curriculum sampler by file and class name."""

    class_path: str | None = None
    class_name: str | None = None


@dataclass
class DataConfig(BaseConfig, section="data"):
    """RL data; batch sizes count prompts over all ranks, lengths count tokens."""

    tokenizer: str | None = None
    train_files: str | list[str] = "~/data/rlhf/gsm8k/train.parquet"
    val_files: str | list[str] | None = "~/data/rlhf/gsm8k/test.parquet"
    train_max_samples: int = setting(-1, low=-1)
    val_max_samples: int = setting(-1, low=-1)
    prompt_key: str = "prompt"
    reward_fn_key: str = "data_source"
    max_prompt_length: int = setting(512, low=1)
    max_response_length: int = setting(512, low=1)
    train_batch_size: int = setting(1024, low=1)
    gen_batch_size: int = setting(1024, low=1)
    val_batch_size: int | None = setting(None, low=1)
    shuffle: bool = True
    seed: int | None = None
    dataloader_num_workers: int = setting(8, low=0)
    filter_overlong_prompts: bool = False
    filter_overlong_prompts_workers: int = setting(1, low=1)
    truncation: str = setting("error", choices=("error", "left", "right", "middle"))
    return_raw_chat: bool = True
    validation_shuffle: bool = False
    apply_chat_template_kwargs: dict[str, Any] = field(default_factory=dict)
    custom_cls: ModuleConfig = field(default_factory=ModuleConfig)
    custom: dict[str, Any] = field(default_factory=dict)
    sampler: SamplerConfig = field(default_factory=SamplerConfig)
    datagen: ModuleConfig = field(default_factory=ModuleConfig)
    trust_remote_code: bool = False
