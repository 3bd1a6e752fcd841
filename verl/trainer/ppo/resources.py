"""Which worker group lives on which Ray resource pool."""

from __future__ import annotations

from dataclasses import dataclass, field

import ray

from verl.single_controller.ray import RayResourcePool
from verl.trainer.ppo.utils import Role


@dataclass
class ResourcePoolManager:
    """Pools by name (ranks of each node) and the pool of each role; `use_gpu` false makes CPU ranks."""

    resource_pool_spec: dict[str, list[int]]
    mapping: dict[Role, str]
    resource_pool_dict: dict[str, RayResourcePool] = field(default_factory=dict)
    use_gpu: bool = True

    def create_resource_pool(self) -> None:
        """Make every pool, after a check that Ray has what they ask for."""
        self._check_resource_available()
        for name, ranks_of_nodes in self.resource_pool_spec.items():
            # Colocated roles share one process, hence one worker a bundle.
            self.resource_pool_dict[name] = RayResourcePool(
                process_on_nodes=ranks_of_nodes, use_gpu=self.use_gpu, max_colocate_count=1, name_prefix=name
            )

    def get_resource_pool(self, role: Role) -> RayResourcePool:
        """The pool that `role` is placed on."""
        if role not in self.mapping:
            raise KeyError(f"role '{role}' has no resource pool; placed are: {', '.join(map(str, self.mapping))}.")
        return self.resource_pool_dict[self.mapping[role]]

    def get_n_gpus(self) -> int:
        """Ranks over all pools (GPUs, or CPU ranks with trainer.device=cpu)."""
        return sum(sum(ranks_of_nodes) for ranks_of_nodes in self.resource_pool_spec.values())

    def _check_resource_available(self) -> None:
        kind = "GPU" if self.use_gpu else "CPU"
        # Ray leaves out a resource that is used up or was never there.
        total = ray.available_resources().get(kind, 0)
        wanted = self.get_n_gpus()
        if total < wanted:
            mend = "set trainer.device=cpu to train on CPU ranks, or " if self.use_gpu else ""
            raise ValueError(
                f"trainer.nnodes x trainer.n_gpus_per_node asks for {wanted} {kind} ranks, but Ray has {total:g} "
                f"{kind}s free; {mend}lower them or give Ray more."
            )
