"""A data set with a column of its own, and a sampler that turns to prompts with low scores."""

import numpy as np
import torch

from verl import DataProto
from verl.experimental.dataset.sampler import AbstractCurriculumSampler
from verl.utils.dataset.rl_dataset import RLHFDataset


class SumDataset(RLHFDataset):
    """Adds the number of words of the question."""

    def __getitem__(self, item):
        row_dict = super().__getitem__(item)
        question = row_dict["raw_prompt"][0]["content"]
        row_dict["question_words"] = len(question.split())
        row_dict["extra_info"] = {**row_dict["extra_info"], "question_words": len(question.split())}
        return row_dict


class WorstFirst(AbstractCurriculumSampler):
    """Rows by their last score, lowest first; unseen rows come first."""

    def __init__(self, data_source, data_config):
        self.data_source = data_source
        self.scores = torch.full((len(data_source),), -1.0)
        self.updates = 0

    def __iter__(self):
        return iter(torch.argsort(self.scores, stable=True).tolist())

    def __len__(self):
        return len(self.data_source)

    def update(self, batch: DataProto) -> None:
        self.updates += 1
        total = batch.batch["token_level_scores"].sum(-1)
        for index, score in zip(batch.non_tensor_batch["index"], total.tolist(), strict=True):
            self.scores[int(index)] = score
        assert isinstance(batch.non_tensor_batch["question_words"], np.ndarray)
