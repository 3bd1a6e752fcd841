"""Compatibility with verl: functions on Python values, devices and files, which need neither models nor a trainer."""

import asyncio
import gc
import os
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import torch
from omegaconf import DictConfig, ListConfig

from verl.protocol.merge import deep_equal
from verl.training.checkpoint.publish import TRACKER, read_tracker
from verl.utils.accelerator import get_device_name

HALF_LIST = [16, "16", "fp16", "float16", torch.float16]
FLOAT_LIST = [32, "32", "fp32", "float32", torch.float32]
BFLOAT_LIST = ["bf16", "bfloat16", torch.bfloat16]
is_cuda_available = torch.cuda.is_available()
is_npu_available = False


def union_two_dict(dict1: dict, dict2: dict) -> dict:
    """Add the keys of `dict2` to `dict1`, in place; a shared key must hold equal values (AssertionError)."""
    for key, value in dict2.items():
        if key in dict1 and not deep_equal(dict1[key], value):
            raise AssertionError(f"key {key!r} has two values: {dict1[key]!r} and {value!r}; rename one of them")
        dict1[key] = value
    return dict1


def rename_dict(data: dict, prefix: str = "") -> dict:
    """A new dict whose keys are `prefix/key`."""
    start = prefix if not prefix or prefix.endswith("/") else prefix + "/"
    return {start + key: value for key, value in data.items()}


def append_to_dict(data: dict, new_data: dict, prefix: str = "") -> None:
    """Append every value of `new_data` to the list at `prefix + key` in `data`, in place."""
    for key, value in new_data.items():
        data.setdefault(prefix + key, []).append(value)


class NestedNamespace(SimpleNamespace):
    """A namespace made of a dict, dicts inside it becoming namespaces too."""

    def __init__(self, dictionary: dict, **kwargs):
        super().__init__(**kwargs)
        self.__dict__.update({k: NestedNamespace(v) if isinstance(v, dict) else v for k, v in dictionary.items()})


@contextmanager
def temp_env_var(key: str, value: str) -> Iterator[None]:
    """Set an environment variable inside the block; its old value, or absence, comes back afterwards."""
    previous = os.environ.get(key)
    os.environ[key] = value
    try:
        yield
    finally:
        os.environ.pop(key, None)
        if previous is not None:
            os.environ[key] = previous


def convert_to_regular_types(obj: Any) -> Any:
    """Turn omegaconf containers, at any depth, into plain dicts and lists."""
    if isinstance(obj, ListConfig | list | tuple):
        return [convert_to_regular_types(item) for item in obj]
    if isinstance(obj, DictConfig | dict):
        return {key: convert_to_regular_types(value) for key, value in obj.items()}
    return obj


def convert_nested_value_to_list_recursive(data_item: Any) -> Any:
    """Nested arrays, as parquet readers return them, to plain lists and dicts."""
    if isinstance(data_item, dict):
        return {key: convert_nested_value_to_list_recursive(value) for key, value in data_item.items()}
    if isinstance(data_item, list | tuple | np.ndarray):
        return [convert_nested_value_to_list_recursive(value) for value in data_item]
    return data_item.item() if isinstance(data_item, np.generic) else data_item


def get_visible_devices_keyword() -> str:
    """Name of the environment variable that hides or shows accelerators."""
    return "CUDA_VISIBLE_DEVICES"


def get_torch_device() -> ModuleType:
    """torch.cuda or torch.cpu."""
    return getattr(torch, get_device_name())


def set_expandable_segments(enable: bool) -> None:
    """Let the CUDA allocator grow its segments, or not; nothing to set on the CPU."""
    if get_device_name() == "cuda":
        torch.cuda.memory._set_allocator_settings(f"expandable_segments:{enable}")


def auto_set_device(config) -> None:
    """Replace `trainer.device: auto` by what this machine has; a device named by the user stays."""
    if config.trainer.device == "auto":
        config.trainer.device = get_device_name()


def get_device_capability(device_id: int = 0) -> tuple[int | None, int | None]:
    """(major, minor) of a CUDA device; (None, None) on the CPU."""
    return torch.cuda.get_device_capability(device_id) if get_device_name() == "cuda" else (None, None)


class PrecisionType:
    """Names of precisions, and functions from one kind of name to another."""

    _known = HALF, FLOAT, FULL, BFLOAT, MIXED = "16", "32", "64", "bf16", "mixed"
    is_fp16 = staticmethod(lambda precision: precision in HALF_LIST)
    is_fp32 = staticmethod(lambda precision: precision in FLOAT_LIST)
    is_bf16 = staticmethod(lambda precision: precision in BFLOAT_LIST)
    supported_types = staticmethod(lambda: list(PrecisionType._known))
    supported_type = staticmethod(lambda precision: str(precision) in PrecisionType._known)

    @staticmethod
    def to_dtype(precision: Any) -> torch.dtype:
        """The torch dtype; RuntimeError for an unknown name."""
        for names in (HALF_LIST, FLOAT_LIST, BFLOAT_LIST):
            if precision in names:
                return names[-1]
        raise RuntimeError(f"precision {precision!r} is unknown. Known: fp16, fp32, bf16.")

    @staticmethod
    def to_str(precision: Any) -> str:
        """fp16, fp32 or bf16; RuntimeError for an unknown name."""
        return {torch.float16: "fp16", torch.float32: "fp32", torch.bfloat16: "bf16"}[PrecisionType.to_dtype(precision)]


def aggressive_empty_cache(force_sync: bool = True, max_retries: int = 3) -> None:
    """Collect garbage and return cached CUDA memory, once: `max_retries` has no effect."""
    gc.collect()
    if torch.cuda.is_available():
        if force_sync:
            torch.cuda.synchronize()
        torch.cuda.empty_cache()


def parallel_put(data_list: list[Any], max_workers: int | None = None) -> list[Any]:
    """Put each item into the object store; references in the order of the items."""
    import ray

    if len(data_list) == 0:
        raise AssertionError("parallel_put got an empty list; there is nothing to put")
    with ThreadPoolExecutor(max_workers or min(len(data_list), 16)) as pool:
        return list(pool.map(ray.put, data_list))


def get_event_loop() -> asyncio.AbstractEventLoop:
    """This thread's running event loop, or a new one that is made its current loop."""
    try:
        return asyncio.get_running_loop()
    except RuntimeError:
        loop = asyncio.new_event_loop()
        asyncio.set_event_loop(loop)
        return loop


def get_checkpoint_tracker_filename(root_path: str) -> str:
    """File that holds the number of the newest published step."""
    return os.path.join(root_path, TRACKER)


def find_latest_ckpt_path(path: str | None, directory_format: str = "global_step_{}") -> str | None:
    """The folder, whose files are not checked, that the tracker file in `path` points to; None without either."""
    step = None if path is None else read_tracker(path)
    folder = os.path.join(path or "", directory_format.format(step))
    return folder if step is not None and os.path.isdir(folder) else None
