"""Settings shared by actor, critic, reward model: checkpoints, models, plug-in modules."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, ClassVar

from verl.base_config import BaseConfig
from verl.utils.config_fields import check_settings, setting

CHECKPOINT_CONTENTS = ("model", "optimizer", "extra", "hf_model")


@dataclass
class CheckpointConfig(BaseConfig):
    """What a checkpoint holds: model, optimizer, extra (scheduler, RNG), hf_model (Hugging Face safetensors)."""

    section: ClassVar[str] = "checkpoint"

    save_contents: list[str] = setting(
        factory=lambda: ["model", "optimizer", "extra"], each_of=CHECKPOINT_CONTENTS
    )
    load_contents: list[str] = setting(
        factory=lambda: ["model", "optimizer", "extra"], each_of=CHECKPOINT_CONTENTS
    )
    async_save: bool = False

    def __post_init__(self) -> None:
        check_settings(self)


@dataclass
class ProfileConfig(BaseConfig):
    """Steps and ranks that a profile covers; -1 is off."""

    section: ClassVar[str] = "profile"

    profile_ranks: list[int] | None = None
    step_start: int = setting(-1, low=-1)
    step_end: int = setting(-1, low=-1)
    save_path: str | None = None

    def __post_init__(self) -> None:
        check_settings(self)


@dataclass
class BaseModelConfig(BaseConfig):
    """Where a model and its tokenizer lie, and what is changed in its config."""

    section: ClassVar[str] = "model"

    path: str = "~/models/deepseek-llm-7b-chat"
    tokenizer_path: str | None = None
    override_config: dict[str, Any] = field(default_factory=dict)
    external_lib: str | None = None
    trust_remote_code: bool = False
    lora: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        check_settings(self)


@dataclass
class ModuleConfig(BaseConfig):
    """A name in a file or module: `path` is a plain path, file://... or pkg://module."""

    section: ClassVar[str] = "module"

    path: str | None = None
    name: str | None = None

    def __post_init__(self) -> None:
        check_settings(self)


@dataclass
class RewardManagerConfig(BaseConfig):
    """Reward manager by registered name, or imported from `module`."""

    section: ClassVar[str] = "reward_manager"

    source: str = setting("register", choices=("register", "importlib"))
    name: str = "naive"
    module: ModuleConfig | None = field(default_factory=ModuleConfig)

    def __post_init__(self) -> None:
        check_settings(self)
        if self.source == "importlib" and (self.module is None or not self.module["path"]):
            raise ValueError("reward_manager.source=importlib needs reward_manager.module.path: name the file.")
