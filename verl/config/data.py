"""Settings of the data: files, columns, lengths, batches, order."""

from dataclasses import dataclass
from typing import Any

from verl.config.base import BaseConfig
from verl.config.common import ModuleConfig
from verl.config.environment import EnvironmentConfig
from verl.config.fields import setting


@dataclass
class SamplerConfig(BaseConfig, section="data.sampler"):
    """A curriculum sampler by file and class name."""

    class_path: str | None = setting(None, "File that holds the class; null takes the built-in sampler.")
    class_name: str | None = setting(None, "Name of the class, a subclass of AbstractSampler.")


@dataclass
class DataConfig(BaseConfig, section="data"):
    """RL data; batch sizes count prompts over all ranks, lengths count tokens."""

    tokenizer: str | None = setting(None, "Folder of the tokenizer, as model.tokenizer_path; null: the model's.")
    train_files: str | list[str] = setting(
        "~/data/rlhf/gsm8k/train.parquet",
        "Parquet, json or jsonl file of prompts, local or hdfs:// (copied once per machine), or a list of files; "
        "docs/extending.md has the columns.",
    )
    val_files: str | list[str] | None = setting(
        "~/data/rlhf/gsm8k/test.parquet", "File or list of files of validation prompts, as train_files."
    )
    train_max_samples: int = setting(
        -1, "Number of training prompts to use, chosen at random with data.shuffle, else the first; -1: all.", low=-1
    )
    val_max_samples: int = setting(
        -1, "Number of validation prompts to use, chosen at random with data.shuffle, else the first; -1: all.", low=-1
    )
    prompt_key: str = setting("prompt", "Column with the chat messages.")
    reward_fn_key: str = setting("data_source", "Column that selects the reward and groups validation metrics.")
    max_prompt_length: int = setting(512, "Maximum prompt length in tokens; shorter ones are left-padded.", low=1)
    max_response_length: int = setting(512, "Maximum response length in tokens; shorter ones are right-padded.", low=1)
    train_batch_size: int = setting(1024, "Prompts per step, over all ranks.", low=1)
    gen_batch_size: int = setting(1024, "Prompts of one generation; with filtered groups several fill a batch.", low=1)
    val_batch_size: int | None = setting(None, "Prompts per validation batch; null takes the full set at once.", low=1)
    shuffle: bool = setting(True, "Shuffle training prompts each epoch.")
    seed: int | None = setting(None, "Seed of the order with shuffle=true.")
    dataloader_num_workers: int = setting(8, "Processes that load the data.", low=0)
    filter_overlong_prompts: bool = setting(False, "Leave out, and count, prompts longer than max_prompt_length.")
    filter_overlong_prompts_workers: int = setting(1, "Processes that filter prompts.", low=1)
    truncation: str = setting(
        "error",
        "What happens to a prompt that is too long: an error, or the side that is cut.",
        choices=("error", "left", "right", "middle"),
    )
    return_full_prompt: bool = setting(False, "Return the prompt's text, through the template, as full_prompts.")
    use_shm: bool = setting(False, "Copy data files to /dev/shm first.")
    validation_shuffle: bool = setting(False, "Shuffle validation prompts.")
    apply_chat_template_kwargs: dict[str, Any] = setting(dict, "Keyword arguments of the chat template; any key.")
    tool_config_path: str | None = setting(None, "File that lists the tools, which the chat template gets.")
    function_tool_path: str | None = setting(None, "Python file whose functions are tools, which it gets as well.")
    custom_cls: ModuleConfig = setting(ModuleConfig, "Data set class; null uses RLHFDataset.")
    custom: dict[str, Any] = setting(dict, "Settings for the class of data.custom_cls; any key.")
    sampler: SamplerConfig = setting(SamplerConfig, "Sampler, such as a curriculum.")
    datagen: ModuleConfig = setting(ModuleConfig, "Generator of further prompts, an AbstractDataGenerator.")
    environment: EnvironmentConfig = setting(EnvironmentConfig, "Prompts and scores of an environment library.")
    trust_remote_code: bool = setting(False, "Let the tokenizer of prompts and rewards run code that comes with it.")
