"""Settings of the data: files, columns, lengths, batches, order."""

from dataclasses import dataclass
from typing import Any

from verl.base_config import BaseConfig
from verl.config.common import ModuleConfig
from verl.config.fields import setting


@dataclass
class SamplerConfig(BaseConfig, section="data.sampler"):
    """A curriculum sampler by file and class name."""

    class_path: str | None = setting(None, "File that holds the class; null takes the built-in sampler.")
    class_name: str | None = setting(None, "Name of the class, a subclass of AbstractSampler.")


@dataclass
class DataConfig(BaseConfig, section="data"):
    """RL data; batch sizes count prompts over all ranks, lengths count tokens."""

    tokenizer: str | None = setting(
        None, "Tokenizer of the data set; null takes the model's.", unused="the data use the model's tokenizer"
    )
    train_files: str | list[str] = setting(
        "~/data/rlhf/gsm8k/train.parquet", "Parquet or json file of training prompts, or a list of them."
    )
    val_files: str | list[str] | None = setting(
        "~/data/rlhf/gsm8k/test.parquet", "Parquet or json file of validation prompts, or a list of them."
    )
    train_max_samples: int = setting(-1, "Number of training prompts to use; -1 for all.", low=-1)
    val_max_samples: int = setting(-1, "Number of validation prompts to use; -1 for all.", low=-1)
    prompt_key: str = setting("prompt", "Column with the chat messages.")
    reward_fn_key: str = setting("data_source", "Column that selects the reward and groups validation metrics.")
    max_prompt_length: int = setting(512, "Longest prompt in tokens; prompts are padded to it on the left.", low=1)
    max_response_length: int = setting(
        512, "Longest response in tokens; responses are padded to it on the right.", low=1
    )
    train_batch_size: int = setting(1024, "Prompts per step, over all ranks.", low=1)
    gen_batch_size: int = setting(
        1024, "Prompts of one generation; several fill a training batch where groups are filtered.", low=1
    )
    val_batch_size: int | None = setting(None, "Prompts per validation batch; null takes the full set at once.", low=1)
    shuffle: bool = setting(True, "Shuffle training prompts each epoch.")
    seed: int | None = setting(None, "Seed of that shuffle.")
    dataloader_num_workers: int = setting(8, "Processes that load the data.", low=0)
    filter_overlong_prompts: bool = setting(False, "Leave out, and count, prompts longer than max_prompt_length.")
    filter_overlong_prompts_workers: int = setting(
        1, "Processes that filter prompts.", low=1, unused="one process filters prompts"
    )
    truncation: str = setting(
        "error",
        "What happens to a prompt that is too long: an error, or the side that is cut.",
        choices=("error", "left", "right", "middle"),
    )
    return_raw_chat: bool = setting(
        True, "Return the chat messages as raw_prompt.", unused="rows always carry the chat messages"
    )
    validation_shuffle: bool = setting(False, "Shuffle validation prompts.")
    apply_chat_template_kwargs: dict[str, Any] = setting(dict, "Keyword arguments of the chat template; any key.")
    custom_cls: ModuleConfig = setting(ModuleConfig, "Data set class; null uses RLHFDataset.")
    custom: dict[str, Any] = setting(dict, "Settings for that class; any key.")
    sampler: SamplerConfig = setting(SamplerConfig, "Sampler, such as a curriculum.")
    datagen: ModuleConfig = setting(
        ModuleConfig, "Generator of further prompts during training.", unused="no prompts are generated"
    )
    trust_remote_code: bool = setting(
        False,
        "Let the tokenizer run code that comes with the model.",
        unused="actor_rollout_ref.model.trust_remote_code decides",
    )
