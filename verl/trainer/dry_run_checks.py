"""What a run needs beyond its config: data, tokenizer, models, plug-ins, this machine."""

from __future__ import annotations

import importlib.util
import json
import os
import re
import urllib.request
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.error import HTTPError

from omegaconf import DictConfig, ListConfig

from verl.planning.problems import ABSENT, CHECKS, WRONG, ConfigError, Problem, absent, one_line, wrong
from verl.utils.redact import redact_text
from verl.utils.weight_files import safetensors_of, tensor_shapes

ROWS_CHECKED = 20_000
ROWS_AT_START = 200  # of each data set: a real run meets the others soon enough
ROW_ERRORS_SHOWN = 5
LOGGER_PACKAGES = {"wandb", "tensorboard", "trackio", "mlflow", "swanlab", "clearml"}
_HUB_NAME = re.compile(r"^[A-Za-z0-9][\w.\-]*(/[\w.\-]+)?$")


@dataclass
class Findings:
    """Facts that the plan is made of (None where unknown), with the problems met on the way."""

    to_start: bool = False  # a run, not a plan: the hub may be asked, and weights must be there
    tokenizer: Any = None
    processor: Any = None
    hf_config: Any = None
    datasets: dict[str, Any] = field(default_factory=dict)  # data.train_files, data.val_files -> its data set
    train_prompts: int | None = None
    val_prompts: int | None = None
    problems: list[Problem] = field(default_factory=list)


def look_around(config: DictConfig) -> Findings:
    """Every check of this module; one that cannot be made because another failed is left out."""
    found = Findings()
    check_models(config.actor_rollout_ref.model, found)
    found.problems += check_plugins(config)
    check_data(config, found)
    found.problems += check_machine(config)
    return found


def refuse_bad_input(config: DictConfig) -> None:
    """Raise one ConfigError with whatever would stop this run on its way: model, plug-ins, data, registered checks.

    For a start on this machine, where absent is as bad as wrong. With a cluster elsewhere (RAY_ADDRESS) nothing is
    looked at: its nodes have the files.
    """
    settings = config.ray_kwargs.ray_init
    if os.environ.get("RAY_ADDRESS") or ("address" in settings and settings.address):
        return
    found = Findings(to_start=True)
    check_models(config.actor_rollout_ref.model, found)
    found.problems += check_plugins(config)
    check_data(config, found, rows=ROWS_AT_START)
    for check in CHECKS:
        found.problems += check(config, found)
    if fatal := list(dict.fromkeys(p for p in found.problems if p.kind in (WRONG, ABSENT))):
        raise ConfigError(fatal)


def check_models(
    model: Any, found: Findings, key: str = "actor_rollout_ref.model", path_key: str = "actor_rollout_ref.model.path"
) -> None:
    """Tokenizer, processor and config.json of the model, and whether the weights in its folder are whole files.

    `model` has HFModelConfig's settings, which lie under `key`; `path_key` is the name of its path.
    """
    from transformers import AutoConfig

    from verl.utils.tokenizer import hf_processor, hf_tokenizer

    trust = {"trust_remote_code": model.trust_remote_code, "local_files_only": not found.to_start}
    tokenizer_key = f"{key}.tokenizer_path" if model.tokenizer_path else path_key

    def load_config(path: str) -> Any:
        files = safetensors_of(path)
        tensor_shapes(files)
        if found.to_start and Path(path).is_dir() and not files and not any(Path(path).glob("*.bin")):
            raise FileNotFoundError("the folder holds no weights (*.safetensors, *.bin)")
        return AutoConfig.from_pretrained(path, **trust, **(model.override_config or {}))

    def load_tokenizer(path: str) -> tuple[Any, Any]:
        tokenizer = hf_tokenizer(path, **trust)
        if model.custom_chat_template is not None:
            tokenizer.chat_template = model.custom_chat_template
        return tokenizer, hf_processor(path, **trust)

    def load_adapter(path: str) -> None:
        if (folder := Path(path)).is_dir():  # else a name of the hub
            json.loads((folder / "adapter_config.json").read_text(encoding="utf-8"))
            tensor_shapes(safetensors_of(folder) or [folder / "adapter_model.safetensors"])

    found.hf_config = _load(found, path_key, model.path, load_config)
    if found.hf_config is not None or model.tokenizer_path:
        loaded = _load(found, tokenizer_key, model.tokenizer_path or model.path, load_tokenizer)
        found.tokenizer, found.processor = loaded or (None, None)
    if model.lora_adapter_path:
        _load(found, f"{key}.lora_adapter_path", model.lora_adapter_path, load_adapter)


def _load(found: Findings, key: str, path: str, load: Callable[[str], Any]) -> Any:
    """What `load` makes of a model folder or hub name; None, with the problem noted, where it cannot."""
    try:
        return load_model_part(key, path, load)
    except ModelError as e:
        found.problems.append(e.problem)
        return None


class ModelError(ValueError):
    """Something cannot be loaded from a model folder (wrong) or by a name of the hub (absent here)."""

    def __init__(self, problem: Problem) -> None:
        super().__init__(problem.message)
        self.problem = problem


def load_model_part(key: str, path: str, load: Callable[[str], Any]) -> Any:
    """What `load` makes of a model folder, or of a name of the hub; `key` is what the ModelError tells to change."""
    local, named = Path(path).expanduser(), f"{key}={path}"
    is_hub_name = not local.exists() and bool(_HUB_NAME.match(path))
    if not local.exists() and not is_hub_name:
        raise ModelError(wrong(key, f"{named}: no such folder. Name a model folder, or a model of the hub."))
    try:
        return load(path if is_hub_name else str(local))
    except Exception as e:  # the readers of a model's files raise almost anything; its text is the finding
        if not is_hub_name:
            raise ModelError(wrong(key, f"{named} cannot be loaded: {one_line(e)}")) from e
        here = f"{named} is neither a folder nor in the cache of the hub"
        raise ModelError(absent(key, f"{here} ({one_line(str(e).strip().partition(chr(10))[0])}).")) from e


def check_plugins(config: DictConfig) -> Iterator[Problem]:
    """Names that the registries of the workers must know, and the user's reward function."""
    from verl.trainer.ppo.reward import get_custom_reward_fn, get_manager_class
    from verl.utils.model import get_model_loader
    from verl.workers.policy import get_policy
    from verl.workers.rollout.base import get_rollout_class

    model, rollout = config.actor_rollout_ref.model, config.actor_rollout_ref.rollout
    checks: dict[str, Callable[[], Any]] = {
        "actor_rollout_ref.model.loader.name": lambda: get_model_loader(model.loader.name),
        "actor_rollout_ref.model.policy.name": lambda: get_policy(model.policy.name, **model.policy.kwargs),
        "actor_rollout_ref.rollout.name": lambda: get_rollout_class(rollout.name, rollout.mode),
        "custom_reward_function.path": lambda: get_custom_reward_fn(config),
        "reward_manager.name": lambda: get_manager_class(config),
    }
    for key, look_up in checks.items():
        try:
            look_up()
        except ImportError as e:
            yield absent(key, f"{key}: a package is missing here: {e}")
        except (ValueError, TypeError, AttributeError, OSError, RuntimeError) as e:
            yield wrong(key, f"{key}: {e}" if key not in str(e) else str(e))


def check_data(config: DictConfig, found: Findings, rows: int = ROWS_CHECKED) -> None:
    """Files, columns and the first `rows` rows of both data sets, read by the data set class of the run."""
    from verl.utils.dataset.builders import create_rl_dataset
    from verl.utils.dataset.rl_dataset import RLHFDataset, get_dataset_class, no_chat_template

    data, parts = config.data, (config.data, found.tokenizer, found.processor)

    def find_class() -> None:
        templated = issubclass(get_dataset_class(data), RLHFDataset)
        if templated and found.tokenizer is not None and not found.tokenizer.chat_template:
            key = "actor_rollout_ref.model.custom_chat_template"
            raise ConfigError([wrong(key, no_chat_template(found.tokenizer))])

    def make(files: list[str], split: str) -> Any:
        return create_rl_dataset(files, *parts, split == "train", data[f"{split}_max_samples"])

    def lacks(row: Mapping[str, Any]) -> str | None:
        lost = [c for c in (data.reward_fn_key, "reward_model") if c not in row]
        mend = ", or set data.reward_fn_key" if data.reward_fn_key in lost else ""
        have = f"no column {', '.join(lost)} (columns: {', '.join(sorted(row))})"
        return f"{have}. Add it when the data is prepared{mend}." if lost else None

    if check_splits(data, found, rows, find_class, make, lacks):
        drawn = "gen_batch_size" if data.gen_batch_size != data.train_batch_size else "train_batch_size"
        check_fills_a_batch(found, data[drawn], "prompts", f"data.{drawn}")


def check_fills_a_batch(found: Findings, batch: Any, what: str, key: str = "data.train_batch_size") -> None:
    """Whether the training data has one batch, of the size that `key` sets, of `what`."""
    count = found.train_prompts
    if count is not None and isinstance(batch, int) and count < batch:
        rule = f"data.train_files has {count} {what}, which do not fill one batch of {batch}."
        problem = wrong(key, f"{rule} Set {key}={count} or less.")
        found.problems.append(problem)


def check_splits(
    data: DictConfig,
    found: Findings,
    rows: int,
    find_class: Callable[[], Any],
    make: Callable[[list[str], str], Any],
    lacks: Callable[[Mapping[str, Any]], str | None],
) -> bool:
    """Files, class and first `rows` rows of data.train_files and data.val_files; False without a usable class.

    `make(files, split)` gives the data set, `lacks(sample)` a sentence about what a sample does not have.
    """
    from verl.utils.dataset.rl_dataset import read_rows

    try:
        find_class()
    except ConfigError as e:
        found.problems += e.problems
        return False
    except (AttributeError, ImportError, OSError, RuntimeError, TypeError, ValueError) as e:
        found.problems.append(wrong("data.custom_cls", f"data.custom_cls: {e}"))
        return False
    for split in ("train", "val"):
        key = f"data.{split}_files"
        files = data[f"{split}_files"]
        files = list(files) if isinstance(files, list | ListConfig) else [files] if files is not None else []
        lost = [f for f in files if not Path(f).expanduser().is_file()]
        if lost:
            found.problems.append(wrong(key, f"{key}: no such file: {', '.join(lost)}. Prepare it, or name another."))
        if lost or not files:
            continue
        try:
            if found.tokenizer is None:  # rows cannot be tokenised, but can be counted
                count = sum(len(read_rows(f)) for f in files)
            else:
                dataset = make(files, split)
                found.datasets[key], count = dataset, len(dataset)
                found.problems += row_problems(dataset, key, rows, lacks)
        except Exception as e:  # a class of the user's may raise anything; its text is the finding
            found.problems.append(wrong(key, f"{key}: {one_line(e)}"))
            continue
        setattr(found, f"{split}_prompts", count)
    return True


def row_problems(
    dataset: Any, key: str, rows: int, lacks: Callable[[Mapping[str, Any]], str | None]
) -> Iterator[Problem]:
    """What is wrong with the first `rows` samples of the data set of `key`; `lacks` as for check_splits."""
    from verl.utils.dataset.rl_dataset import MissingColumn

    broken = 0
    for i in range(min(len(dataset), rows)):
        try:
            row = dataset[i]
        except Exception as e:  # a class of the user's may raise anything; its text is the finding
            broken += 1
            if broken <= ROW_ERRORS_SHOWN:
                yield wrong(key, f"{key}: {one_line(e)}")
            if isinstance(e, MissingColumn):
                return
            continue
        if said := lacks(row):
            yield wrong(key, f"{key}, row {i}: {said}")
            break
    if broken > ROW_ERRORS_SHOWN:
        yield wrong(key, f"{key}: {broken - ROW_ERRORS_SHOWN} further rows have errors like these.")


def check_machine(config: DictConfig) -> Iterator[Problem]:
    """GPUs and packages that the run needs and this machine lacks."""
    yield from check_gpus(config)
    trainer = config.trainer
    backends = [trainer.logger] if isinstance(trainer.logger, str) else list(trainer.logger)
    for backend in sorted(LOGGER_PACKAGES.intersection(backends)):
        if importlib.util.find_spec(backend) is None:
            yield absent("trainer.logger", f"trainer.logger={backend}: not installed here; pip install {backend}")


def check_gpus(config: DictConfig) -> Iterator[Problem]:
    """Ranks of trainer.device=cuda for which this machine has no GPU."""
    import torch

    trainer, wanted = config.trainer, config.trainer.n_gpus_per_node
    if trainer.device == "cuda" and (here := torch.cuda.device_count()) < wanted:  # through NVML: makes no context
        key = "trainer.n_gpus_per_node"
        need = f"{key}={wanted} with trainer.device=cuda: this machine has {here} GPUs"
        yield absent(key, f"{need}. On a machine without GPUs: trainer.device=cpu.")


def check_url(key: str, url: str, timeout: float = 2.0) -> list[Problem]:
    """Absent unless something answers at an HTTP address (any status will do)."""
    shown = redact_text(url)
    try:
        urllib.request.urlopen(url, timeout=timeout).close()
    except HTTPError:
        return []
    except ValueError:
        return [wrong(key, f"{key}={shown} is no address; it reads http://host:port/...")]
    except OSError as e:
        return [absent(key, f"{key}={shown} does not answer from here ({e}).")]
    return []
