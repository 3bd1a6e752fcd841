"""The interface of a rollout engine, with the table that finds one by name."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from verl.config.model import HFModelConfig
from verl.config.rollout import RolloutConfig
from verl.protocol import DataProto
from verl.utils.import_utils import load_class_from_fqn
from verl.utils.registry import Registry, installed_plugins, nearest

KEY = "actor_rollout_ref.rollout"
DTYPES = {"bf16": "bfloat16", "fp16": "float16", "fp32": "float32"}  # other names of rollout.dtype


class BaseRollout(ABC):
    """Generates with the actor's current weights.

    A rank calls `bind_actor` once; then for each phase `resume(["weights"])`, `update_weights` if the rollout does not
    hold the actor's weights, `resume(["kv_cache"])`, `generate_sequences` any number of times, and `release`; each may
    be `async def`. Every method but `generate_sequences` does nothing by default.
    """

    #: whether `update_weights` takes a LoRA adapter alone (rollout.lora_as_adapter)
    takes_adapters: bool = False
    #: whether the weights outlast `release`, so that they need not be sent again before they change
    keeps_weights: bool = False
    #: the version of the weights that it holds, a global step; the worker sets it
    weights_version: int = 0

    def __init__(self, config: RolloutConfig, model_config: HFModelConfig, device_mesh: DeviceMesh | None) -> None:
        self.config = config
        self.model_config = model_config
        self.device_mesh = device_mesh

    def bind_actor(self, engine: Any, policy: Any) -> None:  # noqa: B027
        """Hand over the actor's engine with its policy, for rollouts that run the actor's own module."""

    def update_weights(self, weights: Iterable[tuple[str, torch.Tensor]], **kwargs: Any) -> None:  # noqa: B027
        """Take the actor's weights as a stream of (Hugging Face name, full tensor of the shape in its checkpoint).

        A rollout whose `takes_adapters` is True gets `peft_config` too, and then the weights of a LoRA adapter, under
        their names in peft's files.
        """

    def resume(self, tags: list[str]) -> None:  # noqa: B027
        """Bring weights and caches back into memory (`tags`: which of "weights", "kv_cache")."""

    def release(self) -> None:  # noqa: B027
        """Give the memory of weights and caches back to the trainer."""

    def close(self) -> None:  # noqa: B027
        """End what the rollout started (servers, connections); called once, when the run is over."""

    @abstractmethod
    def generate_sequences(self, prompts: DataProto) -> DataProto:
        """Answer left-padded prompts [B, P]; `meta_info["n"]` answers each, those of one prompt adjacent.

        Gives prompts [B*n, P], responses [B*n, R] (right-padded), input_ids, attention_mask and position_ids
        [B*n, P+R], response_mask [B*n, R], all int64. attention_mask is 1 on tokens, 0 on padding; response_mask is 1
        on generated tokens with their EOS, 0 after it.
        """


def engine_group(size: int, timeout: timedelta | None = None) -> dist.ProcessGroup | None:
    """The neighbouring ranks that share an engine of `size` ranks with this one (gloo), None for one rank; collective.

    Raises ValueError unless `size` divides the ranks.
    """
    if size == 1:
        return None
    ranks = dist.get_world_size() if dist.is_initialized() else 1
    if ranks % size:
        raise ValueError(f"{KEY}.tensor_model_parallel_size={size} does not divide the {ranks} ranks; use a divisor.")
    return dist.new_subgroups(size, backend="gloo", timeout=timeout)[0]


# (name, mode) -> class, or its dotted name: what comes with verl is imported when it is requested, since some rollouts
# need packages of their own.
_ROLLOUT_REGISTRY: Registry[tuple[str, str], type[BaseRollout] | str] = Registry(
    f"{KEY}.{{name,mode}}",
    "Your own: register it with register_rollout in a module named by actor_rollout_ref.model.external_lib.",
)
_ROLLOUT_REGISTRY |= {
    ("hf", "sync"): "verl.rollout.hf_rollout.HFRollout",
    ("sglang", "async"): "verl.rollout.sglang_rollout.sglang_rollout.ServerAdapter",
    ("sglang", "sync"): "verl.rollout.sglang_rollout.sglang_rollout.ServerAdapter",
    ("vllm", "async"): "verl.rollout.vllm_rollout.vllm_async_rollout.vLLMAsyncRollout",
    ("vllm", "sync"): "verl.rollout.vllm_rollout.vllm_rollout.vLLMRollout",
}


def _register_installed() -> None:
    """Register the rollouts of installed packages; ValueError for one without a mode or with the name of another."""
    for point, path in installed_plugins("rollouts").items():
        name, _, mode = point.rpartition(".")
        if not name or not mode:
            text = f"entry point {point!r} of the group verl.rollouts ({path}) names no mode"
            raise ValueError(f"{text}; use <rollout.name>.<rollout.mode>.")
        _ROLLOUT_REGISTRY.register((name, mode))(path)


_register_installed()


def register_rollout(name: str, mode: str = "sync") -> Callable[[type[BaseRollout]], type[BaseRollout]]:
    """Decorator: enter a rollout class for `rollout.name` and `rollout.mode`."""
    return _ROLLOUT_REGISTRY.register((name, mode))


def get_rollout_class(rollout_name: str, mode: str = "async") -> type[BaseRollout]:
    """The rollout class of that name and mode; an unknown pair is an error with the nearest."""
    modes = [known_mode for name, known_mode in _ROLLOUT_REGISTRY if name == rollout_name]
    if not modes:
        hint = nearest(rollout_name, [name for name, _ in _ROLLOUT_REGISTRY]) or "."
        known = ", ".join(sorted(map("/".join, _ROLLOUT_REGISTRY)))
        raise ValueError(f"{KEY}.name={rollout_name!r} is unknown{hint} Known: {known}. {_ROLLOUT_REGISTRY.howto}")
    if mode == "async" and "sync" in modes and mode not in modes:
        mode = "sync"  # a step generates in one call either way
    if mode not in modes:
        raise ValueError(
            f"{KEY}.mode={mode!r} is unknown for rollout.name={rollout_name!r}; "
            f"it has: {', '.join(modes)}. Set {KEY}.mode={modes[0]}."
        )
    rollout = _ROLLOUT_REGISTRY[rollout_name, mode]
    return load_class_from_fqn(rollout, "rollout") if isinstance(rollout, str) else rollout
