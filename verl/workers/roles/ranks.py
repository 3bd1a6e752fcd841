"""What every role does on a rank: joining the others, sharing batch sizes out."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from omegaconf import DictConfig, OmegaConf, open_dict

from verl.single_controller.base import Worker
from verl.utils.distributed import initialize_global_process_group_ray


def join_ranks(worker: Worker, meshes: Sequence[str], device_name: str, timeout_s: float | None) -> None:
    """Choose this rank's GPU, join the process group, and take a share of every batch sent to `meshes`."""
    if device_name == "cuda":
        torch.cuda.set_device(0 if torch.cuda.device_count() == 1 else int(worker.local_rank))
    initialize_global_process_group_ray(timeout_second=timeout_s)
    for mesh in meshes:
        worker._register_dispatch_collect_info(mesh_name=mesh, dp_rank=worker.rank, is_collect=True)


def per_rank_sizes(section: DictConfig, key: str, n: int, ranks: int) -> DictConfig:
    """A copy of `actor` or `critic` whose batch sizes count one rank's samples (prompts * n / ranks).

    Micro-batches are set per rank. Raises ValueError, naming `key`, where ranks cannot share a mini-batch evenly.
    """
    section = OmegaConf.create(OmegaConf.to_container(section, resolve=True))
    samples = section.ppo_mini_batch_size * n
    if samples % ranks:
        raise ValueError(
            f"{key}.ppo_mini_batch_size={section.ppo_mini_batch_size} x rollout.n={n} gives {samples} samples, which "
            f"{ranks} ranks cannot share evenly. Use a multiple of {ranks}."
        )
    with open_dict(section):
        section.ppo_mini_batch_size = samples // ranks
        for name in ("ppo_micro_batch_size", "forward_micro_batch_size"):
            if section.get(name) is not None:
                section[f"{name}_per_gpu"] = max(1, section[name] // ranks)
                section[name] = None
    return section
