"""The ranks of a rollout server that runs apart from a training (RolloutReplica.init_colocated, init_standalone)."""

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import ray
import torch
from torch.distributed.device_mesh import init_device_mesh

from verl.config.compose import to_settings
from verl.config.model import HFModelConfig
from verl.config.rollout import RolloutConfig
from verl.rollout.base import get_rollout_class
from verl.rollout.weight_parts import read_part
from verl.single_controller.base import Worker
from verl.single_controller.base.dispatch import Dispatch, register
from verl.utils.accelerator import rank_device_index
from verl.utils.distributed import initialize_global_process_group_ray
from verl.utils.threads import run_if_coroutine


class RolloutReplicaWorker(Worker):
    """One rank of a rollout that serves the weights in the model's folder, or those that `update_weights` gets."""

    def __init__(self, config: RolloutConfig, model_config: HFModelConfig, device_name: str) -> None:
        super().__init__()
        self.config, self.model_config, self.device_name = config, model_config, device_name

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def init_model(self) -> None:
        """Join the replica's ranks, start the engine and let it serve."""
        if self.device_name == "cuda":
            torch.cuda.set_device(rank_device_index())
        initialize_global_process_group_ray()
        if self.config.load_format == "dummy":  # there is no actor that sends weights
            self.config = replace(self.config, load_format="auto")
        self.model_config = to_settings(self.model_config, HFModelConfig).load()  # verl's users pass a DictConfig
        rollout_class = get_rollout_class(self.config.name, "async")
        mesh = init_device_mesh(self.device_name, (self.world_size,))
        self.rollout = rollout_class(self.config, self.model_config, mesh)
        self.rollout_mode()

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def rollout_mode(self) -> None:
        """Wake the engine; weights that its sleep discarded are read from the model's folder again."""
        run_if_coroutine(self.rollout.resume(["weights"]))
        if not self.rollout.has_weights:
            run_if_coroutine(self.rollout.read_weights(self.model_config.local_path))
        run_if_coroutine(self.rollout.resume(["kv_cache"]))

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def update_weights(self, parts: list[ray.ObjectRef], version: int) -> None:
        """Take weights of another process, which are answered with from now on; RuntimeError while requests run.

        `parts` refer to what `weight_parts.pack_parts` made.
        """

        def weights() -> Iterator[tuple[str, torch.Tensor]]:
            for part in parts:
                yield from read_part(ray.get(part))

        run_if_coroutine(self.rollout.update_weights(weights()))
        self.rollout.weights_version = version
        run_if_coroutine(self.rollout.resume(["weights", "kv_cache"]))

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def trainer_mode(self) -> None:
        """Put the engine to sleep: it frees its memory."""
        run_if_coroutine(self.rollout.release())

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def rollout_server(self) -> Any:
        """Where this rank's engine is served."""
        return self.rollout.server_handle

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def close_rollout(self) -> None:
        """End the server."""
        self.rollout.close()
