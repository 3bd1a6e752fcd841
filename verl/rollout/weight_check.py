"""Whether the weights that a rollout generates with are those that are trained."""

import hashlib
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule

from verl.training.parallel.sharding import full_tensors, reshard
from verl.training.peft_weights import adapted_layers, peft_models


class WeightMismatchError(RuntimeError):
    """A rollout generates with other weights than those that are trained."""


@dataclass
class WeightCheck:
    """The outcome for one rank: names that are equal, differences in words, and names that could not be compared."""

    equal: int = 0
    differences: list[str] = field(default_factory=list)
    unread: list[str] = field(default_factory=list)

    def add(self, name: str, difference: str | None) -> None:
        """Count a tensor; `difference` is None where it is equal."""
        if difference is None:
            self.equal += 1
        else:
            self.differences.append(f"{name} {difference}")

    def raise_if_different(self, rollout: str) -> None:
        """Raise WeightMismatchError that names the tensors which differ."""
        if self.differences:
            shown, more = "; ".join(self.differences[:5]), len(self.differences) - 5
            raise WeightMismatchError(
                f"actor_rollout_ref.rollout.name={rollout}: after a weight update {len(self.differences)} of "
                f"{self.equal + len(self.differences)} compared tensors are not the trainer's: {shown}"
                f"{f' and {more} more' if more > 0 else ''}. Samples would come from another model than the one that "
                "is trained. See docs/trust.md; actor_rollout_ref.rollout.verify_weights_every=0 turns this check off."
            )


def difference_of(held: torch.Tensor, expected: torch.Tensor) -> str | None:
    """How two tensors differ, in words; None if every entry is equal. `expected` is rounded to the dtype of `held`."""
    if held.shape != expected.shape:
        return f"has the shape {tuple(held.shape)}, expected {tuple(expected.shape)}"
    expected = expected.to(device=held.device, dtype=held.dtype)
    if torch.equal(held, expected):
        return None
    gap = (held.float() - expected.float()).abs()
    return f"differs in {int((held != expected).sum())} of {held.numel()} entries, by {gap.max():.2g} at most"


def digest(tensor: torch.Tensor) -> str:
    """SHA-256 of a tensor's bytes, shape and dtype."""
    # A copy: memory that NumPy has seen cannot be resized any more, as FSDP2 does to free a gathered weight.
    own = tensor.detach().cpu().contiguous().clone()
    flat = own.as_strided((own.numel(),), (1,))  # one entry may have any stride
    hashed = hashlib.sha256(f"{tuple(tensor.shape)} {tensor.dtype}".encode())
    hashed.update(memoryview(flat.view(torch.uint8).numpy()))
    return hashed.hexdigest()


@torch.no_grad()
def compare_modules(actor: Any, generating: Any) -> WeightCheck:
    """Compare the tensors that `generating`'s forward computes with with those that `actor` trains; both are engines.

    For rollouts that run the actor's own module: `generating` is the engine that they were bound to. A module may
    compute with gathered copies of its shards, so the copies are read before the shards are gathered again. Every
    rank must call it.
    """
    check = WeightCheck()
    module = generating.module
    with generating.eval_mode():
        for part in module.modules():
            if isinstance(part, FSDPModule):
                part.unshard()  # does nothing where a copy was left behind, which is then compared
        held = {name: (tensor.dtype, digest(tensor)) for name, tensor in full_tensors(module.named_parameters())}
        reshard(module)
    with actor.eval_mode():
        reshard(actor.module)
        trained = full_tensors(actor.module.named_parameters())
        for name, tensor in trained:
            dtype, value = held.pop(name, (tensor.dtype, ""))
            same = digest(tensor.to(dtype)) == value
            check.add(name, None if same else "differs" if value else "is missing in the module that generates")
    for name in held:
        check.add(name, "is not among the trained model's tensors")
    for name, difference in adapter_faults(module).items():
        check.add(name, difference)
    return check


def adapter_faults(module: nn.Module) -> Mapping[str, str]:
    """LoRA layers that do not add scaling * B A, by name; `scaling` is that of the adapter's configuration."""
    wrapper = peft_models(module).get("")
    faults = {}
    for name, layer in adapted_layers(module).items():
        if layer.disable_adapters:
            faults[name] = "computes without its adapter"
            continue
        if wrapper is None:
            continue
        for adapter in layer.active_adapters:
            if adapter in getattr(layer, "lora_A", ()) and not wrapper.peft_config[adapter].alpha_pattern:
                wanted = lora_scaling(wrapper.peft_config[adapter], layer.r[adapter])
                if not math.isclose(layer.scaling[adapter], wanted, rel_tol=1e-6):
                    faults[name] = f"scales its adapter by {layer.scaling[adapter]:g}, expected {wanted:g}"
    return faults


def lora_scaling(config: Any, rank: int) -> float:
    """The factor of B A in a LoRA adapter of a peft configuration."""
    return config.lora_alpha / (math.sqrt(rank) if config.use_rslora else rank)


def shortened(names: Iterable[str], shown: int = 3) -> str:
    """A few names, and how many there are."""
    listed = list(names)
    return ", ".join(listed[:shown]) + (f", ... ({len(listed)})" if len(listed) > shown else "")
