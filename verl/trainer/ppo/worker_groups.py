"""Resource pools, and the ranks of every role: roles that are placed on one pool share its processes."""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import ray
from loguru import logger

from verl.config.compose import with_values
from verl.config.ppo import GlobalProfilerConfig, PPOConfig
from verl.config.roles import serves_reward_model
from verl.rollout.replica import CLOSE_TIMEOUT_S
from verl.single_controller.base import ResourcePool
from verl.single_controller.ray import (
    RayClassWithInitArgs,
    RayResourcePool,
    RayWorkerGroup,
    create_colocated_worker_cls,
)
from verl.trainer.ppo.utils import Role, WorkerType, need_reference_policy, rollout_correction


@dataclass
class ResourcePoolManager:
    """Pools by name (ranks of each node) and the pool of each role.

    `use_gpu` false makes CPU ranks (None: the trainer's device decides); `local` pools reserve nothing and are for
    LocalWorkerGroup.
    """

    resource_pool_spec: dict[str, list[int]]
    mapping: dict[Role, str]
    resource_pool_dict: dict[str, ResourcePool] = field(default_factory=dict)
    use_gpu: bool | None = None
    local: bool = False

    def create_resource_pool(self) -> None:
        """Create every pool. Raises ValueError if Ray has too few free GPUs or CPUs."""
        self.use_gpu = self.use_gpu is not False
        if self.local:
            self.resource_pool_dict = {name: ResourcePool(ranks) for name, ranks in self.resource_pool_spec.items()}
            return
        self._check_free_ranks()
        self._check_nodes()
        for name, ranks_of_nodes in self.resource_pool_spec.items():
            # Colocated roles share one process, hence one worker per bundle.
            self.resource_pool_dict[name] = RayResourcePool(
                process_on_nodes=ranks_of_nodes, use_gpu=self.use_gpu, max_colocate_count=1, name_prefix=name
            )

    def _check_free_ranks(self) -> None:
        kind = "GPU" if self.use_gpu else "CPU"
        free, wanted = ray.available_resources().get(kind, 0), self.get_n_gpus()  # no key if used up or never there
        if free < wanted:
            keys = "trainer.nnodes x trainer.n_gpus_per_node"
            if "reward_pool" in self.resource_pool_spec:
                keys += " and reward_model.nnodes x reward_model.n_gpus_per_node request"
            else:
                keys += " requests"
            hint = "set trainer.device=cpu to train on CPU ranks, or " if self.use_gpu else ""
            raise ValueError(
                f"{keys} {wanted} {kind} ranks, but Ray has {free:g} {kind}s free; {hint}lower them or give Ray more."
            )

    def _check_nodes(self) -> None:
        nodes = sum(node["Alive"] for node in ray.nodes())
        widest = max(self.resource_pool_spec, key=lambda name: len(self.resource_pool_spec[name]))
        needed = len(self.resource_pool_spec[widest])
        if needed <= nodes:
            return
        key = "reward_model.nnodes" if widest == "reward_pool" else "trainer.nnodes"
        text = (
            f"{key}={needed}, but Ray has {nodes} node{'s' if nodes > 1 else ''}. Start Ray on each node "
            f"(ray start) and set RAY_ADDRESS, or set {key}=1"
        )
        if self.use_gpu:
            raise ValueError(f"{text}.")
        logger.warning(f"{text}; the CPU ranks of all {needed} run on {nodes}.")

    def get_resource_pool(self, role: Role) -> ResourcePool:
        """The pool that `role` is placed on."""
        if role not in self.mapping:
            raise KeyError(f"role '{role}' has no resource pool; placed are: {', '.join(map(str, self.mapping))}.")
        return self.resource_pool_dict[self.mapping[role]]

    def get_n_gpus(self) -> int:
        """Ranks over all pools (GPUs, or CPU ranks with trainer.device=cpu)."""
        return sum(sum(ranks_of_nodes) for ranks_of_nodes in self.resource_pool_spec.values())


def actor_role(mapping: Mapping[Role, WorkerType]) -> Role:
    """The role of the actor's ranks: with a reference policy in the same process, or without."""
    return Role.ActorRolloutRef if need_reference_policy(mapping) else Role.ActorRollout


def classes(
    config: PPOConfig, mapping: Mapping[Role, WorkerType], device_name: str, steps: int
) -> dict[Role, RayClassWithInitArgs]:
    """The class of each role with its config section; `steps`: training steps, the end of learning-rate schedules."""
    changes: dict[str, Any] = {"actor.optim.total_training_steps": steps}
    correction = rollout_correction(config)
    if correction is not None and correction.bypass_mode:
        changes["actor.policy_loss.loss_mode"] = "bypass_mode"
        changes["actor.policy_loss.rollout_correction"] = correction
    if Role.Critic in mapping and "nccl_timeout" in config.critic:  # it shares the actor's processes and their group
        changes["nccl_timeout"] = max(config.actor_rollout_ref.nccl_timeout, config.critic.nccl_timeout)
    actor_section = with_values(config.actor_rollout_ref, changes)
    options: dict[str, Any] = {"device_name": device_name}
    if config.trainer.peak_tflops is not None:
        options["peak_tflops"] = config.trainer.peak_tflops
    role = actor_role(mapping)
    actor_class = mapping[Role.ActorRollout]
    parts = {role: RayClassWithInitArgs(actor_class, config=actor_section, role=str(role), **options)}
    options["nccl_timeout"] = actor_section.nccl_timeout
    if Role.Critic in mapping:
        section = with_values(config.critic, {"optim.total_training_steps": steps})
        n = actor_section.rollout.n
        parts[Role.Critic] = RayClassWithInitArgs(mapping[Role.Critic], config=section, rollout_n=n, **options)
    if Role.RewardModel in mapping:
        if serves_reward_model(config):
            options["discriminative"] = config.custom_reward_function.path is None
            options["log_dir"] = f"{config.trainer.default_local_dir}/servers"
            options["start_timeout"] = actor_section.rollout.server.max_start_wait_time
        section = config.reward_model
        parts[Role.RewardModel] = RayClassWithInitArgs(mapping[Role.RewardModel], config=section, **options)
    return parts


def nsight_options(config: PPOConfig, of_driver: bool = False) -> dict[str, str] | None:
    """Options of `nsys profile` around the ranks or the driver (global_profiler.tool=nsys), else None.

    Reports go to global_profiler.save_path, which is made here; on a cluster it must be shared.
    """
    profiler = config.global_profiler
    if profiler.tool != "nsys" or not profiler.steps:
        return None
    tool = profiler.global_tool_config.nsys
    options = dict(tool.controller_nsight_options if of_driver else tool.worker_nsight_options)
    if not of_driver and options.get("capture-range-end") is None:
        roles = config.actor_rollout_ref
        sections = (roles.actor, roles.rollout, roles.ref, config.critic, config.reward_model)
        if any(section.profiler.tool_config.nsys.discrete for section in sections):
            options["capture-range-end"] = "repeat"  # a range for each call, however many there are
        else:
            joined = profiler.steps if profiler.profile_continuous_steps else ()
            profiles = sum(step - 1 not in joined for step in profiler.steps)
            options["capture-range-end"] = f"repeat-shutdown:{profiles}"
    # Ray writes reports below its session, which ends with the run, unless the path is absolute, and splits at blanks.
    folder = Path(profiler.save_path).expanduser().absolute()
    folder.mkdir(parents=True, exist_ok=True)
    name = options.pop("output", None) or options.get("o") or f"{'driver' if of_driver else 'rank'}_%h_%p"
    options["o"] = str(folder / name).replace(" ", "\\ ")
    return {name: str(value) for name, value in options.items()}


class WorkerGroups:
    """One worker group per pool, and one per role that shares the processes of its pool's group."""

    def __init__(
        self, manager: ResourcePoolManager, parts: Mapping[Role, RayClassWithInitArgs],
        group_cls: type[RayWorkerGroup], **options: Any,
    ) -> None:
        self.manager = manager
        self.processes: list[RayWorkerGroup] = []
        self.roles: dict[Role, RayWorkerGroup] = {}
        # The pool of the actor's ranks is that of ActorRollout, also with a reference policy in their processes.
        mapping = {**manager.mapping, Role.ActorRolloutRef: manager.mapping[Role.ActorRollout]}
        for name, pool in manager.resource_pool_dict.items():
            here = {role: part for role, part in parts.items() if mapping[role] == name}
            if not here:
                continue
            named = {"name_prefix": "_".join(map(str, here)), **options}
            if len(here) == 1:
                [(role, part)] = here.items()
                group = self.roles[role] = group_cls(resource_pool=pool, ray_cls_with_init=part, **named)
            else:
                joined = create_colocated_worker_cls({str(role): part for role, part in here.items()})
                group = group_cls(resource_pool=pool, ray_cls_with_init=joined, **named)
                spawned = group.spawn(prefix_set={str(role) for role in here})
                self.roles |= {role: spawned[str(role)] for role in here}
            self.processes.append(group)

    @contextmanager
    def profiled(
        self, settings: GlobalProfilerConfig, step: int, is_last: bool, timed: Callable[[str], Any]
    ) -> Iterator[None]:
        """Profile the step if settings.steps names it; consecutive ones in one profile, if that is requested.

        On all ranks whose role requests it; worker classes without a profiler are left out. `timed(name)` is the
        context in which profilers start and stop.
        """
        steps = set(settings.steps or ()) if settings.tool else set()
        joined = steps if settings.profile_continuous_steps else set()
        profiled = [group for group in self.roles.values() if hasattr(group, "start_profile")]
        if step in steps and step - 1 not in joined:
            with timed("start_profile"):
                for group in profiled:
                    group.start_profile(step=step)
        yield
        if step in steps and (step + 1 not in joined or is_last):
            with timed("stop_profile"):
                for group in profiled:
                    group.stop_profile()

    def end(self) -> None:
        """Let the ranks end servers and engines that they started, end the ranks, give the pools back to Ray."""
        for group in self.roles.values():
            if hasattr(group, "close_rollout"):
                group.try_execute_all("close_rollout", CLOSE_TIMEOUT_S)
        for group in self.processes:
            group.shutdown()
        for pool in self.manager.resource_pool_dict.values():
            pool.release()
        self.manager.resource_pool_dict.clear()
