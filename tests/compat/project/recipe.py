"""A recipe: a worker with a method of its own, a trainer that logs what it returns, a task runner that builds both."""

import ray
import torch

import tests.compat.project.algorithms  # noqa: F401  (registers them in the workers too)
from verl import DataProto
from verl.single_controller.base.decorator import Dispatch, register
from verl.trainer.main_ppo import TaskRunner
from verl.trainer.ppo.ray_trainer import RayPPOTrainer, ResourcePoolManager, Role
from verl.workers.fsdp_workers import ActorRolloutRefWorker


class CountingWorker(ActorRolloutRefWorker):
    """Also counts the parameters, and doubles a batch's numbers on its ranks."""

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def count_parameters(self):
        return sum(p.numel() for p in self.actor_module_fsdp.parameters())

    @register(dispatch_mode=Dispatch.DP_COMPUTE_PROTO)
    def double(self, data: DataProto) -> DataProto:
        return DataProto.from_dict({"doubled": 2 * data.batch["number"]}, meta_info={"rank": self.rank})


class CountingTrainer(RayPPOTrainer):
    """Asks the workers before training."""

    def fit(self):
        self.parameters = self.actor_rollout_wg.count_parameters()
        asked = DataProto.from_dict({"number": torch.arange(4)})
        self.doubled = self.actor_rollout_wg.double(asked).batch["doubled"].tolist()
        super().fit()

    def _save_checkpoint(self):
        self.saved_at = self.global_steps
        super()._save_checkpoint()


class CountingTaskRunner(TaskRunner):
    """Builds the trainer with the worker above."""

    def run(self, config):
        from verl.trainer.main_ppo import create_rl_dataset, create_rl_sampler
        from verl.trainer.ppo.reward import load_reward_manager
        from verl.utils import hf_tokenizer
        from verl.utils.dataset.rl_dataset import collate_fn
        from verl.utils.fs import copy_to_local

        tokenizer = hf_tokenizer(copy_to_local(config.actor_rollout_ref.model.path))
        train = create_rl_dataset(config.data.train_files, config.data, tokenizer, None, is_train=True)
        val = create_rl_dataset(config.data.val_files, config.data, tokenizer, None, is_train=False)
        pools = {"pool": [config.trainer.n_gpus_per_node] * config.trainer.nnodes}
        trainer = CountingTrainer(
            config=config,
            tokenizer=tokenizer,
            processor=None,
            role_worker_mapping={Role.ActorRollout: ray.remote(CountingWorker)},
            resource_pool_manager=ResourcePoolManager(pools, {Role.ActorRollout: "pool"}),
            reward_fn=load_reward_manager(config, tokenizer, num_examine=0),
            val_reward_fn=load_reward_manager(config, tokenizer, num_examine=0),
            train_dataset=train,
            val_dataset=val,
            collate_fn=collate_fn,
            train_sampler=create_rl_sampler(config.data, train),
        )
        trainer.init_workers()
        try:
            trainer.fit()
        finally:
            trainer.shutdown() if hasattr(trainer, "shutdown") else None
        return trainer
