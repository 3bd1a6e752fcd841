"""Builds the data set and the sampler of RL training from the `data` section."""

from typing import Any

import torch
from loguru import logger
from omegaconf import DictConfig
from torch.utils.data import Dataset, Sampler, SequentialSampler
from torchdata.stateful_dataloader.sampler import RandomSampler

from verl.utils.dataset.rl_dataset import get_dataset_class
from verl.utils.import_utils import load_extern_object


def create_rl_dataset(
    data_paths: Any,
    data_config: DictConfig,
    tokenizer: Any,
    processor: Any,
    is_train: bool = True,
    max_samples: int = -1,
) -> Dataset:
    """The data set of `data.custom_cls`, else RLHFDataset, over these files."""
    dataset_class = get_dataset_class(data_config)
    dataset = dataset_class(
        data_files=data_paths, tokenizer=tokenizer, config=data_config, processor=processor, max_samples=max_samples
    )
    logger.debug(f"{'training' if is_train else 'validation'} data: {dataset_class.__name__}, {len(dataset)} prompts")
    return dataset


def create_rl_sampler(data_config: DictConfig, dataset: Dataset) -> Sampler:
    """The sampler of `data.sampler`, else random order from `data.seed` (`data.shuffle`), else the data's order."""
    if data_config.sampler.class_path is not None:
        if data_config.dataloader_num_workers:
            raise ValueError(
                f"data.dataloader_num_workers={data_config.dataloader_num_workers} with data.sampler.class_path: its "
                "processes draw samples before the sampler is updated. Set data.dataloader_num_workers=0."
            )
        sampler_class = load_extern_object(data_config.sampler.class_path, data_config.sampler.class_name)
        return sampler_class(data_source=dataset, data_config=data_config)
    if not data_config.shuffle:
        return SequentialSampler(dataset)
    generator = torch.Generator()
    if data_config.seed is None:
        generator.seed()
    else:
        generator.manual_seed(data_config.seed)
    return RandomSampler(dataset, generator=generator)
