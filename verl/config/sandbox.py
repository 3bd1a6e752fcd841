"""Limits of a program that runs in the sandbox."""

from dataclasses import dataclass

from verl.config.base import BaseConfig
from verl.config.fields import setting


@dataclass
class SandboxConfig(BaseConfig, section="reward_model.sandbox"):
    """What one program may use; `unconfined` runs it without namespaces, Landlock and system call filter."""

    unconfined: bool = setting(False, "Run programs with resource limits alone, where the kernel grants no more.")
    seconds: float = setting(10.0, "Seconds of one program on one test case; below item_timeout.", above=0)
    memory_mb: int = setting(1024, "MiB of address space of one program.", low=64)
    disk_mb: int = setting(16, "MiB of files that one program may write.", low=1)
    output_kb: int = setting(1024, "KiB of output after which a program is stopped.", low=1)
    threads: int = setting(16, "Threads of one program.", low=1)
