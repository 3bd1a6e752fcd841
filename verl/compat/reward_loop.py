"""Compatibility with verl: scores of single samples and of batches, by asyncio in Ray actors."""

import asyncio
import faulthandler
from typing import Any

import numpy as np
import ray
import torch
from omegaconf import DictConfig

from verl.compat.reward_loop_managers import loop_manager_class
from verl.config.compose import omega_conf_to_dataclass
from verl.config.reward_model import RewardModelConfig
from verl.protocol import DataProto
from verl.reward.loading import get_custom_reward_fn, get_manager_class, rule_reward
from verl.reward.rows import place_scores
from verl.reward.served import ServedRewardManager
from verl.single_controller.base.worker import STACK_SIGNAL
from verl.single_controller.ray.watchdog import get_within
from verl.utils.fs import copy_to_local
from verl.utils.tokenizer import hf_tokenizer, policy_tokenizer


class RewardLoopWorker:
    """Scores samples by the manager that `config.reward_model` names; a plain class that `ray.remote` takes.

    With reward_model.enable=true and without a reward function of the user's own, scores come from the discriminative
    reward model that is served at `reward_router_address` ("host:port").
    """

    def __init__(self, config: DictConfig, reward_router_address: str | None = None) -> None:
        self.config = config
        self.reward_router_address = reward_router_address
        faulthandler.register(STACK_SIGNAL, all_threads=True)
        self.settings = omega_conf_to_dataclass(config.reward_model, RewardModelConfig)
        self.tokenizer, _ = policy_tokenizer(config)
        self.reward_model_tokenizer = None
        if self.settings.enable:
            path, trusted = copy_to_local(self.settings.model.path), self.settings.model.trust_remote_code
            self.reward_model_tokenizer = hf_tokenizer(path, trust_remote_code=trusted)
        self.custom_function = get_custom_reward_fn(config)
        self.manager = loop_manager_class(get_manager_class(config))(
            config=config, tokenizer=self.tokenizer,
            compute_score=self.custom_function or rule_reward(self.settings, workers=1),
            reward_router_address=reward_router_address, reward_model_tokenizer=self.reward_model_tokenizer,
        )  # fmt: skip

    async def compute_score_batch(self, data: DataProto) -> list[dict[str, Any]]:
        """`compute_score` of every row, concurrently."""
        return list(await asyncio.gather(*(self.compute_score(data[i : i + 1]) for i in range(len(data)))))

    async def compute_score(self, data: DataProto) -> dict[str, Any]:
        """{"reward_score": number, "reward_extra_info": {name: value}} of a batch with one row."""
        if self.settings.enable and self.custom_function is None:
            return await self.compute_score_disrm(data)
        return await self.manager.run_single(data)

    async def compute_score_disrm(self, data: DataProto) -> dict[str, Any]:
        """The score that the served reward model gives the chat of one row; its answer is the last turn.

        See ServedRewardManager.
        """
        manager = ServedRewardManager(
            self.tokenizer, self.settings, self.reward_router_address, self.reward_model_tokenizer,
            self.config.data.reward_fn_key,
        )  # fmt: skip
        return await manager.run_single(data)


class RewardLoopManager:
    """Shares the rows of a batch among `reward_model.num_workers` RewardLoopWorkers, each a Ray actor."""

    def __init__(
        self, config: DictConfig, rm_resource_pool: Any = None, reward_router_address: str | None = None
    ) -> None:
        self.config = config
        worker = ray.remote(num_cpus=0)(RewardLoopWorker)
        number = max(1, omega_conf_to_dataclass(config.reward_model, RewardModelConfig).num_workers)
        self.reward_loop_workers = [worker.remote(config, reward_router_address) for _ in range(number)]

    def compute_rm_score(self, data: DataProto) -> DataProto:
        """rm_scores [B, R] float32, on the last counted token, with the reward's extras as columns.

        meta_info has their names as reward_extra_keys. Raises what a row raised.
        """
        parts = np.array_split(np.arange(len(data)), len(self.reward_loop_workers))
        calls = [
            worker.compute_score_batch.remote(data.select_idxs(rows))
            for worker, rows in zip(self.reward_loop_workers, parts, strict=True)
            if len(rows)
        ]
        busy = self.reward_loop_workers[: len(calls)]  # the others have no rows
        labels = [f"reward loop worker {i}" for i in range(len(busy))]
        limits = self.config.trainer.watchdog
        results = [result for part in get_within(limits, calls, labels, "compute_score_batch", busy) for result in part]
        extras = [result["reward_extra_info"] for result in results]
        names = sorted({name for extra in extras for name in extra})
        columns = {name: np.array([extra.get(name) for extra in extras], dtype=object) for name in names}
        scores: torch.Tensor = place_scores(data, [result["reward_score"] for result in results])
        return DataProto.from_dict({"rm_scores": scores}, columns, {"reward_extra_keys": names})
