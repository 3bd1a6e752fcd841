"""Entry of RL training: `python -m verl.trainer.main_ppo key=value ...`."""

import importlib
import os
import sys
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import fields
from typing import Any

import ray
from omegaconf import DictConfig

from verl.config.aliases import current_names_or_exit
from verl.config.asynchronous import AsyncPPOConfig, AsyncTrainingConfig, with_derived_settings
from verl.config.batch_sizes import fills_from_several
from verl.config.compose import hydra_main, to_omegaconf, to_settings, with_values
from verl.config.ppo import PPOConfig
from verl.config.roles import need_critic, reads_reference, serves_reward_model
from verl.planning.dry_run import Entry
from verl.trainer.ppo.utils import Role
from verl.trainer.run.ray_session import run_here, run_until_done, started_session
from verl.utils.problems import ConfigError

__all__ = ["TaskRunner", "create_rl_dataset", "create_rl_sampler", "main", "run_ppo"]  # noqa: F822

POOL, REWARD_POOL = "global_pool", "reward_pool"


def __getattr__(name: str) -> Any:
    """Import create_rl_dataset and create_rl_sampler on first use: the driver itself does not need torch."""
    if name in ("create_rl_dataset", "create_rl_sampler"):
        return getattr(importlib.import_module("verl.trainer.ppo.data_loading"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


@hydra_main(config_path="config", config_name="ppo_trainer")
def main(config: DictConfig) -> None:
    run_ppo(config)


def rl_checks() -> Entry:
    """The checks and the dry run of RL runs."""
    from verl.planning.ppo import rl_entry
    from verl.trainer.ppo.data_loading import create_rl_dataset

    return rl_entry(create_rl_dataset)


def dry_run(config: DictConfig, *, known: DictConfig | None = None) -> int:
    """Print plan and problems of an RL run; 1 if anything is wrong on every machine, else 0. `known`: see `run_ppo`."""
    return rl_checks().dry_run(current_config(config), known)


def current_config(config: DictConfig) -> DictConfig:
    """A config with this project's names of keys and, of asynchronous training, `with_derived_settings`."""
    config = current_names_or_exit(config)
    if "async_training" not in config:
        return config
    keys = {field.name for field in fields(AsyncTrainingConfig) if field.name[0] != "_"}
    if keys - set(config.async_training):  # the user has added a key to another tree
        sys.exit(
            "The keys async_training.* belong to asynchronous training, which has entries of its own: python -m "
            "verl.experimental.fully_async_policy.fully_async_main or verl.experimental.one_step_off_policy.main_ppo."
        )
    return with_derived_settings(config)


def exit_if_wrong(config: DictConfig, known: DictConfig | None = None) -> PPOConfig:
    """The typed config; exits with one message if there are problems of settings or input. `known`: see `run_ppo`."""
    try:
        return rl_checks().refuse_problems(config, known)
    except ValueError as e:
        sys.exit(str(e))


def run_ppo(
    config: DictConfig, task_runner_class: Any = None, *, known: DictConfig | None = None,
    services: Callable[[DictConfig], AbstractContextManager[Any]] = nullcontext,
) -> None:
    """Check the config, then train: in this process on a Ray of our own, by an actor on the one RAY_ADDRESS names.

    Exits with code 0 (done), 130 or 143 (stopped by Ctrl-C or SIGTERM, after a finished step or, by a second signal, at
    once), or 1 with an error message. `task_runner_class` replaces TaskRunner in recipes; a remote class always runs as
    an actor.
    `known` is the config tree without the user's settings, which unknown keys are compared with; inside a Hydra
    application it is composed here. `services(config)` is entered around the training, after the checks.
    """
    config = current_config(config)
    if config.trainer.dry_run:
        sys.exit(dry_run(config, known=known))
    settings = exit_if_wrong(config, known)
    from verl.trainer.ppo.worker_groups import nsight_options

    given = settings
    if task_runner_class is not None:
        runner_class, given = task_runner_class, config  # written for verl: it gets the composed config
    elif isinstance(settings, AsyncPPOConfig):
        from verl.trainer.fully_async.trainer import FullyAsyncTaskRunner as runner_class
    else:
        runner_class = TaskRunner
    is_remote = not isinstance(runner_class, type)
    local = settings.trainer.local
    session = nullcontext(False) if local else started_session(settings)
    with services(config), session as is_our_own:
        nsight = nsight_options(settings, of_driver=True)
        if local or (is_our_own and not is_remote and nsight is None):
            code = run_here(runner_class(), given)  # what the checks imported and a process less to start
        else:
            actor_class = runner_class if is_remote else ray.remote(num_cpus=1)(runner_class)
            options = {} if nsight is None else {"runtime_env": {"nsight": nsight}}
            code = run_until_done(actor_class.options(**options).remote(), given)
        if settings.ray_kwargs.timeline_json_file and not local:
            ray.timeline(filename=settings.ray_kwargs.timeline_json_file)
    if code:
        sys.exit(code)


class TaskRunner:
    """Builds the trainer and runs it; as an actor inside the cluster, so that a job can be submitted from anywhere.

    `run` and `make_trainer` get the typed tree, or the composed config if the class was given to `run_ppo`. The methods
    that they call always get the typed tree.
    """

    def __init__(self) -> None:
        self.role_worker_mapping: dict[Role, Any] = {}
        self.mapping: dict[Role, str] = {}

    def add_actor_rollout_worker(self, config: PPOConfig) -> tuple[Any, Any]:
        """The worker class that holds actor and rollout, with the class of its group."""
        from verl.roles.actor_rollout_ref import ActorRolloutRefWorker
        from verl.single_controller.ray import RayWorkerGroup

        self.role_worker_mapping[Role.ActorRollout] = ray.remote(ActorRolloutRefWorker)
        self.mapping[Role.ActorRollout] = POOL
        return ActorRolloutRefWorker, RayWorkerGroup

    def add_critic_worker(self, config: PPOConfig) -> None:
        """The value model, where the estimator or critic.enable requests one; in the actor's processes."""
        from verl.roles.critic import CriticWorker

        if need_critic(config):
            self.role_worker_mapping[Role.Critic] = ray.remote(CriticWorker)
            self.mapping[Role.Critic] = POOL

    def add_reward_model_worker(self, config: PPOConfig) -> None:
        """The reward model, in the actor's processes or (reward_model.enable_resource_pool) on ranks of its own.

        With reward_model.rollout.name, those ranks run servers.
        """
        from verl.roles.reward_model import RewardModelWorker
        from verl.roles.reward_server import RewardServerWorker

        if config.reward_model.enable:
            cls = RewardServerWorker if serves_reward_model(config) else RewardModelWorker
            self.role_worker_mapping[Role.RewardModel] = ray.remote(cls)
            self.mapping[Role.RewardModel] = REWARD_POOL if config.reward_model.enable_resource_pool else POOL

    def add_ref_policy_worker(self, config: PPOConfig, ref_policy_cls: Any) -> None:
        """The reference lives in the actor's process: as the actor without its adapters, or as a second engine."""
        if reads_reference(config):
            self.role_worker_mapping[Role.RefPolicy] = ray.remote(ref_policy_cls)
            self.mapping[Role.RefPolicy] = POOL

    def init_resource_pool_mgr(self, config: PPOConfig) -> Any:
        """One pool that every role shares, and one for the reward model where it requests ranks of its own."""
        from verl.trainer.ppo.ray_trainer import ResourcePoolManager

        spec = {POOL: [config.trainer.n_gpus_per_node] * config.trainer.nnodes}
        if REWARD_POOL in self.mapping.values():
            spec[REWARD_POOL] = [config.reward_model.n_gpus_per_node] * config.reward_model.nnodes
        trainer = config.trainer
        return ResourcePoolManager(spec, self.mapping, use_gpu=trainer.device != "cpu", local=trainer.local)

    def make_trainer(self, config: Any, stop_flag: Callable[[], bool] | None = None) -> Any:
        """The trainer with data, tokenizer and rewards; its workers are not started yet."""
        from verl.trainer.ppo.dapo_trainer import RayDAPOTrainer
        from verl.trainer.ppo.ray_trainer import RayPPOTrainer

        config = to_settings(config, PPOConfig)
        return self.build(RayDAPOTrainer if fills_from_several(config) else RayPPOTrainer, config, stop_flag)

    def build(self, trainer_class: type, config: Any, stop_flag: Callable[[], bool] | None) -> Any:
        """An instance of `trainer_class` for this config; recipes call it with a class of their own."""
        from verl.planning.checks import check_outputs
        from verl.reward.loading import load_reward_manager
        from verl.utils.import_utils import import_external_libs
        from verl.utils.tokenizer import policy_tokenizer

        config = to_settings(config, PPOConfig)
        if fills_from_several(config) and not hasattr(trainer_class, "filters_groups"):
            name = trainer_class.__name__
            raise ValueError(f"algorithm.filter_groups.enable=true: {name} does not filter groups. Set it to false.")
        folder = os.path.expanduser(config.trainer.default_local_dir)
        config = with_values(config, {"trainer.default_local_dir": folder})
        import_external_libs(config.actor_rollout_ref.model.external_lib or None)
        problems = list(check_outputs(config.trainer))  # again here, on a cluster's node
        if problems:
            raise ConfigError(problems)
        worker_class, group_class = self.add_actor_rollout_worker(config)
        if config.trainer.local:
            from verl.single_controller.local import LocalWorkerGroup

            group_class = LocalWorkerGroup
        self.add_critic_worker(config)
        self.add_reward_model_worker(config)
        self.add_ref_policy_worker(config, worker_class)

        tokenizer, processor = policy_tokenizer(config)
        composed, reward_kwargs = to_omegaconf(config), config.reward_model.reward_kwargs
        trainer = trainer_class(
            config=config, tokenizer=tokenizer, processor=processor, role_worker_mapping=self.role_worker_mapping,
            resource_pool_manager=self.init_resource_pool_mgr(config), ray_worker_group_cls=group_class,
            reward_fn=load_reward_manager(composed, tokenizer, num_examine=0, **reward_kwargs),
            val_reward_fn=load_reward_manager(composed, tokenizer, num_examine=1, **reward_kwargs),
        )
        if stop_flag is not None:
            trainer.stop_requested = stop_flag
        return trainer

    def run(self, config: Any, stop_flag: Callable[[], bool] | None = None) -> bool:
        """Train to the end, or until `stop_flag()` is true after a step; whether the end was reached.

        The ranks always end with the run.
        """
        trainer = self.make_trainer(config, stop_flag)
        try:
            trainer.init_workers()
            trainer.fit()
            if trainer.config.ray_kwargs.timeline_json_file:
                time.sleep(1.5)  # a rank reports its events to Ray once a second; what is left goes with it
        except Exception:
            trainer.shutdown()
            raise
        trainer.shutdown()  # not where the process is to end at once: Ray ends the ranks then
        return trainer.is_finished


if __name__ == "__main__":
    main()
