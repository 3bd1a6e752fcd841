"""The data set of an environment."""

from collections.abc import Mapping, Sequence
from typing import Any

from verl.agents.environments.hosting import EnvironmentFailed
from verl.agents.environments.processes import environment_rows
from verl.config.compose import to_settings
from verl.config.data import DataConfig
from verl.data.rl_dataset import DatasetError, RLHFDataset


class EnvironmentDataset(RLHFDataset):
    """RLHFDataset whose rows come from the environment of data.environment, which a process of its own makes.

    `data_files` is [] or the files of the split, for a library whose tasks come from files.
    """

    def __init__(
        self, data_files: str | list[str] | None, tokenizer: Any, config: Mapping[str, Any], processor: Any = None,
        max_samples: int = -1, is_train: bool = True,
    ) -> None:  # fmt: skip
        settings = to_settings(config, DataConfig, checked=False)
        self._environment, self._split = settings.environment, "train" if is_train else "val"
        self._files = {"train": _as_list(settings.train_files), "val": _as_list(settings.val_files)}
        name = f"environment {settings.environment.name}, {self._split}"
        super().__init__([name], tokenizer, config, processor, max_samples)

    def load(self, file: str, use_shm: bool) -> Sequence[dict[str, Any]]:
        try:
            return environment_rows(self._environment, self._files)[self._split]
        except EnvironmentFailed as error:
            raise DatasetError(str(error)) from error


def _as_list(files: str | Sequence[str] | None) -> list[str]:
    return [files] if isinstance(files, str) else list(files or ())
