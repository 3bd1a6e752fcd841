"""Shards modules with FSDP2 and moves, gathers or clips what was sharded."""

import math
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager

import torch
import torch.distributed as dist
from loguru import logger
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, OffloadPolicy, fully_shard
from torch.distributed.tensor import DTensor, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ParallelStyle, parallelize_module
from transformers import PreTrainedModel


def create_device_mesh(
    world_size: int, fsdp_size: int, device_type: str | None = None, tensor_parallel_size: int = 1
) -> DeviceMesh:
    """Dimension "fsdp" over all ranks; "ddp" before it when `fsdp_size` ranks share one copy, "tp" after it when
    `tensor_parallel_size` neighbouring ranks split each layer."""
    device_type = device_type or ("cuda" if torch.cuda.is_available() else "cpu")
    ranks = world_size if fsdp_size < 0 else min(fsdp_size, world_size)
    if ranks == 0 or world_size % ranks:
        raise ValueError(
            f"fsdp_config.fsdp_size={fsdp_size} does not divide the {world_size} ranks; use a divisor, or -1 for all."
        )
    if ranks % tensor_parallel_size:
        raise ValueError(
            f"fsdp_config.tensor_parallel_size={tensor_parallel_size} does not divide the {ranks} ranks that share one "
            "copy of the weights; use a divisor."
        )
    all_sizes = {"ddp": world_size // ranks, "fsdp": ranks // tensor_parallel_size, "tp": tensor_parallel_size}
    sizes = {name: size for name, size in all_sizes.items() if name == "fsdp" or size > 1}
    return init_device_mesh(device_type, tuple(sizes.values()), mesh_dim_names=tuple(sizes))


def tensor_parallel_mesh(mesh: DeviceMesh) -> DeviceMesh | None:
    """The ranks that split each layer with this one; None if no layer is split."""
    return mesh["tp"] if "tp" in mesh.mesh_dim_names else None


def shard_units(module: nn.Module, wrap_policy: dict) -> list[nn.Module]:
    """The submodules that get a shard group of their own, inner ones first; by default the decoder layers
    (`_no_split_modules` of each transformers model inside).

    A module that shares a weight with one outside of it (a tied output head) gets none: a weight has one group.
    `wrap_policy` may hold `transformer_layer_cls_to_wrap` (class names), `min_num_params` (size) or `disable`.
    """
    known = {"transformer_layer_cls_to_wrap", "min_num_params", "disable"}
    if unknown := set(wrap_policy) - known:
        raise ValueError(f"fsdp_config.wrap_policy has unknown keys {sorted(unknown)}. Known: {sorted(known)}.")
    if wrap_policy.get("disable"):
        return []
    if wrap_policy.get("min_num_params"):
        return _units_by_size(module, int(wrap_policy["min_num_params"]))
    names = wrap_policy.get("transformer_layer_cls_to_wrap")
    if isinstance(names, str):
        names = [names]
    if not names:
        models = [m for m in module.modules() if isinstance(m, PreTrainedModel)]
        names = {name for m in models for name in (m._no_split_modules or ())}
        return [m for m in _inner_first(module) if type(m).__name__ in names]
    classes = {type(m).__name__ for m in _inner_first(module)}
    if missing := set(names) - classes:
        raise ValueError(
            f"fsdp_config.wrap_policy.transformer_layer_cls_to_wrap names {sorted(missing)}, "
            f"which {type(module).__name__} does not contain. It has: {', '.join(sorted(classes))}."
        )
    sharing = _sharing(module)
    return [m for m in _inner_first(module) if type(m).__name__ in names and m not in sharing]


def _inner_first(module: nn.Module) -> list[nn.Module]:
    """Submodules without the root, children before parents."""
    return [m for m in reversed(list(module.modules())) if m is not module]


def _sharing(module: nn.Module) -> set[nn.Module]:
    """The submodules with a weight that a module outside of them has too."""
    uses = Counter(p for _, p in module.named_parameters(remove_duplicate=False))
    inside = {m: Counter(p for _, p in m.named_parameters(remove_duplicate=False)) for m in _inner_first(module)}
    return {m for m, own in inside.items() if any(uses[p] > count for p, count in own.items())}


def _units_by_size(module: nn.Module, min_num_params: int) -> list[nn.Module]:
    units: list[nn.Module] = []
    taken: set[nn.Parameter] = set()
    sharing = _sharing(module)
    for child in (m for m in _inner_first(module) if m not in sharing):
        free = [p for p in child.parameters() if p not in taken]
        # A ModuleList has no forward of its own: nothing would gather its parameters.
        if not isinstance(child, nn.ModuleList | nn.ModuleDict) and sum(p.numel() for p in free) >= min_num_params:
            units.append(child)
            taken.update(free)
    return units


def apply_fsdp2(
    module: nn.Module,
    mesh: DeviceMesh,
    *,
    wrap_policy: dict,
    reshard_after_forward: bool,
    mp_policy: MixedPrecisionPolicy,
    offload_policy: bool,
    forward_prefetch: bool,
    tensor_parallel: Mapping[nn.Module, ParallelStyle] | None = None,
) -> FSDPModule:
    """Shards `module` in place over the mesh's dimension "fsdp", copies it over "ddp", and splits its layers over "tp"
    as `tensor_parallel` says (`tensor_parallel.styles_of`)."""
    on_gpu = mesh.device_type != "cpu"
    splits, styles = tensor_parallel_mesh(mesh), dict(tensor_parallel or {})
    names = tuple(name for name in mesh.mesh_dim_names if name != "tp")
    options = dict(
        mesh=mesh[names] if len(names) < mesh.ndim else mesh,
        mp_policy=mp_policy,
        # On CPU ranks the parameters are where the policy would put them.
        offload_policy=CPUOffloadPolicy(pin_memory=True) if offload_policy and on_gpu else OffloadPolicy(),
    )
    units = shard_units(module, wrap_policy)
    # A group has one dtype: trained parts next to a frozen one of lower precision are groups of their own.
    first = next((p.dtype for p in module.parameters()), None)
    for child in module.children():
        if child not in units and any(p.dtype != first for p in child.parameters()):
            units.append(child)
    for unit in [*units, module]:
        _materialize(unit, mesh.device_type)
        _split(unit, splits, styles)
        # None: the root stays gathered between forward and backward, where it would be gathered again at once.
        reshards = None if unit is module and reshard_after_forward else reshard_after_forward
        fully_shard(unit, reshard_after_forward=reshards, **options)
    if forward_prefetch:
        ordered = [m for m in module.modules() if m in set(units)]
        for here, following in zip(ordered, ordered[1:], strict=False):
            here.set_modules_to_forward_prefetch([following])
    if mesh.get_rank() == 0:
        logger.debug("{} sharded in {} groups over mesh {}", type(module).__name__, len(units) + 1, tuple(mesh.shape))
    return module


def _materialize(unit: nn.Module, device_type: str) -> None:
    """Gives placeholders memory, which sharding frees again; on a CPU no page of it is ever written."""
    for parameter in unit.parameters():
        if is_placeholder(parameter):
            parameter.data = torch.empty(parameter.shape, dtype=parameter.dtype, device=device_type)


def is_placeholder(tensor: torch.Tensor) -> bool:
    """Whether all entries of a plain tensor are one number in memory: a parameter whose weights are yet to be read."""
    return not isinstance(tensor, DTensor) and tensor.numel() > 1 and not any(tensor.stride())


def tensors_to_fill(module: nn.Module) -> dict[str, torch.Tensor]:
    """The parameters and buffers by name that a loader left on the meta device on some rank; every rank calls it.

    To be called before `apply_fsdp2`: rank 0 must hold them.
    """
    tensors = {**dict(module.named_parameters()), **dict(module.named_buffers())}
    missing: list[list[str]] = [[] for _ in range(dist.get_world_size())]
    dist.all_gather_object(missing, [name for name, tensor in tensors.items() if tensor.is_meta])
    return {name: tensors[name].detach() for name in dict.fromkeys(name for names in missing for name in names)}


@torch.no_grad()
def fill_from_rank_zero(
    module: FSDPModule, whole: Mapping[str, torch.Tensor], device: torch.device, keep_on_cpu: bool
) -> None:
    """Give the other ranks their shards of rank 0's tensors (`tensors_to_fill`), one tensor at a time.

    So a machine holds a frozen model once, not once for each rank. `keep_on_cpu`: where shards stay offloaded.
    """
    parameters, shards = dict(module.named_parameters()), {}
    for name, tensor in whole.items():
        if dist.get_rank() == 0:
            full = tensor.to(device).contiguous()
        else:
            full = torch.empty(tensor.shape, dtype=tensor.dtype, device=device)
        dist.broadcast(full, 0)
        if not tensor.is_meta:
            continue
        if name in parameters:
            sharded = parameters[name]
            shard = distribute_tensor(full, sharded.device_mesh, sharded.placements, src_data_rank=None)
            shards[name] = shard.cpu() if keep_on_cpu else shard
        else:
            owner, _, attribute = name.rpartition(".")
            module.get_submodule(owner)._buffers[attribute] = full
    module.load_state_dict(shards, strict=False, assign=True)


def _split(unit: nn.Module, mesh: DeviceMesh | None, styles: dict[nn.Module, ParallelStyle]) -> None:
    """Leave each rank of the one-dimensional `mesh` its part of the weights below `unit`, which all of them hold.

    What is split is taken out of `styles`: units lie inside other units.
    """
    for module in unit.modules():
        if (style := styles.pop(module, None)) is not None:
            trained = {name: parameter.requires_grad for name, parameter in module.named_parameters()}
            parallelize_module(module, mesh, style, src_data_rank=None)
            for name, parameter in module.named_parameters():
                parameter.requires_grad_(trained[name])


def reshard(module: nn.Module) -> None:
    """Frees gathered parameters that a forward without backward has left behind."""
    for m in module.modules():
        if isinstance(m, FSDPModule):
            m.reshard()


@contextmanager
def kept_gathered(module: nn.Module, reshard_after_forward: bool) -> Iterator[None]:
    """What a forward gathers stays until the caller calls `reshard`; after the block as set by `apply_fsdp2`."""
    units = [m for m in module.modules() if isinstance(m, FSDPModule) and m is not module]  # the root keeps its own
    for unit in units:
        unit.set_reshard_after_forward(False, recurse=False)
    try:
        yield
    finally:
        for unit in units:
            unit.set_reshard_after_forward(reshard_after_forward, recurse=False)


def local_tensor(tensor: torch.Tensor) -> torch.Tensor:
    """This rank's part [n / ranks, ...] of a sharded tensor [n, ...]; a plain tensor is returned as it is."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def full_tensor(tensor: torch.Tensor, device: torch.device | str | None = None) -> torch.Tensor:
    """The full tensor, of its global shape, on every rank: a collective call if sharded; moved to `device` first."""
    tensor = tensor.detach()
    if device is not None:
        tensor = tensor.to(device)
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


BUCKET_BYTES = 512 << 20


def full_tensors(
    tensors: Iterable[tuple[str, torch.Tensor]], bucket_bytes: int = BUCKET_BYTES, check_finite: bool = False
) -> Iterator[tuple[str, torch.Tensor]]:
    """(name, full tensor) of each; sharded ones travel in buckets, one collective call for about `bucket_bytes`.

    With `check_finite` a bucket is checked as a whole, by one transfer to the host; FloatingPointError names the
    weight. Every rank must walk through all of it.
    """
    for bucket in buckets(tensors, bucket_bytes, one_dtype=True):
        yield from _gather_bucket(bucket, check_finite)


def buckets(
    tensors: Iterable[tuple[str, torch.Tensor]], limit: int, one_dtype: bool = False
) -> Iterator[list[tuple[str, torch.Tensor]]]:
    """Consecutive tensors, of `limit` bytes at most together, or of one tensor; with `one_dtype` of one dtype."""
    bucket: list[tuple[str, torch.Tensor]] = []
    size = 0
    for name, tensor in tensors:
        nbytes = tensor.numel() * tensor.element_size()
        if bucket and (size + nbytes > limit or (one_dtype and tensor.dtype != bucket[0][1].dtype)):
            yield bucket
            bucket, size = [], 0
        bucket.append((name, tensor))
        size += nbytes
    if bucket:
        yield bucket


def _gather_bucket(bucket: list[tuple[str, torch.Tensor]], check_finite: bool) -> Iterator[tuple[str, torch.Tensor]]:
    """What `full_tensors` gives for tensors of one dtype."""
    sharded = {name: t for name, t in bucket if is_row_sharded(t) and t.device_mesh.size(t.device_mesh.ndim - 1) > 1}
    parts: dict[str, torch.Tensor] = {}
    blocks: list[torch.Tensor] = []
    if sharded:
        mesh = next(iter(sharded.values())).device_mesh
        ranks, group = mesh.size(mesh.ndim - 1), mesh.get_group(mesh.ndim - 1)
        # A rank's rows of a tensor, as on the first one: the last may have fewer, or none.
        widths = [-(-len(t) // ranks) * math.prod(t.shape[1:]) for t in sharded.values()]
        local = next(iter(sharded.values())).to_local().new_zeros(sum(widths))
        for part, t in zip(local.split(widths), sharded.values(), strict=True):
            part[: t.to_local().numel()] = t.to_local().flatten()
        received = local.new_empty(ranks, len(local))
        dist.all_gather_single(received.view(-1), local, group=group)
        parts = dict(zip(sharded, received.split(widths, dim=1), strict=True))
        blocks.append(received)
    whole = {name: full_tensor(t) for name, t in bucket if name not in parts}
    blocks += whole.values()
    if check_finite and not _all_finite(blocks):
        name, tensor = next((n, t) for n, t in (parts | whole).items() if not torch.isfinite(t).all())
        shape = tuple(dict(bucket)[name].shape)
        raise FloatingPointError(f"weight '{name}' {shape} is not finite as {tensor.dtype}; it is not sent.")
    for name, t in bucket:
        value = parts[name].reshape(-1, *t.shape[1:])[: len(t)] if name in parts else whole[name]
        # Who keeps a tensor must not keep the padding of its last rank, or the bucket, with it.
        yield name, value.clone() if name in parts and value.untyped_storage().nbytes() > value.nbytes else value


def _all_finite(tensors: list[torch.Tensor]) -> bool:
    """Whether no number is NaN or infinite, by one transfer to the host."""
    # The extremes of NaN are NaN. On a CPU they take a twentieth of the time of isfinite, or of a norm.
    extremes = [extreme for t in tensors if t.numel() for extreme in torch.aminmax(t)]
    return not extremes or bool(torch.isfinite(torch.stack(extremes)).all())


def is_row_sharded(tensor: torch.Tensor) -> bool:
    """Whether ranks hold consecutive rows of a tensor, as FSDP2 shards it, and nothing else divides it."""
    if not isinstance(tensor, DTensor):
        return False
    *copies, last = tensor.placements
    return last.is_shard(0) and type(last) is Shard and all(p.is_replicate() for p in copies)


def grad_norm(params: Iterable[nn.Parameter], mesh: DeviceMesh) -> float:
    """Euclidean norm of all gradients together, over all shards; the same float on every rank."""
    squares = torch.zeros((), dtype=torch.float64, device=mesh.device_type)
    splits = tensor_parallel_mesh(mesh)
    grads = [p.grad for p in params if p.grad is not None]
    if grads:
        norms = torch.stack(torch._foreach_norm([local_tensor(g) for g in grads], 2.0))
        # Every rank that splits layers holds what is not split: each counts its share of it.
        copies = [1 if splits is None or _is_split(g) else splits.size() for g in grads]
        squares += (norms.to(squares.device, torch.float64).square() / squares.new_tensor(copies)).sum()
    # Copies of a shard (the "ddp" dimension) hold the same gradient: only shards add up.
    dist.all_reduce(squares, group=mesh.get_group("fsdp"))
    if splits is not None:
        dist.all_reduce(squares, group=splits.get_group())
    return math.sqrt(squares.item())  # of NaN and infinity: the same


def _is_split(tensor: torch.Tensor) -> bool:
    """Whether tensor parallel ranks hold different parts of a tensor."""
    if not isinstance(tensor, DTensor) or "tp" not in tensor.device_mesh.mesh_dim_names:
        return False
    return not tensor.placements[tensor.device_mesh.mesh_dim_names.index("tp")].is_replicate()


def activations_on_cpu() -> torch.autograd.graph.saved_tensors_hooks:
    """Within it, tensors that a forward saves for its backward wait on the CPU; parameters stay where they are."""

    def to_cpu(tensor: torch.Tensor) -> tuple[torch.device | None, torch.Tensor]:
        if isinstance(tensor._base if tensor._is_view() else tensor, nn.Parameter):
            return None, tensor
        waiting = torch.empty_like(tensor, device="cpu", pin_memory=tensor.is_cuda)
        return tensor.device, waiting.copy_(tensor, non_blocking=tensor.is_cuda)

    def back(packed: tuple[torch.device | None, torch.Tensor]) -> torch.Tensor:
        device, tensor = packed
        return tensor if device is None else tensor.to(device, non_blocking=True)

    return torch.autograd.graph.saved_tensors_hooks(to_cpu, back)


def scale_grads(params: Iterable[nn.Parameter], factor: float) -> None:
    """Multiplies every gradient, in place."""
    grads = [local_tensor(p.grad) for p in params if p.grad is not None]
    if grads:
        torch._foreach_mul_(grads, factor)


def offload_fsdp_model_to_cpu(module: nn.Module) -> None:
    """Parameters, gradients and buffers leave the accelerator."""
    reshard(module)
    module.to("cpu")
    _free_accelerator_cache()


def load_fsdp_model_to_gpu(module: nn.Module, device: torch.device | str) -> None:
    """Parameters, gradients and buffers go back to the accelerator."""
    module.to(device)


def offload_fsdp_optimizer(optimizer: torch.optim.Optimizer) -> None:
    """The optimizer's state leaves the accelerator."""
    _move_optimizer(optimizer, lambda *_: "cpu")
    _free_accelerator_cache()


def load_fsdp_optimizer(optimizer: torch.optim.Optimizer, device: torch.device | str) -> None:
    """The optimizer's moments go back to the accelerator; step counters go to the device where the group's options
    want them: the accelerator with `fused` or `capturable`, else the CPU."""
    _move_optimizer(
        optimizer,
        lambda group, value: device if value.dim() or group.get("fused") or group.get("capturable") else "cpu",
    )


def _move_optimizer(optimizer: torch.optim.Optimizer, device_for: Callable) -> None:
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            state = optimizer.state.get(parameter, {})
            for key, value in state.items():
                if isinstance(value, torch.Tensor):
                    state[key] = value.to(device_for(group, value), non_blocking=True)


def _free_accelerator_cache() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
