"""Traces of single rollouts (actor_rollout_ref.rollout.trace): calls with inputs and outputs, as JSON lines, in MLflow
or in Weave.
"""

import functools
import importlib
import inspect
import json
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from pathlib import Path
from types import MappingProxyType
from typing import Any
from uuid import uuid4

BACKENDS = ("jsonl", "mlflow", "weave")
KEY = "actor_rollout_ref.rollout.trace.backend"
#: attributes of the current trace; None where calls are not traced
_attributes: ContextVar[Mapping[str, Any] | None] = ContextVar("rollout_trace", default=MappingProxyType({}))


class JsonlTraces:
    """Writes calls to a file of this process in `folder`: one JSON object per line, when the call has ended."""

    def __init__(self, folder: str | Path) -> None:
        self.file = Path(folder).expanduser() / f"{uuid4().hex[:12]}.jsonl"
        self.file.parent.mkdir(parents=True, exist_ok=True)

    def create_call(self, op: str, inputs: dict[str, Any], attributes: dict[str, Any]) -> dict[str, Any]:
        """A call that begins."""
        return {**attributes, "op": op, "started": time.time(), "inputs": inputs}

    def finish_call(self, call: dict[str, Any], output: Any = None, exception: BaseException | None = None) -> None:
        """Write a call with its result or exception, and its seconds."""
        ended = {"seconds": time.time() - call["started"], "error": None if exception is None else repr(exception)}
        with self.file.open("a") as file:
            file.write(json.dumps(call | ended | {"output": output}, default=_plain) + "\n")


def _plain(value: Any) -> Any:
    return value.model_dump() if hasattr(value, "model_dump") else f"<{type(value).__name__}>"


class RolloutTraceConfig:
    """Where the traces of this process go: one object, which `init` fills and `reset` clears."""

    _instance: "RolloutTraceConfig | None" = None
    backend: str | None = None
    client: object | None = None
    token2text: bool = False
    _initialized: bool = False
    project_name: str | None = None
    experiment_name: str | None = None
    max_samples_per_step_per_worker: int | None = None

    def __init__(self) -> None:
        self._samples: dict[tuple, list[int | None]] = {}  # (step, validate) -> indices of the traced samples

    @classmethod
    def get_instance(cls) -> "RolloutTraceConfig":
        """The object of this process."""
        if cls._instance is None:
            cls._instance = cls()
        return cls._instance

    @classmethod
    def init(
        cls, project_name: str, experiment_name: str, backend: str | None, token2text: bool = False,
        max_samples_per_step_per_worker: int | None = None, folder: str | Path = "rollout_traces",
    ) -> None:
        """Connect to `backend` (jsonl, mlflow, weave; None traces nothing); a second call has no effect before `reset`.

        `folder` gets the files of jsonl. `token2text` adds decoded prompts and responses.
        `max_samples_per_step_per_worker` is the number of samples that `rollout_trace_attr` traces of each step in this
        process. Raises ValueError for an unknown backend, ImportError for one that is not installed.
        """
        config = cls.get_instance()
        if config._initialized:
            return
        if backend is not None and backend not in BACKENDS:
            raise ValueError(f"{KEY}={backend!r} is unknown. Known: {', '.join(BACKENDS)}, null.")
        if backend == "jsonl":
            config.client = JsonlTraces(folder)
        elif backend is not None:
            try:
                config.client = importlib.import_module(backend)
            except ImportError as error:
                text = f"{KEY}={backend} needs a package: pip install {backend}, or set the key to null."
                raise ImportError(text) from error
        if backend == "weave":
            config.client = config.client.init(project_name)
        elif backend == "mlflow":
            config.client.set_experiment(project_name)
        config.backend, config.token2text, config._initialized = backend, token2text, True
        config.project_name, config.experiment_name = project_name, experiment_name
        config.max_samples_per_step_per_worker = max_samples_per_step_per_worker

    @classmethod
    def get_backend(cls) -> str | None:
        """The backend's name; None traces nothing."""
        return cls.get_instance().backend

    @classmethod
    def get_client(cls) -> object | None:
        """Weave's client, the module mlflow, or a JsonlTraces."""
        return cls.get_instance().client

    @classmethod
    def enable_token2text(cls) -> bool | None:
        """Whether outputs contain decoded prompts and responses."""
        return cls.get_instance().token2text

    @classmethod
    def reset(cls) -> None:
        """Forget the backend."""
        cls._instance = None

    def _takes(self, sample_index: int | None, step: int | None, validate: bool) -> bool:
        """Whether a sample is traced: all rollouts of the first samples of each step, up to the limit."""
        limit = self.max_samples_per_step_per_worker
        if limit is None:
            return True
        samples = self._samples.setdefault((step, validate), [])
        if sample_index is not None and sample_index in samples:
            return True
        if len(samples) >= limit:
            return False
        samples.append(sample_index)
        return True


@contextmanager
def rollout_trace_attr(
    sample_index: int | None = None, step: int | None = None, rollout_n: int | None = None,
    name: str = "rollout_trace", validate: bool = False, trace: bool = True,
) -> Iterator[None]:
    """Calls of decorated functions in the block belong to one trace with these attributes.

    They are not traced with `trace=False`, nor when `max_samples_per_step_per_worker` other samples of this step are; a
    block without `sample_index` counts as a sample.
    """
    config = RolloutTraceConfig.get_instance()
    trace = trace and config.backend is not None and config._takes(sample_index, step, validate)
    given = {"sample_index": sample_index, "step": step, "rollout_n": rollout_n}
    attributes = {key: value for key, value in given.items() if value is not None}
    attributes |= {"validate": validate, "experiment_name": config.experiment_name}
    token = _attributes.set(attributes if trace else None)
    try:
        if not trace or config.backend == "jsonl":
            yield
        elif config.backend == "weave":
            with importlib.import_module("weave").attributes(attributes):
                yield
        else:
            with config.client.start_span(name=name):
                config.client.update_current_trace(tags={key: str(value) for key, value in attributes.items()})
                yield
    finally:
        _attributes.reset(token)


def rollout_trace_op(func: Callable) -> Callable:
    """Decorator of a method, `async def` or not: its calls become spans with arguments and results."""

    @contextmanager
    def span(self: Any, args: tuple, kwargs: dict) -> Iterator[list[Any]]:
        """Yields a list that takes the result."""
        config, results, attributes = RolloutTraceConfig.get_instance(), [], _attributes.get()
        if config.backend is None or attributes is None:
            yield results
            return
        bound = inspect.signature(func).bind(self, *args, **kwargs)
        bound.apply_defaults()
        given = {name: value for name, value in bound.arguments.items() if value is not self}
        if config.backend == "mlflow":
            with config.client.start_span(name=func.__qualname__) as opened:
                opened.set_inputs(given)
                yield results
                opened.set_outputs(_described(self, results[0], config))
            return
        call = config.client.create_call(op=func.__qualname__, inputs=given, attributes=dict(attributes))
        try:
            yield results
        except BaseException as error:  # a cancelled call too, or it would stay the parent of what follows
            config.client.finish_call(call, exception=error)
            raise
        config.client.finish_call(call, output=_described(self, results[0], config))

    if inspect.iscoroutinefunction(func):

        @functools.wraps(func)
        async def call(self: Any, *args: Any, **kwargs: Any) -> Any:
            with span(self, args, kwargs) as results:
                results.append(await func(self, *args, **kwargs))
            return results[0]
    else:

        @functools.wraps(func)
        def call(self: Any, *args: Any, **kwargs: Any) -> Any:
            with span(self, args, kwargs) as results:
                results.append(func(self, *args, **kwargs))
            return results[0]

    return call


def _described(owner: Any, result: Any, config: RolloutTraceConfig) -> Any:
    """The result; with token2text as a dict that also has prompt_text and response_text."""
    tokenizer = getattr(owner, "tokenizer", None)
    if not config.token2text or tokenizer is None or not hasattr(result, "prompt_ids"):
        return result
    fields = result.model_dump() if hasattr(result, "model_dump") else dict(vars(result))
    known = [part for part in ("prompt", "response") if fields.get(f"{part}_ids") is not None]
    return fields | {f"{part}_text": tokenizer.decode(fields[f"{part}_ids"]) for part in known}
