"""Settings of profiling: which ranks of a role, with which tool."""

import dataclasses
from dataclasses import dataclass
from typing import Any

from verl.config.base import BaseConfig
from verl.config.fields import setting

TOOLS = ("torch", "torch_memory", "nsys")


@dataclass
class NsightToolConfig(BaseConfig, section="nsys"):
    """Nsight Systems: capture ranges around the profiled steps (CUDA only)."""

    discrete: bool = setting(False, "One capture range for each call of a role, not for the step.")
    name: str = "nsight"


@dataclass
class TorchProfilerToolConfig(BaseConfig, section="torch"):
    """torch.profiler: one trace for each rank and profiled step."""

    step_start: int | None = setting(0, "First update (mini-batch) of the step in the trace.")
    step_end: int | None = setting(None, "Update after the last one in the trace; null: up to the end of the step.")
    name: str = "torch"


@dataclass
class TorchMemoryToolConfig(BaseConfig, section="torch_memory"):
    """PyTorch's CUDA memory history: one snapshot for each rank and profiled step (CUDA only)."""

    trace_alloc_max_entries: int = setting(100_000, "Number of allocations that are kept.", low=1)
    stack_depth: int = setting(32, "Python frames kept of each stack, the innermost ones.", low=1)
    context: str | None = setting("all", "Events whose stacks are kept.", choices=("all", "alloc", "state"))
    stacks: str = setting("all", "Stacks of Python and C++ (all), or of Python.", choices=("all", "python"))
    kw_args: dict[str, Any] = setting(dict, "Further arguments of PyTorch's memory history; any key.")
    name: str = "torch_memory"


@dataclass
class ToolConfigs(BaseConfig, section="tool_config"):
    """Settings of the tools; those of the chosen one are read."""

    nsys: NsightToolConfig = setting(NsightToolConfig, "Nsight Systems.")
    torch: TorchProfilerToolConfig = setting(TorchProfilerToolConfig, "torch.profiler.")
    torch_memory: TorchMemoryToolConfig = setting(TorchMemoryToolConfig, "CUDA memory history.")


@dataclass
class ProfilerConfig(BaseConfig, section="profiler"):
    """Which ranks of a role are profiled in the steps of global_profiler.steps; off by default."""

    tool: str | None = setting(None, "torch, torch_memory or nsys.", choices=TOOLS)
    enable: bool = setting(False, "Profile this role.")
    all_ranks: bool = setting(False, "Profile every rank.")
    ranks: list[int] = setting(list, "Ranks to profile.")
    save_path: str | None = setting(None, "Folder of the profiles.")
    tool_config: ToolConfigs | None = setting(ToolConfigs, "Settings of the tools.")

    def union(self, other: "ProfilerConfig") -> "ProfilerConfig":
        """Profiles the ranks of both; AssertionError if their tools differ."""
        return self._joined(other, sorted({*self.ranks, *other.ranks}), any)

    def intersect(self, other: "ProfilerConfig") -> "ProfilerConfig":
        """Profiles the ranks that both profile; AssertionError if their tools differ."""
        return self._joined(other, sorted({*self.ranks} & {*other.ranks}), all)

    def _joined(self, other: "ProfilerConfig", ranks: list[int], how: Any) -> "ProfilerConfig":
        if self.tool != other.tool:
            tools = f"{self.tool!r} in one role and {other.tool!r} in another"
            raise AssertionError(f"profiler.tool is {tools}; use one tool")
        both = (self, other)
        return dataclasses.replace(
            self, enable=how(c.enable for c in both), all_ranks=how(c.all_ranks for c in both), ranks=ranks
        )
