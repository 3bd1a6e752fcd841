"""One driver, many ranks: worker groups whose methods dispatch, run and collect."""

from verl.single_controller import base
from verl.single_controller.base import ClassWithInitArgs, ResourcePool, Worker, WorkerGroup

__all__ = ["ClassWithInitArgs", "ResourcePool", "Worker", "WorkerGroup", "base"]
