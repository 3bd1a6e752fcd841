"""One rank of the critic."""

from dataclasses import fields
from typing import Any

from verl.config.common import BaseModelConfig
from verl.config.critic import FSDPCriticConfig
from verl.config.model import HFModelConfig, PluginConfig
from verl.profiling.profile import DistProfiler
from verl.protocol import DataProto
from verl.roles.ranks import ModelWorker, per_rank_sizes
from verl.single_controller.base.dispatch import Dispatch, make_nd_compute_dataproto_dispatch_fn, register
from verl.training.critic import DataParallelPPOCritic


class CriticWorker(ModelWorker):
    """A value model over the ranks: one number per token, trained by clipped regression to the returns."""

    config_type = FSDPCriticConfig

    def __init__(self, config: Any, rollout_n: int | None = None, **options: Any) -> None:
        """`rollout_n`: samples per prompt; None reads it from `config`, if a section composed for verl has it."""
        super().__init__(config, **options)
        self.samples = self.config.get("rollout_n") if rollout_n is None else rollout_n
        if self.samples is None:
            raise ValueError("critic: the number of samples per prompt is missing. Pass rollout_n=rollout.n.")

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def init_model(self) -> None:
        """Join the process group, load the value model."""
        self.join_ranks("critic")
        config = per_rank_sizes(self.config, "critic", self.samples, self.world_size)
        self.critic_config: FSDPCriticConfig = config
        self.engine = self.make_engine(
            "critic.model", value_model(config.model), config.model.fsdp_config, config.optim, config.checkpoint
        )
        self.critic = DataParallelPPOCritic(config, self.engine)
        self.critic_module, self.critic_optimizer = self.engine.module, self.engine.optimizer
        self.critic_lr_scheduler = self.engine.lr_scheduler

    @register(dispatch_mode=make_nd_compute_dataproto_dispatch_fn(mesh_name="critic"))
    @DistProfiler.annotate()
    def compute_values(self, data: DataProto) -> DataProto:
        """values [B, R] float32."""
        return DataProto.from_dict({"values": self.critic.compute_values(data)})

    @register(dispatch_mode=make_nd_compute_dataproto_dispatch_fn(mesh_name="critic"))
    @DistProfiler.annotate()
    def update_critic(self, data: DataProto) -> DataProto:
        """One round of updates on this rank's share; metrics in meta_info["metrics"]."""
        metrics = self.updated("critic", self.critic.update_critic, data, self.critic_config.ppo_epochs)
        return DataProto(meta_info={"metrics": metrics})


def value_model(model: BaseModelConfig) -> HFModelConfig:
    """A model with one value per token, by what critic.model or reward_model.model has of a policy's settings."""
    shared = model.keys() & {field.name for field in fields(HFModelConfig)} - {"_target_"}
    settings = {name: model[name] for name in shared}
    return HFModelConfig(**settings, load_tokenizer=False, loader=PluginConfig(name="value_head")).load()
