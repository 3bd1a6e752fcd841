"""Sends metrics to the backends that `trainer.logger` names."""

import importlib.util
import json
import os
import re
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

from verl.utils.jsonl import replace_text, set_aside
from verl.utils.registry import Registry


class Backend:
    """A destination of metrics."""

    def __init__(self, project_name: str, experiment_name: str, config: dict[str, Any] | None = None) -> None:
        """Open it."""

    def log(self, data: dict[str, Any], step: int) -> None:
        """Log the metrics of one step."""
        raise NotImplementedError(f"{type(self).__name__} must define log(data, step).")

    def finish(self) -> None:
        """Flush, then close."""


class Tracking:
    """Sends the metrics of a run to every backend in `default_backend` (a name or a list of names).

    `logger` maps names to backends. Raises ValueError for an unknown name, ImportError for a package not installed;
    wandb, which is in the default of `trainer.logger`, is replaced by the console, with a warning.
    """

    def __init__(
        self, project_name: str, experiment_name: str, default_backend: str | list[str] = "console",
        config: dict[str, Any] | None = None,
    ) -> None:
        asked = [default_backend] if isinstance(default_backend, str) else default_backend
        names = backend_names(asked)
        if "wandb" in asked and "wandb" not in names:
            log.warning(
                "trainer.logger: wandb is not installed (pip install wandb); the console and metrics.jsonl replace it"
            )
        self.logger = {name: BACKENDS[name](project_name, experiment_name, config) for name in names}

    def log(self, data: dict[str, Any], step: int, backend: str | list[str] | None = None) -> None:
        """Send the metrics of `step` to all backends, or to the named ones only."""
        chosen = [backend] if isinstance(backend, str) else backend
        for name, sink in self.logger.items():
            if chosen is None or name in chosen:
                sink.log(data, step)

    def finish(self) -> None:
        """Flush and close every backend."""
        for sink in self.logger.values():
            sink.finish()


def backend_names(given: str | Iterable[str]) -> list[str]:
    """The backends of `trainer.logger`, the console in place of a missing wandb. ValueError for an unknown name."""
    names = [given] if isinstance(given, str) else list(given)
    for name in names:
        BACKENDS.find(name)
    spec = importlib.util.find_spec("wandb")
    installed = spec is not None and spec.origin is not None  # None: of the folder ./wandb, which wandb makes for runs
    return list(dict.fromkeys("console" if name == "wandb" and not installed else name for name in names))


def plain_number(value: Any) -> float | int | bool | None:
    """A plain number of a Python, numpy or torch scalar; None of anything else."""
    if isinstance(value, torch.Tensor | np.ndarray | np.generic):
        value = value.item() if np.prod(value.shape) == 1 else None
    return value if isinstance(value, Real) else None


def _numbers(data: dict[str, Any]) -> dict[str, float | int | bool]:
    return {key: number for key, value in data.items() if (number := plain_number(value)) is not None}


# Metrics of the console's line, and what they are called there; the other backends and metrics.jsonl have all of them.
HEADLINES = {
    "critic/score/mean": "reward", "response_length/mean": "length", "actor/pg_loss": "loss", "train/loss": "loss",
    "train/loss_total": "loss", "actor/kl_loss": "kl", "actor/reward_kl_penalty": "kl", "actor/lr": "lr",
    "train/lr": "lr", "timing_s/step": "seconds", "train/time(s)": "seconds",
}  # fmt: skip


class ConsoleLogger(Backend):
    """One line per step on standard output: `step 7  reward 0.41  length 35.1  loss -0.0123  lr 1e-06  seconds 4.2`.

    It has the metrics of HEADLINES and those of validations (val-core/*, val/loss); all metrics if it had none of them.
    """

    def log(self, data: dict[str, Any], step: int) -> None:
        numbers = _numbers(data)
        chosen = {name: numbers[key] for key, name in HEADLINES.items() if key in numbers}
        chosen |= {key: value for key, value in numbers.items() if key.startswith("val-core/") or key == "val/loss"}
        texts = [f"{name} {value:.4g}" if isinstance(value, float) else f"{name} {value}"
                 for name, value in (chosen or numbers).items()]  # fmt: skip
        sys.stdout.write("  ".join([f"step {step}", *texts]) + "\n")
        sys.stdout.flush()


def written_by(backend: str, project_name: str, experiment_name: str) -> tuple[Path, bool] | None:
    """The path that a backend writes to, and whether it is a folder; None where a service decides."""
    if backend == "file":
        path, root = os.environ.get("VERL_FILE_LOGGER_PATH"), os.environ.get("VERL_FILE_LOGGER_ROOT")
        return Path(path or Path(root or ".") / project_name / f"{experiment_name}.jsonl"), False
    if backend == "tensorboard":
        return Path(os.environ.get("TENSORBOARD_DIR") or Path("tensorboard_log", project_name, experiment_name)), True
    return None


def generations_file(project_name: str, experiment_name: str) -> Path:
    """The file of the validation samples that the backend `file` shows, next to that of its metrics."""
    return written_by("file", project_name, experiment_name)[0].with_suffix(".generations.jsonl")


class FileLogger(Backend):
    """JSON lines `{"step": N, "data": {...}}` in $VERL_FILE_LOGGER_PATH, or <root>/<project>/<experiment>.jsonl
    (root: $VERL_FILE_LOGGER_ROOT, else the working directory).

    A resumed run appends to the same file. Its first `log` removes the lines that it will write again: later steps
    of the interrupted run, the same step with the same metrics, and an incomplete last line. If no line is left, the
    file is of an earlier run and is renamed (<experiment>.1.jsonl).
    """

    def __init__(self, project_name: str, experiment_name: str, config: dict[str, Any] | None = None) -> None:
        self.path, _ = written_by("file", project_name, experiment_name)
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self._file = None

    def log(self, data: dict[str, Any], step: int) -> None:
        numbers = _numbers(data)
        if self._file is None:
            self._remove_repeated(step, set(numbers))
            self._file = self.path.open("a", encoding="utf-8")
        self._file.write(json.dumps({"step": step, "data": numbers}) + "\n")
        self._file.flush()

    def _remove_repeated(self, step: int, keys: set[str]) -> None:
        if not self.path.exists():
            return
        lines = self.path.read_text(encoding="utf-8").splitlines()
        kept = [line for line in lines if _is_kept(line, step, keys)]
        if not kept:
            set_aside(self.path)
        elif len(kept) < len(lines):
            log.info("{}: {} lines of step {} and later are replaced", self.path, len(lines) - len(kept), step)
            replace_text(self.path, "".join(line + "\n" for line in kept))

    def finish(self) -> None:
        if self._file is not None:
            self._file.close()
            self._file = None


def _is_kept(line: str, step: int, keys: set[str]) -> bool:
    """Whether a line stays in the file when the run resumes at `step` with metrics named `keys`."""
    try:
        entry = json.loads(line)
    except ValueError:  # the process was killed while it wrote the line
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
    folder, _ = written_by("tensorboard", project_name, experiment_name)
    return _optional("tensorboard", "torch.utils.tensorboard").SummaryWriter(str(folder))


class RunLogger(Backend):
    """A service whose module has init(project=..., config=..., <name>=...), log(data, step=...) and finish()."""

    def __init__(
        self, module: str, name_argument: str, project_name: str, experiment_name: str, config: dict[str, Any] | None
    ) -> None:
        self.service = _optional(module)
        self.service.init(**{"project": project_name, name_argument: experiment_name, "config": config})

    def log(self, data: dict[str, Any], step: int) -> None:
        self.service.log(data, step=step)

    def finish(self) -> None:
        self.service.finish()


class VemlpWandbLogger(RunLogger):
    """wandb of Volcano Engine's platform; $VOLC_ACCESS_KEY_ID, $VOLC_SECRET_ACCESS_KEY and $MLP_TRACKING_REGION."""

    def __init__(self, project_name: str, experiment_name: str, config: dict[str, Any] | None = None) -> None:
        missing = [k for k in ("VOLC_ACCESS_KEY_ID", "VOLC_SECRET_ACCESS_KEY") if k not in os.environ]
        if missing:
            raise ValueError(f"trainer.logger names 'vemlp_wandb', which needs {' and '.join(missing)} to be set.")
        _optional("volcengine_ml_platform").init(
            ak=os.environ["VOLC_ACCESS_KEY_ID"],
            sk=os.environ["VOLC_SECRET_ACCESS_KEY"],
            region=os.environ.get("MLP_TRACKING_REGION"),
        )
        super().__init__("volcengine_ml_platform.wandb", "name", project_name, experiment_name, config)


class ClearMLLogger(Backend):
    """ClearML: one task per run, scalars grouped by what stands before their last slash."""

    def __init__(self, project_name: str, experiment_name: str, config: dict[str, Any] | None = None) -> None:
        clearml = _optional("clearml")
        self.task = clearml.Task.init(
            project_name=project_name, task_name=experiment_name, continue_last_task=True, output_uri=False
        )
        self.task.connect_configuration(config or {}, name="config")

    def log(self, data: dict[str, Any], step: int) -> None:
        logger = self.task.get_logger()
        for key, value in _numbers(data).items():
            title, _, series = key.rpartition("/")
            logger.report_scalar(title=title or series, series=series, value=value, iteration=step)

    def finish(self) -> None:
        self.task.close()


class MlflowLogger(Backend):
    """MLflow; $MLFLOW_TRACKING_URI names the store."""

    def __init__(self, project_name: str, experiment_name: str, config: dict[str, Any] | None = None) -> None:
        self.mlflow = _optional("mlflow")
        self.mlflow.set_experiment(project_name)
        self.mlflow.start_run(run_name=experiment_name)
        self.mlflow.log_dict(config or {}, "config.json")

    def log(self, data: dict[str, Any], step: int) -> None:
        # MLflow refuses other characters in a name: val-core/.../mean@4, train/time(s).
        names = {key: re.sub(r"[^\w/. -]", "_", key.replace("@", "_at_")) for key in data}
        self.mlflow.log_metrics({names[key]: number for key, number in _numbers(data).items()}, step=step)

    def finish(self) -> None:
        self.mlflow.end_run()


def _optional(package: str, module: str | None = None) -> ModuleType:
    """A module (default: of the same name) of an optional package; ImportError says how to install it."""
    try:
        return importlib.import_module(module or package)
    except ImportError as error:
        raise ImportError(
            f"trainer.logger names a service whose package {package!r} cannot be imported ({error}). "
            f"Install it (pip install {package}), or take the service out of trainer.logger."
        ) from error


BACKENDS: Registry[str, Callable[[str, str, dict[str, Any] | None], Backend]] = Registry(
    "trainer.logger", "Name one of them, or a list."
)
BACKENDS |= {
    "console": ConsoleLogger, "file": FileLogger, "tensorboard": TensorboardLogger, "mlflow": MlflowLogger,
    "wandb": partial(RunLogger, "wandb", "name"), "trackio": partial(RunLogger, "trackio", "name"),
    "swanlab": partial(RunLogger, "swanlab", "experiment_name"), "clearml": ClearMLLogger,
    "vemlp_wandb": VemlpWandbLogger,
}  # fmt: skip


@dataclass
class ValidationGenerationsLogger:
    """Logs validation samples to backends that show text: a table `val/generations` (wandb, vemlp_wandb, clearml,
    mlflow), a text per sample (tensorboard, swanlab), a file.
    """

    project_name: str | None = None
    experiment_name: str | None = None

    def log(self, loggers: str | Iterable[str], samples: list[list[Any]], step: int) -> None:
        """`samples`: rows of [input, output, score]. Backends without text support are skipped."""
        known = {"wandb", "vemlp_wandb", "swanlab", "mlflow", "clearml", "tensorboard", "file"}
        for name in known.intersection(backend_names(loggers)):
            getattr(self, f"log_generations_to_{name}")(samples, step)

    def log_generations_to_wandb(self, samples: list[list[Any]], step: int) -> None:
        """One table per step, in the run that Tracking opened."""
        _log_table(_optional("wandb"), samples, step)

    def log_generations_to_vemlp_wandb(self, samples: list[list[Any]], step: int) -> None:
        """One table per step, in the run that Tracking opened."""
        _log_table(_optional("volcengine_ml_platform", "volcengine_ml_platform.wandb"), samples, step)

    def log_generations_to_swanlab(self, samples: list[list[Any]], step: int) -> None:
        """One text per sample."""
        swanlab = _optional("swanlab")
        texts = [swanlab.Text(_as_markdown(row), caption=f"sample {n}") for n, row in enumerate(samples)]
        swanlab.log({"val/generations": texts}, step=step)

    def log_generations_to_mlflow(self, samples: list[list[Any]], step: int) -> None:
        """One JSON file per step among the run's artifacts."""
        rows = [{"input": row[0], "output": row[1], "score": plain_number(row[2])} for row in samples]
        _optional("mlflow").log_dict({"step": step, "samples": rows}, f"val/generations_{step}.json")

    def log_generations_to_clearml(self, samples: list[list[Any]], step: int) -> None:
        """One table per step, in the task that Tracking opened."""
        task = _optional("clearml").Task.current_task()
        table = [["input", "output", "score"], *[list(row[:3]) for row in samples]]
        task.get_logger().report_table(title="val/generations", series="samples", iteration=step, table_plot=table)

    def log_generations_to_tensorboard(self, samples: list[list[Any]], step: int) -> None:
        """One text entry per sample."""
        writer = _tensorboard_writer(self.project_name, self.experiment_name)
        for number, row in enumerate(samples):
            writer.add_text(f"val/generations/{number}", _as_markdown(row), step)
        writer.close()

    def log_generations_to_file(self, samples: list[list[Any]], step: int) -> None:
        """JSON lines next to the metrics' file: <experiment>.generations.jsonl."""
        target = generations_file(self.project_name, self.experiment_name)
        target.parent.mkdir(parents=True, exist_ok=True)
        with target.open("a", encoding="utf-8", errors="backslashreplace") as file:
            for prompt, answer, score, *_ in samples:
                entry = {"step": step, "input": prompt, "output": answer, "score": plain_number(score)}
                file.write(json.dumps(entry, ensure_ascii=False) + "\n")


def _as_markdown(row: list[Any]) -> str:
    prompt, answer, score, *_ = row
    return f"**input**\n\n{prompt}\n\n**output**\n\n{answer}\n\n**score** {score}"


def _log_table(service: Any, samples: list[list[Any]], step: int) -> None:
    table = service.Table(columns=["input", "output", "score"], data=[list(row[:3]) for row in samples])
    service.log({"val/generations": table}, step=step)
