"""One rank of the critic."""

from __future__ import annotations

from omegaconf import DictConfig

from verl.protocol import DataProto
from verl.single_controller.base import Worker
from verl.single_controller.base.decorator import Dispatch, make_nd_compute_dataproto_dispatch_fn, register
from verl.utils.config import omega_conf_to_dataclass
from verl.utils.device import get_device_name
from verl.workers.config import FSDPCriticConfig, HFModelConfig
from verl.workers.config.model import PluginConfig
from verl.workers.critic import DataParallelPPOCritic
from verl.workers.engine.fsdp import FSDPEngine
from verl.workers.roles.ranks import join_ranks, per_rank_sizes


class CriticWorker(Worker):
    """A value model over the ranks: one number a token, trained by clipped regression to the returns."""

    def __init__(
        self, config: DictConfig, device_name: str | None = None, nccl_timeout: float | None = None, **kwargs
    ) -> None:
        super().__init__()
        self.config = config
        self.nccl_timeout = nccl_timeout
        self.device_name = get_device_name() if device_name is None else device_name

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def init_model(self) -> None:
        """Join the process group, load the value model."""
        join_ranks(self, ("critic",), self.device_name, self.nccl_timeout)
        config = per_rank_sizes(self.config, "critic", self.config.rollout_n, self.world_size)
        self.critic_config: FSDPCriticConfig = omega_conf_to_dataclass(config, FSDPCriticConfig)
        config = self.critic_config
        self.engine = FSDPEngine(
            value_model(config.model), config.model.fsdp_config, config.optim, config.checkpoint,
            device=self.device_name,
        )  # fmt: skip
        self.engine.initialize()
        self.critic = DataParallelPPOCritic(config, self.engine)

    @register(dispatch_mode=make_nd_compute_dataproto_dispatch_fn(mesh_name="critic"))
    def compute_values(self, data: DataProto) -> DataProto:
        """values [B, R] float32."""
        return DataProto.from_dict({"values": self.critic.compute_values(data)})

    @register(dispatch_mode=make_nd_compute_dataproto_dispatch_fn(mesh_name="critic"))
    def update_critic(self, data: DataProto) -> DataProto:
        """One round of updates on this rank's share; metrics in meta_info["metrics"]."""
        metrics = self.critic.update_critic(data)
        metrics["critic/lr"] = self.engine.lr_scheduler.get_last_lr()[0]
        self.engine.lr_scheduler_step()
        return DataProto(meta_info={"metrics": metrics})

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def save_checkpoint(self, local_path, hdfs_path=None, global_step=0, max_ckpt_to_keep=None) -> None:
        """Write the critic's part into `local_path`; all ranks take part."""
        self.engine.save_checkpoint(local_path, hdfs_path, global_step, max_ckpt_to_keep)

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def load_checkpoint(self, local_path, hdfs_path=None, del_local_after_load=False) -> None:
        """Read the critic's part, written on any number of ranks."""
        self.engine.load_checkpoint(local_path, hdfs_path, del_local_after_load)


def value_model(model) -> HFModelConfig:
    """The settings of critic.model or reward_model.model as those of an engine's model with one value a token."""
    names = ("path", "tokenizer_path", "override_config", "external_lib", "trust_remote_code")
    settings = {name: getattr(model, name) for name in names}
    for name in ("enable_gradient_checkpointing", "use_remove_padding", "lora_rank", "lora_alpha", "target_modules"):
        if hasattr(model, name):
            settings[name] = getattr(model, name)
    return HFModelConfig(**settings, load_tokenizer=False, loader=PluginConfig(name="value_head")).load()
