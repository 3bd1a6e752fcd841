"""Settings of the profiler."""

from dataclasses import dataclass, field
from typing import Any

from verl.base_config import BaseConfig
from verl.config.fields import setting


@dataclass
class ProfilerConfig(BaseConfig, section="profiler"):
    """Which ranks of a role are profiled, with which tool; off by default."""

    tool: str | None = setting(None, choices=("torch", "torch_memory"))
    enable: bool = False
    all_ranks: bool = False
    ranks: list[int] = field(default_factory=list)
    save_path: str | None = None
    tool_config: Any = None
