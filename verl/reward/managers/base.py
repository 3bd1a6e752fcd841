"""Interfaces of reward managers, of a batch and of single samples, and their names."""

import asyncio
from abc import ABC, abstractmethod
from collections.abc import Callable
from functools import cached_property
from typing import Any

import torch
from omegaconf import DictConfig

from verl.config.compose import omega_conf_to_dataclass
from verl.config.reward_model import RewardModelConfig
from verl.protocol import DataProto
from verl.reward.pool import Failure
from verl.reward.rows import GRADED, Row, log_examples, parse_results, place_results, place_scores, rows_of
from verl.utils.registry import Registry

RawRewardFn = Callable[..., Any]


class AbstractRewardManager(ABC):
    """Scores a batch; the score of a row is at one position of its response, all other positions are 0."""

    @abstractmethod
    def __init__(
        self, tokenizer: Any, num_examine: int, compute_score: RawRewardFn | None, reward_fn_key: str = "data_source",
        **kwargs: Any,
    ) -> None:
        """`num_examine`: samples of each data source that a call logs as text."""

    @abstractmethod
    def __call__(self, data: DataProto, return_dict: bool = False) -> torch.Tensor | dict[str, Any]:
        """Scores [B, R] float32, or {"reward_tensor": scores, "reward_extra_info": {name: list of B values}}."""


REWARD_MANAGER_REGISTRY: Registry[str, type[AbstractRewardManager]] = Registry(
    "reward_manager.name",
    "Your own: set reward_manager.source=importlib and reward_manager.module.{path,name}, or register it in a module "
    "named by actor_rollout_ref.model.external_lib or VERL_USE_EXTERNAL_MODULES.",
)
# Decorator: enter a manager, of batches or of single samples, under a name; a second one of that name is refused.
register = REWARD_MANAGER_REGISTRY.register


def get_reward_manager_cls(name: str) -> type[AbstractRewardManager]:
    """What was registered under that name; ValueError if there is nothing."""
    return REWARD_MANAGER_REGISTRY.find(name)


class SampleRewardManager(AbstractRewardManager):
    """Scores each sample independently: by `run_single` while others are generated, or all samples of a batch.

    A sample that fails is never scored 0: calling the manager raises a RewardError that names it, or marks it as lost
    (`reward_model.error`).
    """

    concurrent = True  # samples are scored by concurrent calls of `run_single` in this process
    num_examine = 0
    reward_fn_key = "data_source"
    compute_score: RawRewardFn | None = None
    settings: RewardModelConfig

    @property
    def can_stream(self) -> bool:
        """Whether a sample's result does not depend on the others of its batch."""
        return True

    @staticmethod
    def workers(settings: RewardModelConfig) -> int:
        """Number of processes that call the reward function."""
        return 1

    @abstractmethod
    async def run_single(self, data: DataProto) -> dict[str, Any]:
        """{"reward_score": number, "reward_extra_info": {name: value}} of a batch with one row."""

    def __call__(self, data: DataProto, return_dict: bool = False) -> torch.Tensor | dict[str, Any]:
        rows = rows_of(data, self.reward_fn_key)
        known = data.non_tensor_batch.get(GRADED)
        results = self.results(data, rows) if known is None else known.tolist()
        function = self.compute_score or self.run_single
        results = parse_results(rows, results, self.settings.error == "drop", function)
        scored = place_results(data, results)
        if self.num_examine:
            log_examples(self.tokenizer, rows, results, self.num_examine)
        return scored if return_dict else scored["reward_tensor"]

    def results(self, data: DataProto, rows: list[Row]) -> list[Any]:
        """The result of each row of a batch: a number, a dict with 'score', or a Failure."""

        async def all_rows() -> list[Any]:
            return await asyncio.gather(*(self.result_of(data[i : i + 1]) for i in range(len(data))))

        return asyncio.run(all_rows())

    async def result_of(self, sample: DataProto) -> Any:
        """`run_single` as a dict with the score among its extras, or a Failure."""
        try:
            result = await self.run_single(sample)
        except Exception as error:
            return getattr(error, "failure", None) or Failure.of(error)
        return {"score": result["reward_score"], **result["reward_extra_info"]}


class RewardManagerBase(SampleRewardManager):
    """The base of a user's manager of single samples, which is built from the trainer's full config.

    `init_class` runs once for each class and process: state that all objects share belongs there. With a served reward
    model the constructor also gets `reward_router_address` ("host:port") and `reward_model_tokenizer`.
    """

    _class_initialized = False
    assemble_rm_scores = staticmethod(place_scores)

    def __init__(
        self, config: DictConfig, tokenizer: Any, compute_score: RawRewardFn | None = None,
        reward_router_address: str | None = None, reward_model_tokenizer: Any = None,
    ) -> None:
        self.config = config
        self.tokenizer = tokenizer
        self.compute_score = compute_score
        self.reward_router_address, self.reward_model_tokenizer = reward_router_address, reward_model_tokenizer
        self.init_class(config, tokenizer)

    @classmethod
    def init_class(cls, config: DictConfig, tokenizer: Any) -> None:
        """Set up what all objects of the class share, once."""
        cls._class_initialized = True

    @property
    def loop(self) -> asyncio.AbstractEventLoop:
        """The event loop of the running `run_single`."""
        return asyncio.get_running_loop()

    @cached_property
    def settings(self) -> RewardModelConfig:
        """The section reward_model of the config."""
        return omega_conf_to_dataclass(self.config.reward_model, RewardModelConfig)
