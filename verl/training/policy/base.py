"""The policy interface: from a micro-batch to the log-probs of its actions."""

from abc import ABC, abstractmethod
from collections.abc import Callable

import torch
from tensordict import TensorDict
from torch import nn

from verl.utils.registry import Registry


class Policy(ABC):
    """Turns a model's output into log-probs of actions, so that the update loop need not know what an action is."""

    #: columns of the batch that `log_probs` reads
    required_keys: tuple[str, ...] = ("responses", "input_ids", "attention_mask", "position_ids")

    #: whether the input of the forward has the responses; if not, all rows of a group have the same input
    reads_answers: bool = True

    #: metrics of |log-prob in the update - log-prob before it|: mean and maximum over counted positions
    drift_metrics: tuple[str, str] = ("actor/logprob_drift", "actor/logprob_drift_max")

    #: use_torch_compile, which the worker sets: whether log-probs and entropy of a vocabulary are compiled
    compiled: bool = False

    # The next three are called in this order, once; the base class does nothing in them.

    def set_forward(self, *, remove_padding: bool, share_prompt: bool) -> None:  # noqa: B027
        """Ask for forwards without padding (use_remove_padding) and with shared prompts (share_prompt_forward)."""

    def bind(self, model: nn.Module) -> None:  # noqa: B027
        """Prepare the model, sharded or not, before its first forward."""

    def compare_layouts(self, model: nn.Module, device: torch.device) -> None:  # noqa: B027
        """Keep padding after all where this model's results differ without it. Called on all ranks.

        `device`: where the model computes; with fsdp_config.offload_policy not that of its parameters.
        """

    def forward_tokens(self, micro_batch: TensorDict) -> int:
        """Tokens that the forward of `log_probs` computes."""
        return micro_batch["attention_mask"].numel()

    @abstractmethod
    def log_probs(
        self, model: nn.Module, micro_batch: TensorDict, *, temperature: float, with_entropy: bool
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """(log_probs [B, R] float32, entropy [B, R] float32 or None) of `responses` [B, R] at this temperature.

        micro_batch holds `required_keys`, batch size B. Values at padded positions are finite and have no gradient.
        """


_POLICIES: Registry[str, type[Policy]] = Registry(
    "actor_rollout_ref.model.policy.name",
    "Your own: register it in a module named by actor_rollout_ref.model.external_lib.",
)


def register_policy(name: str) -> Callable[[type[Policy]], type[Policy]]:
    """Class decorator: registers a Policy under `name`."""
    return _POLICIES.register(name)


def get_policy(name: str, **kwargs) -> Policy:
    """A policy of that name, built with `kwargs`; ValueError for an unknown name suggests the nearest known one."""
    return _POLICIES.find(name)(**kwargs)


def check_temperature(temperature: float) -> float:
    """The temperature as a float; ValueError unless it is above 0."""
    if not temperature > 0:
        raise ValueError(
            f"temperature={temperature} cannot be used for log-probs: it must be above 0 "
            "(for greedy decoding set do_sample=false and keep the training temperature)."
        )
    return float(temperature)
