"""Compatibility with verl: pairs of a preferred and a rejected answer, for reward models trained by one's own code."""

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch.utils.data import Dataset

from verl.data.rl_dataset import read_rows
from verl.utils.fs import copy_to_local
from verl.utils.tokenizer import hf_tokenizer


def download_files_distributed(download_fn: Callable[[], Any]) -> None:
    """Call it on the first rank while the others wait; without ranks, call it."""
    if not dist.is_initialized() or dist.get_rank() == 0:
        download_fn()
    if dist.is_initialized():
        dist.barrier()


class RMDataset(Dataset):
    """Rows of columns that hold a prompt and two answers: input_ids and attention_mask, both int64 [2, max_length].

    Row 0 is the prompt with the preferred answer, row 1 that with the rejected one; both are padded on the right.
    """

    def __init__(
        self, parquet_files: str | list[str], tokenizer: Any, prompt_key: str = "prompt", chosen_key: str = "chosen",
        rejected_key: str = "rejected", max_length: int = 1024, add_eos: bool = True,
        cache_dir: str = "~/.cache/verl/rm", max_samples: int = -1, shuffle: bool = False, seed: int | None = None,
    ) -> None:
        self.tokenizer = hf_tokenizer(tokenizer) if isinstance(tokenizer, str) else tokenizer
        self.max_length, self.add_eos = max_length, add_eos
        files = [parquet_files] if isinstance(parquet_files, str) else list(parquet_files)
        download_files_distributed(lambda: [copy_to_local(file, cache_dir) for file in files])
        local = [copy_to_local(file, cache_dir) for file in files]
        rows = [row for file in local for row in read_rows(file)]
        if 0 < max_samples < len(rows):
            order = np.random.default_rng(seed).permutation(len(rows)) if shuffle else np.arange(len(rows))
            rows = [rows[n] for n in order[:max_samples]]
        self.prompts = [row[prompt_key] for row in rows]
        self.chosen_responses = [row[chosen_key] for row in rows]
        self.rejected_responses = [row[rejected_key] for row in rows]

    def __len__(self) -> int:
        return len(self.prompts)

    def __getitem__(self, item: int) -> dict[str, torch.Tensor]:
        answers = (self.chosen_responses[item], self.rejected_responses[item])
        pairs = [self._padded(self.prompts[item], answer) for answer in answers]
        return {
            "input_ids": torch.stack([ids for ids, _ in pairs]), "attention_mask": torch.stack([m for _, m in pairs])
        }  # fmt: skip

    def _padded(self, prompt: str, answer: str) -> tuple[torch.Tensor, torch.Tensor]:
        """(ids, mask) of both texts, each [max_length]; the end of a long one is cut off."""
        text = prompt + answer + (self.tokenizer.eos_token if self.add_eos else "")
        ids = self.tokenizer(text, add_special_tokens=False)["input_ids"][: self.max_length]
        padding = self.max_length - len(ids)
        mask = torch.tensor([1] * len(ids) + [0] * padding)
        return torch.tensor([*ids, *[self.tokenizer.pad_token_id] * padding]), mask
