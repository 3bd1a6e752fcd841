"""Profilers of one rank: torch.profiler, CUDA memory history, capture ranges of Nsight Systems."""

import functools
import os
import pickle
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

import torch
from loguru import logger

from verl.config.profiler import ProfilerConfig, ToolConfigs, TorchMemoryToolConfig, TorchProfilerToolConfig

#: the profiler of this process that records; roles that share a process share it
_active: "Profiler | TorchMemoryProfiler | NsightProfiler | None" = None


class Profiler:
    """torch.profiler of CPU and, if there is one, GPU; the trace goes to `save_path` as Chrome trace."""

    def __init__(
        self, config: ProfilerConfig, tool_config: TorchProfilerToolConfig | None = None,
        save_file_prefix: str | None = None,
    ) -> None:
        self.config = config
        self.tool_config = tool_config or TorchProfilerToolConfig()
        self.prefix = save_file_prefix or "profile"
        self.rank = int(os.environ.get("RANK", "0"))
        self.updates = 0
        self.prof: torch.profiler.profile | None = None

    def check(self) -> bool:
        """Whether this rank is profiled."""
        return self.config.enable and (self.config.all_ranks or self.rank in self.config.ranks)

    def start(self, **kwargs: Any) -> None:
        """Begin a trace; `step` names the file."""
        if not self.check():
            return
        self.step_number, self.updates = kwargs.get("step", 0), 0
        first, end = self.tool_config.step_start, self.tool_config.step_end
        self.window = (max(0, first or 0), float("inf") if end is None or end < 0 else end)
        activities = [torch.profiler.ProfilerActivity.CPU]
        if torch.cuda.is_available():
            activities.append(torch.profiler.ProfilerActivity.CUDA)
        self.prof = torch.profiler.profile(activities=activities, record_shapes=True)
        if self.window[0] == 0:
            self.prof.start()

    def step(self) -> None:
        """Count a finished update: the trace has those in step_start <= number < step_end."""
        if self.prof is None:
            return
        self.updates += 1
        if self.updates == self.window[0]:
            self.prof.start()
        if self.updates == self.window[1]:
            self.stop_trace()

    def stop_trace(self) -> None:
        """End the recording, if one is on."""
        if self.prof is not None and self.prof.profiler is not None and self.updates >= self.window[0]:
            self.prof.stop()
            self.save()
        self.prof = None

    stop = stop_and_save = stop_trace

    def save(self) -> None:
        """Write the trace."""
        file = _file(self.config, f"{self.prefix}_step{self.step_number}_rank{self.rank}.json.gz")
        self.prof.export_chrome_trace(str(file))
        logger.info("profile of rank {}: {}", self.rank, file)


def _file(config: ProfilerConfig, name: str) -> Path:
    folder = Path(config.save_path or "outputs/profile").expanduser()
    folder.mkdir(parents=True, exist_ok=True)
    return folder / name


class TorchMemoryProfiler:
    """CUDA memory history between start and stop, as a snapshot for pytorch.org/memory_viz. Nothing without CUDA."""

    def __init__(
        self, rank: int, config: ProfilerConfig | None, tool_config: TorchMemoryToolConfig | None = None
    ) -> None:
        self.rank = rank
        self.config = config or ProfilerConfig()
        self.tool_config = tool_config or TorchMemoryToolConfig()
        self.step_number = 0

    def start(self, **kwargs: Any) -> None:
        """Begin to record allocations."""
        self.step_number = kwargs.get("step", 0)
        if torch.cuda.is_available():
            settings = self.tool_config
            torch.cuda.memory._record_memory_history(
                context=settings.context, stacks=settings.stacks, max_entries=settings.trace_alloc_max_entries,
                **settings.kw_args,
            )  # fmt: skip
        else:
            logger.warning("profiler.tool=torch_memory records CUDA allocations; this rank has no GPU")

    def stop(self) -> None:
        """Write the snapshot and end the recording."""
        if torch.cuda.is_available():
            snapshot = torch.cuda.memory._snapshot()
            cut_stacks(snapshot, self.tool_config.stack_depth)
            file = _file(self.config, f"memory_step{self.step_number}_rank{self.rank}.pickle")
            file.write_bytes(pickle.dumps(snapshot))
            torch.cuda.memory._record_memory_history(enabled=None)


def cut_stacks(snapshot: dict[str, Any], depth: int) -> None:
    """Keep of every stack in PyTorch's memory snapshot the `depth` innermost Python frames, and C++ frames up to them.

    PyTorch records stacks of any depth; they make the file large.
    """
    segments = snapshot["segments"]
    events = [event for trace in snapshot["device_traces"] for event in trace]
    for entry in (*events, *segments, *(block for segment in segments for block in segment["blocks"])):
        frames = entry.get("frames", [])  # innermost first
        python = [i for i, frame in enumerate(frames) if frame["filename"].endswith(".py")]
        if len(python) > depth:
            entry["frames"] = frames[: python[depth]]


class NsightProfiler:
    """Capture ranges for `nsys profile --capture-range=cudaProfilerApi` around the worker. Nothing without CUDA.

    One range from start to stop, or with `discrete` one for each call of a method with `DistProfiler.annotate`.
    """

    def __init__(self, discrete: bool = False) -> None:
        self.discrete = discrete
        self.in_call = False

    @contextmanager
    def call(self) -> Iterator[None]:
        """The range of one call; calls inside belong to it."""
        if not self.discrete or self.in_call or not torch.cuda.is_available():
            yield
            return
        self.in_call = True
        torch.cuda.profiler.start()
        try:
            yield
        finally:
            torch.cuda.profiler.stop()
            self.in_call = False

    def start(self, **kwargs: Any) -> None:
        """Begin the range."""
        if torch.cuda.is_available() and not self.discrete:
            torch.cuda.profiler.start()

    def stop(self) -> None:
        """End the range."""
        if torch.cuda.is_available() and not self.discrete:
            torch.cuda.profiler.stop()


class DistProfiler:
    """The profiler of one rank by `config.tool`; a rank that `config` does not name records nothing."""

    def __init__(
        self, rank: int, config: ProfilerConfig | None = None, tool_config: object | None = None, **kwargs: Any
    ) -> None:
        self.config = config or ProfilerConfig()
        self.chosen = self.config.enable and (self.config.all_ranks or rank in self.config.ranks)
        tool = self.config.tool or "torch"
        own = tool_config or (self.config.tool_config or ToolConfigs()).get(tool)
        self.tool: Any = None
        if self.chosen and tool == "torch":
            self.tool = Profiler(self.config, own)
            self.tool.rank = rank
        elif self.chosen and tool == "torch_memory":
            self.tool = TorchMemoryProfiler(rank, self.config, own)
        elif self.chosen and tool == "nsys":
            self.tool = NsightProfiler(bool(own and own.discrete))

    def start(self, **kwargs: Any) -> None:
        """Begin to record, unless another role of this process does already."""
        global _active
        if self.tool is not None and _active is None:
            _active = self.tool
            self.tool.start(**kwargs)

    def stop(self) -> None:
        """End the recording that this object began."""
        global _active
        if self.tool is not None and _active is self.tool:
            _active = None
            self.tool.stop()

    @classmethod
    def annotate(
        cls, message: str | None = None, color: str | None = None, domain: str | None = None,
        category: str | None = None, **kwargs_outer: Any,
    ) -> Callable:
        """Decorator: a range in the profile for each call, named `message` or after the function.

        With nsys.discrete it is a capture range too.
        """

        def decorate(func: Callable) -> Callable:
            @functools.wraps(func)
            def call(*args: Any, **kwargs: Any) -> Any:
                captured = _active.call() if isinstance(_active, NsightProfiler) else nullcontext()
                with captured, marked_range(message or func.__name__):
                    return func(*args, **kwargs)

            return call

        return decorate


def finished_update() -> None:
    """Report a finished update (mini-batch) to the profiler that records in this process."""
    if isinstance(_active, Profiler):  # other recordings cover all updates
        _active.step()


@contextmanager
def marked_range(name: str) -> Iterator[None]:
    """A named range in torch's profile and, with a GPU, for Nsight."""
    with torch.profiler.record_function(name):
        if not torch.cuda.is_available():
            yield
            return
        torch.cuda.nvtx.range_push(name)
        try:
            yield
        finally:
            torch.cuda.nvtx.range_pop()


def mark_start_range(
    message: str | None = None, color: str | None = None, domain: str | None = None, category: str | None = None
) -> Any:
    """Begin a `marked_range`; give the result to `mark_end_range`.

    `color`, `domain` and `category` are accepted for callers of nvtx; torch's ranges have a name only.
    """
    marked = marked_range(message or "range")
    marked.__enter__()
    return marked


def mark_end_range(range_id: Any) -> None:
    """End a range."""
    range_id.__exit__(None, None, None)


def mark_annotate(
    message: str | None = None, color: str | None = None, domain: str | None = None, category: str | None = None
) -> Callable:
    """Decorator: a range for each call, named `message` or after the function."""
    return lambda func: marked_range(message or func.__name__)(func)
