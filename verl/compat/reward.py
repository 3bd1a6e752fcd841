"""Compatibility with verl: scores of batches, and of single samples by asyncio in Ray actors (the reward loop)."""

import asyncio
import faulthandler
import functools
from typing import Any

import numpy as np
import ray
import torch
from omegaconf import DictConfig

from verl.config.compose import omega_conf_to_dataclass
from verl.config.reward_model import RewardModelConfig
from verl.protocol import DataProto
from verl.reward.loading import get_custom_reward_fn, get_manager_class, load_reward_manager, rule_reward, to_dict
from verl.reward.managers import (
    AbstractRewardManager,
    RawRewardFn,
    SampleRewardManager,
    base,
    dapo,
    limited,
    naive,
    remote,
)
from verl.reward.managers import RewardManagerBase as _RewardManagerBase
from verl.reward.managers.base import REWARD_MANAGER_REGISTRY as REWARD_LOOP_MANAGER_REGISTRY
from verl.reward.managers.limited import AsyncTokenBucket  # noqa: F401
from verl.reward.rows import place_scores
from verl.reward.served import ServedRewardManager
from verl.single_controller.base.worker import STACK_SIGNAL
from verl.single_controller.ray.watchdog import get_within
from verl.utils.fs import copy_to_local
from verl.utils.tokenizer import hf_tokenizer, policy_tokenizer

register = REWARD_LOOP_MANAGER_REGISTRY.register


def compute_reward(data: DataProto, reward_fn: AbstractRewardManager) -> tuple[torch.Tensor, dict[str, Any]]:
    """Token-level scores [B, R] float32 and extras {name: list of B values}; `drop_failed` reads the extra __lost__."""
    result = reward_fn(data, return_dict=True)
    return result["reward_tensor"], result["reward_extra_info"]


@ray.remote(num_cpus=1)
def compute_reward_async(
    data: DataProto, config: DictConfig | None = None, tokenizer: Any = None, reward_fn: AbstractRewardManager = None
) -> tuple[torch.Tensor, dict[str, Any]]:
    """`compute_reward` as a Ray task; without `reward_fn` the manager is built from `config` and `tokenizer`."""
    if reward_fn is None:
        if config is None or tokenizer is None:
            raise ValueError("compute_reward_async needs `reward_fn`, or both `config` and `tokenizer`.")
        kwargs = to_dict(config.reward_model.get("reward_kwargs"))
        reward_fn = load_reward_manager(config, tokenizer, num_examine=0, **kwargs)
    return compute_reward(data, reward_fn)


class RewardManagerBase(_RewardManagerBase):
    """As verl.reward.managers.RewardManagerBase, with the tensor of scores and the event loop of verl's."""

    assemble_rm_scores = staticmethod(place_scores)

    def __init__(
        self, config: DictConfig, tokenizer: Any, compute_score: RawRewardFn | None = None,
        reward_router_address: str | None = None, reward_model_tokenizer: Any = None,
    ) -> None:
        super().__init__(config, tokenizer, compute_score)
        self.reward_router_address, self.reward_model_tokenizer = reward_router_address, reward_model_tokenizer

    @property
    def loop(self) -> asyncio.AbstractEventLoop:
        """The event loop of the running `run_single`."""
        return asyncio.get_running_loop()


@functools.cache
def with_loop_constructor(manager: type[naive.NaiveRewardManager]) -> type[RewardManagerBase]:
    """A subclass of a manager that is built from the trainer's config and scores samples concurrently."""

    class LoopRewardManager(manager, RewardManagerBase):
        concurrent = True
        workers = staticmethod(RewardManagerBase.workers)

        def __init__(
            self, config: DictConfig, tokenizer: Any, compute_score: RawRewardFn | None = None,
            reward_router_address: str | None = None, reward_model_tokenizer: Any = None,
        ) -> None:
            settings = omega_conf_to_dataclass(config.reward_model, RewardModelConfig)
            arguments = dict(settings.reward_kwargs)
            if issubclass(manager, dapo.DAPORewardManager):
                limits = {"max_resp_len": config.data.max_response_length}
                arguments = {**limits, "overlong_buffer_cfg": settings.overlong_buffer, **arguments}
            if reward_router_address is not None:
                arguments["reward_router_address"] = reward_router_address
                arguments["reward_model_tokenizer"] = reward_model_tokenizer
            reward_fn_key = config.data.get("reward_fn_key", self.reward_fn_key)
            manager.__init__(self, tokenizer, 0, compute_score, reward_fn_key, **arguments)
            RewardManagerBase.__init__(self, config, tokenizer, self.compute_score)
            self.settings = settings

    LoopRewardManager.__name__ = manager.__name__
    return LoopRewardManager


DAPORewardManager = with_loop_constructor(dapo.DAPORewardManager)
NaiveRewardManager = with_loop_constructor(naive.NaiveRewardManager)
RemoteRewardManager = with_loop_constructor(remote.RemoteRewardManager)
RewardComputeWorker = ray.remote(num_cpus=0)(remote.RewardComputeWorker)


class RateLimitedRewardManager(with_loop_constructor(limited.RateLimitedRewardManager)):
    """The limits are created with the first object of the process."""

    def __init__(
        self, config: DictConfig | None = None, tokenizer: Any = None, compute_score: RawRewardFn | None = None,
        reward_router_address: str | None = None, reward_model_tokenizer: Any = None,
        num_examine: int | None = None, reward_fn_key: str | None = None, **kwargs: Any,
    ) -> None:  # fmt: skip
        if config is None:
            raise ValueError("RateLimitedRewardManager needs config, whose section reward_model has its limits.")
        super().__init__(config, tokenizer, compute_score, reward_router_address, reward_model_tokenizer)
        self.reward_fn_key = reward_fn_key or self.reward_fn_key

    @classmethod
    def init_class(cls, config: DictConfig, tokenizer: Any) -> None:
        cls.init_limits(omega_conf_to_dataclass(config.reward_model, RewardModelConfig))


def get_reward_manager_cls(name: str) -> type[RewardManagerBase]:
    """The class of that name, with the constructor of the reward loop; ValueError if there is none."""
    return loop_manager_class(base.get_reward_manager_cls(name))


def loop_manager_class(manager: type[AbstractRewardManager]) -> type[RewardManagerBase]:
    """The class with the constructor of the reward loop; ValueError if it scores whole batches."""
    if not issubclass(manager, SampleRewardManager):
        raise ValueError(
            f"reward manager {manager.__name__} scores whole batches; the reward loop needs a subclass of "
            "RewardManagerBase, which scores single samples."
        )
    return manager if issubclass(manager, RewardManagerBase) else with_loop_constructor(manager)


class RewardLoopWorker:
    """Scores samples by the configured manager, or by the reward model that `reward_router_address` serves."""

    def __init__(self, config: DictConfig, reward_router_address: str | None = None) -> None:
        self.config, self.reward_router_address = config, reward_router_address
        faulthandler.register(STACK_SIGNAL, all_threads=True)
        self.settings = omega_conf_to_dataclass(config.reward_model, RewardModelConfig)
        self.tokenizer, _ = policy_tokenizer(config)
        self.reward_model_tokenizer = None
        if self.settings.enable:
            path, trusted = copy_to_local(self.settings.model.path), self.settings.model.trust_remote_code
            self.reward_model_tokenizer = hf_tokenizer(path, trust_remote_code=trusted)
        self.custom_function = get_custom_reward_fn(config)
        function = self.custom_function or rule_reward(self.settings, workers=1)
        self.manager = loop_manager_class(get_manager_class(config))(
            config=config, tokenizer=self.tokenizer, compute_score=function,
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
        """The score of one row by ServedRewardManager."""
        model = self.settings, self.reward_router_address, self.reward_model_tokenizer
        return await ServedRewardManager(self.tokenizer, *model, self.config.data.reward_fn_key).run_single(data)


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
        """rm_scores [B, R] float32, on the last counted token, with the reward's extras (reward_extra_keys)."""
        parts = np.array_split(np.arange(len(data)), len(self.reward_loop_workers))
        busy = [pair for pair in zip(self.reward_loop_workers, parts, strict=True) if len(pair[1])]
        calls = [worker.compute_score_batch.remote(data.select_idxs(rows)) for worker, rows in busy]
        labels, workers = [f"reward loop worker {i}" for i in range(len(busy))], [worker for worker, _ in busy]
        limits = self.config.trainer.watchdog
        scored = get_within(limits, calls, labels, "compute_score_batch", workers)
        results = [result for part in scored for result in part]
        extras = [result["reward_extra_info"] for result in results]
        names = sorted({name for extra in extras for name in extra})
        columns = {name: np.array([extra.get(name) for extra in extras], dtype=object) for name in names}
        scores: torch.Tensor = place_scores(data, [result["reward_score"] for result in results])
        return DataProto.from_dict({"rm_scores": scores}, columns, {"reward_extra_keys": names})
