"""Prompts that a generator of the user's own adds to while the run trains (data.datagen)."""

import json
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping
from typing import Any

from omegaconf import DictConfig
from torch.utils.data import Dataset

from verl.config.compose import to_omegaconf
from verl.data.rl_dataset import RLHFDataset
from verl.protocol import DataProto
from verl.utils.import_utils import load_extern_object


class AbstractDataGenerator(ABC):
    """Makes further prompts. `config` is the section data.datagen."""

    def __init__(self, config: DictConfig) -> None:
        self.config = config

    @abstractmethod
    def generate(self, dataset: Dataset) -> Iterable[dict[str, Any]]:
        """New rows, such as a `datasets.Dataset`, with the columns of `dataset.rows`; plain values, as JSON has."""


class DynamicGenDataset(RLHFDataset):
    """RLHFDataset that asks data.datagen for new rows after each batch; they can be drawn from the next epoch on.

    A checkpoint holds the generated rows. TypeError if data.datagen names no AbstractDataGenerator.
    """

    def __init__(
        self, data_files: str | list[str], tokenizer: Any, config: Mapping[str, Any], processor: Any = None,
        max_samples: int = -1,
    ) -> None:
        super().__init__(data_files, tokenizer, config, processor, max_samples)
        datagen = self.settings.datagen
        if not (datagen.path and datagen.name):
            raise TypeError("data.datagen.path and data.datagen.name must name the file and the class of a generator.")
        generator_class = load_extern_object(datagen.path, datagen.name)
        if not (isinstance(generator_class, type) and issubclass(generator_class, AbstractDataGenerator)):
            raise TypeError(
                f"data.datagen.name={datagen.name!r} in data.datagen.path={datagen.path} is {generator_class!r}; a "
                "subclass of verl.data.dynamicgen_dataset.AbstractDataGenerator is needed."
            )
        self.generator = generator_class(to_omegaconf(datagen))
        self.generated: list[dict[str, Any]] = []  # in `rows` too
        self.waiting: list[dict[str, Any]] = []  # for the next epoch

    def on_batch_end(self, batch: DataProto) -> None:
        """Let the generator make rows, which wait for the next epoch. TypeError for values that JSON does not have."""
        self.waiting += json.loads(json.dumps([dict(row) for row in self.generator.generate(self)]))

    def begin_epoch(self) -> None:
        """Add the rows that wait."""
        self.append_dataframe(self.waiting)
        self.waiting = []

    def append_dataframe(self, new_dataframe: Iterable[dict[str, Any]]) -> None:
        """Add rows; those with a prompt that is too long are filtered by data.filter_overlong_prompts."""
        rows = list(map(dict, new_dataframe))
        first = len(self.generated)
        self.columns |= dict.fromkeys(name for row in rows for name in row)
        self.rows, self.generated = [*self.rows, *rows], self.generated + rows
        self.origins += [(f"data.datagen.name={self.settings.datagen.name}", first + i) for i in range(len(rows))]
        if rows:
            self.maybe_filter_out_long_prompts()

    def growth(self) -> dict[str, Any]:
        """The generated rows, for a checkpoint."""
        return {"generated": self.generated, "waiting": self.waiting}

    def restore_growth(self, state: dict[str, Any]) -> None:
        """Add the generated rows of a checkpoint to those of the files."""
        self.append_dataframe(state["generated"])
        self.waiting = list(state["waiting"])
