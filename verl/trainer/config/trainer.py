"""Settings of the run: steps, ranks, logging, validation, checkpoints."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, ClassVar

from verl.base_config import BaseConfig
from verl.utils.config_fields import check_settings, setting

LOGGERS = ("console", "file", "tensorboard", "wandb", "trackio", "mlflow", "swanlab", "vemlp_wandb", "clearml")


@dataclass
class TrainerConfig(BaseConfig):
    """One run on nnodes x n_gpus_per_node ranks; steps count optimizer rounds, -1 turns a frequency off."""

    section: ClassVar[str] = "trainer"

    total_epochs: int = setting(30, low=1)
    total_training_steps: int | None = setting(None, low=1)
    project_name: str = "verl_examples"
    experiment_name: str = "gsm8k"
    logger: Any = field(default_factory=lambda: ["console", "tensorboard"])
    nnodes: int = setting(1, low=1)
    n_gpus_per_node: int = setting(8, low=1)
    device: str = setting("cuda", choices=("cuda", "cpu"))
    dry_run: bool = False
    report: bool = True
    nonfinite_steps_max: int = setting(5, low=1)
    balance_batch: bool = True
    critic_warmup: int = setting(0, low=0)
    val_before_train: bool = True
    val_only: bool = False
    test_freq: int = setting(-1, low=-1)
    log_val_generations: int = setting(0, low=0)
    rollout_data_dir: str | None = None
    validation_data_dir: str | None = None
    save_freq: int = setting(-1, low=-1)
    esi_redundant_time: float = setting(0, low=0)
    resume_mode: str = setting("auto", choices=("auto", "disable", "resume_path"))
    resume_from_path: str | None = None
    allow_data_change: bool = False
    default_local_dir: str = "checkpoints/verl_examples/gsm8k"
    default_hdfs_dir: str | None = None
    del_local_ckpt_after_load: bool = False
    max_actor_ckpt_to_keep: int | None = setting(None, low=1)
    max_critic_ckpt_to_keep: int | None = setting(None, low=1)
    ray_wait_register_center_timeout: int = setting(300, low=1)
    use_legacy_worker_impl: str = setting("auto", choices=("auto", "enable", "disable"))

    def __post_init__(self) -> None:
        check_settings(self)
