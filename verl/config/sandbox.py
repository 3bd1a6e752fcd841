"""Limits of a program that runs in the sandbox."""

from dataclasses import dataclass

from verl.base_config import BaseConfig
from verl.config.fields import setting


@dataclass
class SandboxConfig(BaseConfig, section="reward_model.sandbox"):
    """What one program may use; `unconfined` runs it without namespaces, Landlock and system call filter."""

    unconfined: bool = False
    seconds: float = setting(10.0, above=0)
    memory_mb: int = setting(1024, low=64)
    disk_mb: int = setting(16, low=1)
    output_kb: int = setting(1024, low=1)
    threads: int = setting(16, low=1)
