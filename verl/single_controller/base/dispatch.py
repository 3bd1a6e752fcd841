"""How a call on a worker group becomes one call per rank: @register, its dispatch modes and its execute modes.

A dispatch mode is a pair of pure functions. `dispatch_fn(worker_group, *args, **kwargs)` turns every argument into a
list with one entry per rank; `collect_fn(worker_group, output)` turns the list of the ranks' outputs into one value.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

from tensordict import TensorDict

from verl.protocol import DataProto, DataProtoFuture, concat_batches
from verl.protocol.merge import chunk_tensordict

if TYPE_CHECKING:
    from verl.single_controller.base.worker_group import WorkerGroup

MAGIC_ATTR = "_verl_registered"
# kwarg with (rows of padding, rows with them), from a dispatch function for the group's call, never for a worker
PADDING_KEY = "_verl_padding_rows"


class DynamicEnumMeta(type):
    """Lets a DynamicEnum class be iterated, tested for membership and indexed by name."""

    def __iter__(cls) -> Iterator[Any]:
        return iter(cls._registry.values())

    def __contains__(cls, item: Any) -> bool:
        return item.upper() in cls._registry if isinstance(item, str) else item in cls._registry.values()

    def __getitem__(cls, name: str) -> Any:
        member = cls.from_name(name)
        if member is None:
            raise KeyError(f"{cls.__name__} has no member {name!r}; known: {', '.join(cls.names())}")
        return member

    def names(cls) -> list[str]:
        return list(cls._registry)

    def values(cls) -> list[Any]:
        return list(cls._registry.values())


class DynamicEnum(metaclass=DynamicEnumMeta):
    """An enum whose members can be registered at run time; names are upper case, each subclass has its own."""

    _registry: dict[str, DynamicEnum] = {}
    _next_value: int = 0

    def __init_subclass__(cls, **kwargs):
        super().__init_subclass__(**kwargs)
        cls._registry = {}
        cls._next_value = 0

    def __init__(self, name: str, value: int):
        self.name = name
        self.value = value

    def __repr__(self) -> str:
        return f"<{type(self).__name__}.{self.name}: {self.value}>"

    def __reduce__(self):
        return type(type(self)).__getitem__, (type(self), self.name)  # a member stays one object across processes

    @classmethod
    def register(cls, name: str) -> DynamicEnum:
        key = name.upper()
        if key in cls._registry:
            raise ValueError(f"{cls.__name__}.{key} is already registered; remove it first or take another name")
        cls._registry[key] = cls(key, cls._next_value)
        cls._next_value += 1
        setattr(cls, key, cls._registry[key])
        return cls._registry[key]

    @classmethod
    def remove(cls, name: str) -> DynamicEnum:
        member = cls[name]
        del cls._registry[member.name]
        delattr(cls, member.name)
        return member

    @classmethod
    def from_name(cls, name: str) -> DynamicEnum | None:
        return cls._registry.get(name.upper())


class Dispatch(DynamicEnum):
    """How arguments reach the ranks and outputs come back."""


class Execute(DynamicEnum):
    """Which ranks run the method."""


def init_predefined_dispatch_mode() -> None:
    """Register the dispatch modes of every group. RANK_ZERO is a name that verl has: no functions belong to it."""
    for name in (
        "RANK_ZERO", "ONE_TO_ALL", "ALL_TO_ALL", "DP_COMPUTE", "DP_COMPUTE_PROTO", "DP_COMPUTE_PROTO_WITH_FUNC",
        "DP_COMPUTE_METRIC", "DIRECT_ROLLOUT_METHOD",
    ):  # fmt: skip
        Dispatch.register(name)


def init_predefined_execute_mode() -> None:
    """Register the execute modes every group knows."""
    Execute.register("ALL")
    Execute.register("RANK_ZERO")


init_predefined_dispatch_mode()
init_predefined_execute_mode()


def _map(fn: Callable[[Any], Any], args: tuple, kwargs: dict) -> tuple[tuple, dict]:
    return tuple(fn(a) for a in args), {k: fn(v) for k, v in kwargs.items()}


def check_ranks(name: str, values: list, worker_group: WorkerGroup) -> None:
    """ValueError unless there is one value per rank; `name` is what the message calls them."""
    if len(values) != worker_group.world_size:
        raise ValueError(f"{name} has {len(values)} entries for {worker_group.world_size} ranks")


def dispatch_one_to_all(worker_group: WorkerGroup, *args, **kwargs) -> tuple[tuple, dict]:
    """Every rank gets every argument unchanged."""
    return _map(lambda value: [value] * worker_group.world_size, args, kwargs)


def dispatch_all_to_all(worker_group: WorkerGroup, *args, **kwargs) -> tuple[tuple, dict]:
    """Arguments pass as they are: the caller gives lists with one entry per rank, or what all ranks get."""
    return args, kwargs


def collect_all_to_all(worker_group: WorkerGroup, output: Any) -> Any:
    """Outputs pass as they are, in rank order."""
    return output


def split_batches(
    chunks: int, args: tuple, kwargs: dict, part_of_rank: Sequence[int] | None = None
) -> tuple[tuple, dict]:
    """Every batch in `chunks` parts, of which rank r gets part_of_rank[r], or part r without it.

    A DataProto with auto padding is padded to a multiple of `chunks` first; then kwargs also have PADDING_KEY.
    """
    padded_sizes = {}
    for name, value in [*enumerate(args), *kwargs.items()]:
        if not isinstance(value, DataProto | DataProtoFuture | TensorDict):
            raise TypeError(
                f"argument {name!r} is a {type(value).__name__}; this dispatch mode takes DataProto and TensorDict "
                f"(put plain values into meta_info, or into the TensorDict as NonTensorData)"
            )
        if isinstance(value, DataProto) and value.is_padding_enabled():
            padded_sizes[name] = len(value)
    if len(set(padded_sizes.values())) > 1:
        raise ValueError(f"arguments that are padded for dispatch differ in rows: {padded_sizes}")
    rows = next(iter(padded_sizes.values()), 0)
    padding = -rows % chunks

    def cut(value: DataProto | DataProtoFuture | TensorDict) -> list:
        if padding and isinstance(value, DataProto) and value.is_padding_enabled():
            value = value.select()  # a shallow copy: the caller's batch keeps its length
            value.padding(padding)
        parts = chunk_tensordict(value, chunks) if isinstance(value, TensorDict) else value.chunk(chunks)
        return parts if part_of_rank is None else [parts[number] for number in part_of_rank]

    args, kwargs = _map(cut, args, kwargs)
    return args, {**kwargs, PADDING_KEY: (padding, rows + padding)} if padding else kwargs


def dispatch_dp_compute(worker_group: WorkerGroup, *args, **kwargs) -> tuple[tuple, dict]:
    """The caller has cut each argument: a list or tuple with one entry per rank. Another value counts as one entry."""
    for name, value in [*enumerate(args), *kwargs.items()]:
        check_ranks(f"argument {name!r}", value if isinstance(value, list | tuple) else [value], worker_group)
    return args, kwargs


def collect_dp_compute(worker_group: WorkerGroup, output: list) -> list:
    """One output a rank, in rank order."""
    check_ranks("the output", output, worker_group)
    return output


def dispatch_dp_compute_data_proto(worker_group: WorkerGroup, *args, **kwargs) -> tuple[tuple, dict]:
    """Each DataProto or TensorDict is cut in as many parts as there are ranks."""
    return split_batches(worker_group.world_size, args, kwargs)


def dispatch_dp_compute_data_proto_with_func(worker_group: WorkerGroup, *args, **kwargs) -> tuple[tuple, dict]:
    """As `dispatch_dp_compute_data_proto`; the first argument is a function that every rank gets."""
    if not args or not callable(args[0]):
        raise TypeError("the first argument of this dispatch mode must be a function")
    parts, kwargs = split_batches(worker_group.world_size, args[1:], kwargs)
    return ([args[0]] * worker_group.world_size, *parts), kwargs


def collect_dp_compute_data_proto(worker_group: WorkerGroup, output: list) -> DataProto | TensorDict | DataProtoFuture:
    """The ranks' rows in rank order."""
    return concat_batches(output)


def dispatch_nd_compute(
    dp_rank_mapping: list[int], dp_size: int, worker_group: WorkerGroup, *args, **kwargs
) -> tuple[tuple, dict]:
    """Arguments are lists of `dp_size` parts; rank r gets part dp_rank_mapping[r]."""
    check_ranks("dp_rank_mapping", dp_rank_mapping, worker_group)

    def spread(parts: list) -> list:
        if len(parts) != dp_size:
            raise ValueError(f"an argument has {len(parts)} parts for {dp_size} data-parallel ranks")
        return [parts[dp_rank] for dp_rank in dp_rank_mapping]

    return _map(spread, args, kwargs)


def dispatch_nd_compute_dataproto(
    dp_rank_mapping: list[int], dp_size: int, worker_group: WorkerGroup, *args, **kwargs
) -> tuple[tuple, dict]:
    """Each DataProto or TensorDict is cut in `dp_size` parts; rank r gets part dp_rank_mapping[r]."""
    check_ranks("dp_rank_mapping", dp_rank_mapping, worker_group)
    return split_batches(dp_size, args, kwargs, dp_rank_mapping)


def collect_nd_compute(collect_mask: list[bool], worker_group: WorkerGroup, output: list) -> list:
    """Outputs of the ranks whose mask is True (one rank of each data-parallel group)."""
    check_ranks("collect_mask", collect_mask, worker_group)
    return [o for o, wanted in zip(output, collect_mask, strict=True) if wanted]


def collect_nd_compute_dataproto(
    collect_mask: list[bool], worker_group: WorkerGroup, output: list
) -> DataProto | TensorDict | DataProtoFuture:
    """The rows of the ranks whose mask is True."""
    return concat_batches(collect_nd_compute(collect_mask, worker_group, output))


def _mesh_info(mesh_name: str, group: WorkerGroup) -> tuple[list[int], list[bool]]:
    """(Part of a batch, whether its output is collected) of each rank in the mesh; the workers are asked only once."""
    parts, collects = group._dispatch_info, group._collect_info
    if mesh_name not in parts:
        answers = group._query_dispatch_info(mesh_name), group.query_collect_info(mesh_name)
        for answer in answers:
            check_ranks(f"what the workers say of mesh {mesh_name!r}", answer, group)
        parts[mesh_name], collects[mesh_name] = answers
    return parts[mesh_name], collects[mesh_name]


def dispatch_lazy_compute_data_proto(mesh_name: str, worker_group: WorkerGroup, *args, **kwargs) -> tuple[tuple, dict]:
    """As `dispatch_nd_compute_dataproto`, with the mapping that the workers registered for `mesh_name`."""
    mapping, _ = _mesh_info(mesh_name, worker_group)
    return split_batches(max(mapping) + 1, args, kwargs, mapping)


def collect_lazy_compute_data_proto(mesh_name: str, worker_group: WorkerGroup, output: list) -> Any:
    """The rows of the mesh's collecting ranks, in the order in which they were dispatched."""
    mapping, collects = _mesh_info(mesh_name, worker_group)
    chosen = sorted((dp_rank, r) for r, dp_rank in enumerate(mapping) if collects[r])
    return concat_batches([output[r] for _, r in chosen])


def dummy_direct_rollout_call(worker_group: WorkerGroup, *args, **kwargs) -> None:
    """Stands for methods that a rollout server answers itself."""
    raise NotImplementedError("a DIRECT_ROLLOUT_METHOD is called on the rollout server, not through a worker group")


def mode_of(dispatch_fn: Callable, collect_fn: Callable) -> dict[str, Callable]:
    """A dispatch mode of two functions, as `register` takes it."""
    return {"dispatch_fn": dispatch_fn, "collect_fn": collect_fn}


def make_nd_compute_dataproto_dispatch_fn(mesh_name: str) -> dict[str, Callable]:
    """Dispatch mode over a device mesh that the workers name at run time with `_register_dispatch_collect_info`."""
    dispatch_fn = functools.partial(dispatch_lazy_compute_data_proto, mesh_name)
    return mode_of(dispatch_fn, functools.partial(collect_lazy_compute_data_proto, mesh_name))


DISPATCH_MODE_FN_REGISTRY: dict[Dispatch, dict[str, Callable]] = {
    Dispatch.ONE_TO_ALL: mode_of(dispatch_one_to_all, collect_all_to_all),
    Dispatch.ALL_TO_ALL: mode_of(dispatch_all_to_all, collect_all_to_all),
    Dispatch.DP_COMPUTE_PROTO_WITH_FUNC: mode_of(
        dispatch_dp_compute_data_proto_with_func, collect_dp_compute_data_proto
    ),
    Dispatch.DP_COMPUTE: mode_of(dispatch_dp_compute, collect_dp_compute),
    Dispatch.DP_COMPUTE_PROTO: mode_of(dispatch_dp_compute_data_proto, collect_dp_compute_data_proto),
    Dispatch.DP_COMPUTE_METRIC: mode_of(dispatch_dp_compute_data_proto, collect_dp_compute),
    Dispatch.DIRECT_ROLLOUT_METHOD: mode_of(dummy_direct_rollout_call, dummy_direct_rollout_call),
}


def get_predefined_dispatch_fn(dispatch_mode: Dispatch) -> dict[str, Callable]:
    """{"dispatch_fn", "collect_fn"} of a registered mode."""
    if dispatch_mode not in DISPATCH_MODE_FN_REGISTRY:
        known = ", ".join(mode.name for mode in DISPATCH_MODE_FN_REGISTRY)
        raise KeyError(
            f"dispatch mode {dispatch_mode!r} has no functions; known: {known}. To run on rank 0 only, register the "
            f"method with execute_mode=Execute.RANK_ZERO"
        )
    return DISPATCH_MODE_FN_REGISTRY[dispatch_mode]


def register_dispatch_mode(dispatch_mode_name: str, dispatch_fn: Callable, collect_fn: Callable) -> None:
    """Add a mode: afterwards `Dispatch.<NAME>` can be given to `register`."""
    DISPATCH_MODE_FN_REGISTRY[Dispatch.register(dispatch_mode_name)] = mode_of(dispatch_fn, collect_fn)


def update_dispatch_mode(dispatch_mode: Dispatch, dispatch_fn: Callable, collect_fn: Callable) -> None:
    """Replace the functions of a mode that is registered."""
    get_predefined_dispatch_fn(dispatch_mode).update(mode_of(dispatch_fn, collect_fn))


def get_predefined_execute_fn(execute_mode: Execute) -> dict[str, str]:
    """{"execute_fn_name"}: the group's method that carries the mode out."""
    return {"execute_fn_name": {Execute.ALL: "execute_all", Execute.RANK_ZERO: "execute_rank_zero"}[execute_mode]}


def check_dispatch_mode(dispatch_mode: Dispatch | dict) -> None:
    """Raise ValueError for a dict without both functions, TypeError for what is neither a mode nor a dict."""
    if isinstance(dispatch_mode, dict):
        missing = {"dispatch_fn", "collect_fn"} - dispatch_mode.keys()
        if missing:
            raise ValueError(f"dispatch_mode given as a dict lacks {sorted(missing)}")
    elif not isinstance(dispatch_mode, Dispatch):
        raise TypeError(f"dispatch_mode={dispatch_mode!r} must be a Dispatch member or a dict of two functions")


def check_execute_mode(execute_mode: Execute) -> None:
    """Raise TypeError for what is not an Execute member."""
    if not isinstance(execute_mode, Execute):
        raise TypeError(f"execute_mode={execute_mode!r} must be an Execute member")


def register(
    dispatch_mode: Dispatch | dict = Dispatch.ALL_TO_ALL, execute_mode: Execute = Execute.ALL, blocking: bool = True,
    materialize_futures: bool = True,
) -> Callable:
    """Mark a worker's method as callable on its group.

    With blocking=False the group's call returns references (a DataProtoFuture where batches are joined). With
    `materialize_futures` a DataProtoFuture argument is fetched on the worker before the method runs.
    """
    check_dispatch_mode(dispatch_mode)
    check_execute_mode(execute_mode)

    def decorate(func: Callable) -> Callable:
        @functools.wraps(func)
        def call(*args, **kwargs):
            if materialize_futures and any(isinstance(v, DataProtoFuture) for v in (*args, *kwargs.values())):
                args, kwargs = _map(lambda v: v.get() if isinstance(v, DataProtoFuture) else v, args, kwargs)
            return func(*args, **kwargs)

        @functools.wraps(func)
        async def call_async(*args, **kwargs):
            return await call(*args, **kwargs)

        wrapped = call_async if inspect.iscoroutinefunction(func) else call
        attrs = {"dispatch_mode": dispatch_mode, "execute_mode": execute_mode, "blocking": blocking}
        setattr(wrapped, MAGIC_ATTR, attrs)
        return wrapped

    return decorate
