"""Settings of the run and of what actor, critic and reward share: checkpoints, models, plug-in modules."""

from dataclasses import dataclass, field
from typing import Any

from verl.base_config import BaseConfig
from verl.config.fields import setting

CHECKPOINT_CONTENTS = ("model", "optimizer", "extra", "hf_model")


def _contents() -> Any:
    return setting(factory=lambda: list(CHECKPOINT_CONTENTS[:3]), each_of=CHECKPOINT_CONTENTS)


@dataclass
class CheckpointConfig(BaseConfig, section="checkpoint"):
    """What a checkpoint holds: model, optimizer, extra (scheduler, RNG), hf_model (Hugging Face safetensors)."""

    save_contents: list[str] = _contents()
    load_contents: list[str] = _contents()
    async_save: bool = False


@dataclass
class ProfileConfig(BaseConfig, section="profile"):
    """Steps and ranks that a profile covers; -1 is off."""

    profile_ranks: list[int] | None = None
    step_start: int = setting(-1, low=-1)
    step_end: int = setting(-1, low=-1)
    save_path: str | None = None


@dataclass
class BaseModelConfig(BaseConfig, section="model"):
    """Where a model and its tokenizer lie, and what is changed in its config."""

    path: str = "~/models/deepseek-llm-7b-chat"
    tokenizer_path: str | None = None
    override_config: dict[str, Any] = field(default_factory=dict)
    external_lib: str | None = None
    trust_remote_code: bool = False
    lora: dict[str, Any] = field(default_factory=dict)


@dataclass
class ModuleConfig(BaseConfig, section="module"):
    """A name in a file or module: `path` is a plain path, file://... or pkg://module."""

    path: str | None = None
    name: str | None = None


@dataclass
class RewardManagerConfig(BaseConfig, section="reward_manager"):
    """Reward manager by registered name, or imported from `module`."""

    source: str = setting("register", choices=("register", "importlib"))
    name: str = "naive"
    module: ModuleConfig | None = field(default_factory=ModuleConfig)

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.source == "importlib" and (self.module is None or not self.module["path"]):
            raise ValueError("reward_manager.source=importlib needs reward_manager.module.path: name the file.")


@dataclass
class WatchdogConfig(BaseConfig, section="trainer.watchdog"):
    """Seconds that ranks may take for one call of a phase before the run ends; None waits for ever."""

    init: float | None = setting(1800.0, above=0)
    generate: float | None = setting(3600.0, above=0)
    log_prob: float | None = setting(1800.0, above=0)
    update: float | None = setting(3600.0, above=0)
    save: float | None = setting(1800.0, above=0)


@dataclass
class TrainerConfig(BaseConfig, section="trainer"):
    """One run on nnodes x n_gpus_per_node ranks; steps count optimizer rounds, -1 turns a frequency off."""

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
    watchdog: WatchdogConfig = field(default_factory=WatchdogConfig)
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
    local: bool = False
