"""From data files to each rank's share of a batch."""

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from omegaconf import ListConfig
from torch.utils.data import Dataset

from verl.config.compose import to_omegaconf
from verl.config.sft import SFTDataConfig
from verl.config.sft_engine import tokens_per_forward
from verl.data.rl_dataset import collate_fn
from verl.data.sft_dataset import get_sft_dataset_class
from verl.protocol import DataProto
from verl.trainer.run.prompt_stream import PromptLoader
from verl.training.actor.batch_cuts import micro_batches
from verl.utils.fs import copy_to_local


def create_sft_dataset(
    data_paths: str | Sequence[str], data_config: Mapping[str, Any], tokenizer: Any, max_samples: int = -1
) -> Dataset:
    """The data set of `data.custom_cls`, of conversations (data.multiturn.enable), or of pairs, over these files."""
    files = list(data_paths) if isinstance(data_paths, list | tuple | ListConfig) else [data_paths]
    local = [copy_to_local(file, use_shm=data_config.use_shm) for file in files]
    dataset_class = get_sft_dataset_class(data_config)
    return dataset_class(
        parquet_files=local, tokenizer=tokenizer, config=to_omegaconf(data_config), max_samples=max_samples
    )


class RankShares:
    """Batch sampler: this rank's `batch_size / ranks` rows of each global batch, as many on every rank.

    With a seed the order is drawn again for each `epoch` (set by the caller) and rows that fill no batch are left out;
    without one it is that of the data, and numbers from len(data) on fill the last batch up (see `PaddedRows`). So a
    position in batches means the same on any number of ranks.
    """

    def __init__(self, rows: int, batch_size: int, rank: int, ranks: int, seed: int | None = None) -> None:
        self.rows, self.batch_size, self.seed = rows, batch_size, seed
        self.rank, self.ranks = rank, ranks
        self.epoch = 0

    def __len__(self) -> int:
        if self.seed is None:
            return math.ceil(self.rows / self.batch_size)
        return self.rows // self.batch_size

    def __iter__(self) -> Iterator[list[int]]:
        if self.seed is None:
            order = list(range(math.ceil(self.rows / self.ranks) * self.ranks))
        else:
            generator = torch.Generator().manual_seed(self.seed * 1_000_003 + self.epoch)
            order = torch.randperm(self.rows, generator=generator).tolist()
        for start in range(0, len(self) * self.batch_size, self.batch_size):
            yield order[start : start + self.batch_size][self.rank :: self.ranks]


class PaddedRows(Dataset):
    """A data set whose rows from its end on are the first ones again with loss_mask 0: they count nowhere."""

    def __init__(self, dataset: Dataset) -> None:
        self.dataset = dataset

    def __getitem__(self, item: int) -> dict[str, Any]:
        row = self.dataset[item % len(self.dataset)]
        return row if item < len(self.dataset) else {**row, "loss_mask": torch.zeros_like(row["loss_mask"])}


def make_loader(dataset: Dataset, shares: RankShares, workers: int) -> PromptLoader:
    """A loader of these shares. It draws from a generator of its own, so that reading never moves the model's."""
    generator = torch.Generator().manual_seed(0)
    return PromptLoader(dataset, batch_sampler=shares, num_workers=workers, collate_fn=collate_fn, generator=generator)


def cut(batch: Any, data: SFTDataConfig) -> list[Any]:
    """Micro-batches [b, T] of a rank's TensorDict [B, L], equally many on every rank, T its longest sample.

    micro_batch_size_per_gpu rows each, or, with data.packing, as many as fit into max_token_len_per_gpu tokens.
    """
    tokens = tokens_per_forward(data, data.micro_batch_size_per_gpu) if data.packing else None
    proto = DataProto.from_tensordict(batch)
    pieces = micro_batches(proto, rows=data.micro_batch_size_per_gpu, tokens=tokens, whole_groups=False)
    return [_without_common_padding(piece.batch) for _, piece in pieces]


def _without_common_padding(batch: Any) -> Any:
    length = batch["attention_mask"].shape[1]
    longest = max(2, int(batch["attention_mask"].sum(-1).max()))  # rows are right-padded
    return batch.apply(lambda column: column[:, :longest] if column.shape[1:] == (length,) else column)

