"""Base classes for a sampler of `data.sampler.{class_path,class_name}`."""

from abc import abstractmethod
from collections.abc import Sized

from omegaconf import DictConfig
from torch.utils.data import Sampler

from verl.protocol import DataProto


class AbstractSampler(Sampler[int]):
    """Built as `cls(data_source=dataset, data_config=config.data)`; yields row numbers."""

    @abstractmethod
    def __init__(self, data_source: Sized, data_config: DictConfig) -> None: ...


class AbstractCurriculumSampler(AbstractSampler):
    """A sampler whose `update` gets the batch of every finished step before the next rows are drawn."""

    @abstractmethod
    def update(self, batch: DataProto) -> None:
        """`batch` holds the step's samples with scores and advantages."""
