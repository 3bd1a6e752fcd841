"""Compatibility with verl: small helpers around Ray, which is imported only when one is called."""

import asyncio
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from verl.single_controller.base.worker import ray_noset_visible_devices  # noqa: F401


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
