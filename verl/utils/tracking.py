"""Sends metrics to the places that `trainer.logger` names."""

from __future__ import annotations

import importlib
import json
import os
import sys
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial
from numbers import Real
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import torch
from loguru import logger as log

from verl.utils.registry import nearest


class Backend:
    """One place for metrics."""

    def __init__(self, project_name: str, experiment_name: str, config: dict[str, Any] | None = None) -> None:
        """Open it."""

    def log(self, data: dict[str, Any], step: int) -> None:
        """Take the metrics of one step."""
        raise NotImplementedError(f"{type(self).__name__} has no log(data, step); a logger must have one.")

    def finish(self) -> None:
        """Flush, then close."""


class Tracking:
    """Metrics of a run to every backend in `default_backend` (a name or a list of names).

    `logger` maps each name to its backend. An unknown name is refused; so is one whose package is not installed.
    """

    def __init__(
        self, project_name: str, experiment_name: str, default_backend: str | list[str] = "console",
        config: dict[str, Any] | None = None,
    ) -> None:
        names = [default_backend] if isinstance(default_backend, str) else list(default_backend)
        for name in names:
            if name not in _BACKENDS:
                hint = nearest(name, list(_BACKENDS)) or "."
                raise ValueError(f"trainer.logger={name!r} is unknown{hint} Known: {', '.join(sorted(_BACKENDS))}.")
        self.logger = {name: _BACKENDS[name](project_name, experiment_name, config) for name in dict.fromkeys(names)}

    def log(self, data: dict[str, Any], step: int, backend: str | Iterable[str] | None = None) -> None:
        """Send the metrics of `step` to all backends, or to the named ones only."""
        wanted = None if backend is None else {backend} if isinstance(backend, str) else set(backend)
        for name, sink in self.logger.items():
            if wanted is None or name in wanted:
                sink.log(data, step)

    def finish(self) -> None:
        """Flush and close every backend."""
        for sink in self.logger.values():
            sink.finish()


def plain_number(value: Any) -> float | int | bool | None:
    """A plain number of a Python, numpy or torch scalar; None of anything else."""
    if isinstance(value, torch.Tensor | np.ndarray | np.generic):
        size = value.numel() if isinstance(value, torch.Tensor) else value.size
        value = value.item() if size == 1 else None
    return value if isinstance(value, Real) else None


def _numbers(data: dict[str, Any]) -> dict[str, float | int | bool]:
    return {key: number for key, value in data.items() if (number := plain_number(value)) is not None}


class ConsoleLogger(Backend):
    """One line a step on standard output: `step:N - key:value - key:value`."""

    def log(self, data: dict[str, Any], step: int) -> None:
        line = [f"step:{step}"]
        for key, value in _numbers(data).items():
            line.append(f"{key}:{value:.6g}" if isinstance(value, float) else f"{key}:{value}")
        sys.stdout.write(" - ".join(line) + "\n")
        sys.stdout.flush()


class FileLogger(Backend):
    """JSON lines `{"step": N, "data": {...}}` in $VERL_FILE_LOGGER_PATH, or <root>/<project>/<experiment>.jsonl
    (root: $VERL_FILE_LOGGER_ROOT, else the working directory).

    A resumed run goes on in the same file: with its first line, what an interrupted run wrote for later steps, or
    wrote in the same form for that very step, is taken out (those steps are done again), a torn last line too.
    """

    def __init__(self, project_name: str, experiment_name: str, config: dict[str, Any] | None = None) -> None:
        path = os.environ.get("VERL_FILE_LOGGER_PATH")
        root = Path(os.environ.get("VERL_FILE_LOGGER_ROOT") or ".")
        self.path = Path(path) if path else root / project_name / f"{experiment_name}.jsonl"
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self._file = None

    def log(self, data: dict[str, Any], step: int) -> None:
        numbers = _numbers(data)
        if self._file is None:
            self._take_out_redone(step, set(numbers))
            self._file = self.path.open("a", encoding="utf-8")
        self._file.write(json.dumps({"step": step, "data": numbers}) + "\n")
        self._file.flush()

    def _take_out_redone(self, step: int, keys: set[str]) -> None:
        if not self.path.exists():
            return
        lines = self.path.read_text(encoding="utf-8").splitlines()
        kept = [line for line in lines if _stays(line, step, keys)]
        if len(kept) < len(lines):
            log.info("{}: {} lines of step {} and later are replaced", self.path, len(lines) - len(kept), step)
            fresh = self.path.with_suffix(self.path.suffix + ".tmp")
            fresh.write_text("".join(line + "\n" for line in kept), encoding="utf-8")
            os.replace(fresh, self.path)

    def finish(self) -> None:
        if self._file is not None:
            self._file.close()
            self._file = None


def _stays(line: str, step: int, keys: set[str]) -> bool:
    """Whether a line of an earlier run stays when the run goes on at `step` with metrics called `keys`."""
    try:
        entry = json.loads(line)
    except ValueError:  # torn by a kill while it was written
        return False
    return entry["step"] < step or entry["step"] == step and not set(entry["data"]) <= keys


class TensorboardLogger(Backend):
    """Scalars in $TENSORBOARD_DIR, else tensorboard_log/<project>/<experiment>."""

    def __init__(self, project_name: str, experiment_name: str, config: dict[str, Any] | None = None) -> None:
        self.writer = _tensorboard_writer(project_name, experiment_name)

    def log(self, data: dict[str, Any], step: int) -> None:
        for key, value in _numbers(data).items():
            self.writer.add_scalar(key, value, step)

    def finish(self) -> None:
        self.writer.close()


def _tensorboard_writer(project_name: str, experiment_name: str) -> Any:
    folder = os.environ.get("TENSORBOARD_DIR") or os.path.join("tensorboard_log", project_name, experiment_name)
    return _optional("torch.utils.tensorboard", "tensorboard").SummaryWriter(folder)


class RunLogger(Backend):
    """A service whose module has init(project=..., config=..., <name>=...), log(data, step=...) and finish()."""

    def __init__(
        self, module: str, name_argument: str, project_name: str, experiment_name: str, config: dict[str, Any] | None
    ) -> None:
        self.service = _optional(module, module)
        self.service.init(**{"project": project_name, name_argument: experiment_name, "config": config})

    def log(self, data: dict[str, Any], step: int) -> None:
        self.service.log(data, step=step)

    def finish(self) -> None:
        self.service.finish()


class MlflowLogger(Backend):
    """MLflow; $MLFLOW_TRACKING_URI names the store."""

    def __init__(self, project_name: str, experiment_name: str, config: dict[str, Any] | None = None) -> None:
        self.mlflow = _optional("mlflow", "mlflow")
        self.mlflow.set_experiment(project_name)
        self.mlflow.start_run(run_name=experiment_name)
        self.mlflow.log_dict(config or {}, "config.json")

    def log(self, data: dict[str, Any], step: int) -> None:
        # MLflow refuses '@' in a name (val-core/.../mean@4).
        self.mlflow.log_metrics({key.replace("@", "_at_"): value for key, value in _numbers(data).items()}, step=step)

    def finish(self) -> None:
        self.mlflow.end_run()


def _optional(module: str, package: str) -> ModuleType:
    """A module of an optional package; an error with the mend when it is not installed."""
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise ImportError(
            f"trainer.logger names {package!r}, but that package cannot be imported ({error}). "
            f"Install it (pip install {package}), or take {package!r} out of trainer.logger."
        ) from error


_BACKENDS: dict[str, Callable[[str, str, dict[str, Any] | None], Backend]] = {
    "console": ConsoleLogger, "file": FileLogger, "tensorboard": TensorboardLogger, "mlflow": MlflowLogger,
    "wandb": partial(RunLogger, "wandb", "name"), "trackio": partial(RunLogger, "trackio", "name"),
    "swanlab": partial(RunLogger, "swanlab", "experiment_name"),
}  # fmt: skip


@dataclass
class ValidationGenerationsLogger:
    """Shows validation samples where a backend can hold text: wandb (table `val/generations`), tensorboard, file."""

    project_name: str | None = None
    experiment_name: str | None = None

    def log(self, loggers: Iterable[str], samples: list[list[Any]], step: int) -> None:
        """`samples`: rows of [input, output, score]. Backends that hold no text are passed over."""
        sinks = {"wandb": self.log_generations_to_wandb, "tensorboard": self.log_generations_to_tensorboard,
                 "file": self.log_generations_to_file}
        for name in set(loggers) & set(sinks):
            sinks[name](samples, step)

    def log_generations_to_wandb(self, samples: list[list[Any]], step: int) -> None:
        """One table a step, in the run that Tracking opened."""
        wandb = _optional("wandb", "wandb")
        table = wandb.Table(columns=["input", "output", "score"], data=[list(row[:3]) for row in samples])
        wandb.log({"val/generations": table}, step=step)

    def log_generations_to_tensorboard(self, samples: list[list[Any]], step: int) -> None:
        """One text entry a sample."""
        writer = _tensorboard_writer(self.project_name, self.experiment_name)
        for number, (prompt, answer, score, *_) in enumerate(samples):
            text = f"**input**\n\n{prompt}\n\n**output**\n\n{answer}\n\n**score** {score}"
            writer.add_text(f"val/generations/{number}", text, step)
        writer.close()

    def log_generations_to_file(self, samples: list[list[Any]], step: int) -> None:
        """JSON lines beside the metrics' file: <experiment>.generations.jsonl."""
        metrics = FileLogger(self.project_name, self.experiment_name).path
        with metrics.with_suffix(".generations.jsonl").open("a", encoding="utf-8") as file:
            for prompt, answer, score, *_ in samples:
                entry = {"step": step, "input": prompt, "output": answer, "score": plain_number(score)}
                file.write(json.dumps(entry, ensure_ascii=False) + "\n")
