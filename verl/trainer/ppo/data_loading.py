"""Data of an RL run: loaders of both data sets, the stream of prompts, the number of steps."""

from collections.abc import Mapping
from typing import Any

import torch
from loguru import logger
from torch.utils.data import Dataset, Sampler, SequentialSampler
from torchdata.stateful_dataloader.sampler import RandomSampler

from verl.agents.environments.dataset import EnvironmentDataset
from verl.config.batch_sizes import steps_in_all
from verl.config.compose import to_omegaconf, to_settings
from verl.config.data import DataConfig
from verl.config.environment import ADAPTERS
from verl.config.ppo import PPOConfig
from verl.data import rl_dataset
from verl.data.dynamicgen_dataset import DynamicGenDataset
from verl.data.fingerprint import data_fingerprint
from verl.data.rl_dataset import RLHFDataset, get_dataset_class
from verl.data.sampler import AbstractSampler
from verl.protocol import DataProto
from verl.trainer.run.prompt_stream import PromptLoader, PromptStream
from verl.utils.import_utils import load_extern_object

#: The settings of data.environment that decide on the training data.
DRAWN_BY = ("name", "tasks", "params", "path", "url", "size", "seed", "system_prompt", "examples", "answer_format")


class RLData:
    """Data sets and their loaders. `fingerprint` identifies the training data at a resume."""

    def __init__(
        self, config: PPOConfig, tokenizer: Any, processor: Any, train_dataset: Dataset | None = None,
        val_dataset: Dataset | None = None, collate_fn: Any = None, train_sampler: Sampler | None = None,
    ) -> None:
        """What is not given is built from the configuration. Raises ValueError for too few training prompts."""
        data = config.data
        if train_dataset is None:
            train_dataset = create_rl_dataset(
                data.train_files, data, tokenizer, processor, is_train=True, max_samples=data.train_max_samples
            )
        if val_dataset is None:
            val_dataset = create_rl_dataset(
                data.val_files, data, tokenizer, processor, is_train=False, max_samples=data.val_max_samples
            )
        self.train_dataset, self.val_dataset = train_dataset, val_dataset
        self.train_sampler = create_rl_sampler(data, train_dataset) if train_sampler is None else train_sampler
        batch_size = data.gen_batch_size or data.train_batch_size
        if len(train_dataset) < batch_size and not config.trainer.val_only:
            key = "data.train_batch_size" if batch_size == data.train_batch_size else "data.gen_batch_size"
            raise ValueError(
                f"data.train_files gives {len(train_dataset)} prompts, fewer than one batch of {key}={batch_size}. "
                "Lower the batch size or add prompts."
            )
        options = {"num_workers": data.dataloader_num_workers, "collate_fn": collate_fn or rl_dataset.collate_fn}
        self.train_loader = PromptLoader(
            train_dataset, batch_size=batch_size, sampler=self.train_sampler, drop_last=True, **options
        )
        val_batch_size = data.val_batch_size or max(1, len(val_dataset))
        self.val_loader = PromptLoader(
            val_dataset, batch_size=val_batch_size, shuffle=data.validation_shuffle, drop_last=False, **options
        )
        self.stream = PromptStream(self.train_loader)
        self.fingerprint = {"batch_size": batch_size}  # a position within an epoch counts batches of this size
        if data.environment.name is not None:
            self.fingerprint["environment"] = {name: data.environment[name] for name in DRAWN_BY}
        files = [] if data.environment.name in ADAPTERS else data.train_files
        self.fingerprint |= data_fingerprint(files, len(train_dataset))
        steps, batches = config.trainer.total_training_steps, len(self.train_loader)
        self.total_steps = steps_in_all(batches, config) if steps is None else steps
        logger.info(
            f"{len(train_dataset)} training prompts, {batches} batches an epoch, {self.total_steps} steps; "
            f"{len(val_dataset)} validation prompts"
        )

    def update_from_batch(self, batch: DataProto) -> None:
        """Pass the batch of a finished step to a sampler with `update`, or a data set with `on_batch_end`."""
        if hasattr(self.train_sampler, "update"):
            self.train_sampler.update(batch)
        if hasattr(self.train_dataset, "on_batch_end"):
            self.train_dataset.on_batch_end(batch)


def create_rl_dataset(
    data_paths: Any, data_config: Mapping[str, Any], tokenizer: Any, processor: Any, is_train: bool = True,
    max_samples: int = -1,
) -> Dataset:
    """The data set of data.environment, or of these files.

    Of files it is data.custom_cls; DynamicGenDataset to train with data.datagen; or RLHFDataset.
    """
    settings = to_settings(data_config, DataConfig, checked=False)
    dataset_class = get_dataset_class(settings)
    if is_train and dataset_class is RLHFDataset and settings.datagen.path is not None:
        dataset_class = DynamicGenDataset
    split = {}
    if settings.environment.name is not None:
        dataset_class, split = EnvironmentDataset, {"is_train": is_train}
    logger.debug(f"{'training' if is_train else 'validation'} data: {dataset_class.__name__}")
    return dataset_class(
        data_files=data_paths, tokenizer=tokenizer, config=to_omegaconf(data_config), processor=processor,
        max_samples=max_samples, **split,
    )  # fmt: skip


def create_rl_sampler(data_config: Mapping[str, Any], dataset: Dataset) -> Sampler:
    """The sampler of `data.sampler`, else random order from `data.seed` (`data.shuffle`), else the data's order.

    Keys that `data_config` lacks have their defaults. AssertionError for a sampler that is no AbstractSampler.
    """
    settings = to_settings(data_config, DataConfig, checked=False)
    custom = settings.sampler
    if custom.class_path is not None:
        sampler_class = load_extern_object(custom.class_path, custom.class_name)
        sampler = sampler_class(data_source=dataset, data_config=to_omegaconf(data_config))
        if not isinstance(sampler, AbstractSampler):
            raise AssertionError(
                f"data.sampler: {sampler_class.__name__} must be a subclass of verl.data.sampler.AbstractSampler"
            )
        if workers := settings.dataloader_num_workers:
            raise ValueError(
                f"data.dataloader_num_workers={workers} with data.sampler.class_path: its processes draw samples "
                "before the sampler is updated. Set data.dataloader_num_workers=0."
            )
        return sampler
    if not settings.shuffle:
        return SequentialSampler(dataset)
    generator = torch.Generator()
    if settings.seed is None:
        generator.seed()
    else:
        generator.manual_seed(settings.seed)
    return RandomSampler(dataset, generator=generator)
