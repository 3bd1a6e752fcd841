"""Runs a model's forward in float32, whatever type FSDP2 gathers its weights in."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_map


@contextmanager
def in_float32(model: nn.Module) -> Iterator[None]:
    """Compute in float32 within the context, in a model whose weights FSDP2 gathers in half precision.

    Every function gets its half-precision arguments widened; stored weights keep their type. FSDP2's hooks are left
    out: they gather and cast in types of their own.
    """
    mode = _Float32()
    with ExitStack() as stack:
        for part in (part for part in model.modules() if isinstance(part, FSDPModule)):
            for handle in mode.register_around_hooks(part):
                stack.callback(handle.remove)
        stack.enter_context(mode)
        yield


class _Float32(TorchFunctionMode):
    """Widens tensors and dtypes of half precision among the arguments of every function, outside of FSDP2's hooks."""

    def __init__(self) -> None:
        super().__init__()
        self.depth = 0  # of FSDP2's hooks that run
        self.inputs: list[Any] = []

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if self.depth:
            return func(*args, **(kwargs or {}))
        args, kwargs = tree_map(_widened, (args, kwargs or {}))
        return func(*args, **kwargs)

    def register_around_hooks(self, part: FSDPModule) -> list[Any]:
        """Switch the mode off while FSDP2's hooks of `part` run, and undo their cast of inputs; handles to remove."""

        def before(module: nn.Module, args: Any, kwargs: Any) -> None:
            self.depth += 1
            self.inputs.append((args, kwargs))

        def restore_inputs(module: nn.Module, args: Any, kwargs: Any) -> Any:
            self.depth -= 1
            return self.inputs.pop()  # as they were before the cast

        def enter(*_: Any) -> None:
            self.depth += 1

        def leave(*_: Any) -> None:
            self.depth -= 1

        # Between `before` and `restore_inputs` runs FSDP2's hook that gathers weights and casts inputs, between `enter`
        # and `leave` the one that frees weights. `inputs` is a stack, since parts are nested.
        return [
            part.register_forward_pre_hook(before, prepend=True, with_kwargs=True),
            part.register_forward_pre_hook(restore_inputs, with_kwargs=True),
            part.register_forward_hook(enter, prepend=True),
            part.register_forward_hook(leave),
        ]


def _widened(value: Any) -> Any:
    """A tensor or dtype of half precision as float32; anything else unchanged."""
    half = (torch.bfloat16, torch.float16)
    if isinstance(value, torch.Tensor):
        return value.float() if value.dtype in half else value
    return torch.float32 if isinstance(value, torch.dtype) and value in half else value
