"""What a dry run looks at beyond the config itself: data, tokenizer, models, plug-ins, this machine."""

from __future__ import annotations

import importlib.util
import re
import urllib.request
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.error import HTTPError

from omegaconf import DictConfig, ListConfig

from verl.utils.problems import Problem, absent, wrong

ROWS_CHECKED = 20_000
ROW_ERRORS_SHOWN = 5
LOGGER_PACKAGES = {"wandb", "tensorboard", "trackio", "mlflow", "swanlab", "clearml"}
_HUB_NAME = re.compile(r"^[A-Za-z0-9][\w.\-]*(/[\w.\-]+)?$")


@dataclass
class Findings:
    """Facts that the plan is made of (None where unknown), with the problems met on the way."""

    train_prompts: int | None = None
    val_prompts: int | None = None
    tokenizer: Any = None
    hf_config: Any = None
    problems: list[Problem] = field(default_factory=list)


def look_around(config: DictConfig) -> Findings:
    """Every check of this module; one that cannot be made because another failed is left out."""
    found = Findings()
    check_models(config, found)
    check_plugins(config, found)
    check_data(config, found)
    check_machine(config, found)
    return found


def check_models(config: DictConfig, found: Findings) -> None:
    """Tokenizer and config.json of the model; no weights."""
    from transformers import AutoConfig

    from verl.utils.tokenizer import hf_tokenizer

    model = config.actor_rollout_ref.model
    key = "actor_rollout_ref.model"
    trust = {"trust_remote_code": model.trust_remote_code, "local_files_only": True}
    config_key = f"{key}.hf_config_path" if model.hf_config_path else f"{key}.path"
    tokenizer_key = f"{key}.tokenizer_path" if model.tokenizer_path else f"{key}.path"

    def load_config(path: str) -> Any:
        return AutoConfig.from_pretrained(path, **trust, **(model.override_config or {}))

    found.hf_config = _load(found, config_key, model.hf_config_path or model.path, load_config)
    if found.hf_config is not None or tokenizer_key != config_key:
        path = model.tokenizer_path or model.path
        found.tokenizer = _load(found, tokenizer_key, path, lambda p: hf_tokenizer(p, **trust))
    if model.lora_adapter_path:
        _load(found, f"{key}.lora_adapter_path", model.lora_adapter_path, lambda p: p)
    if config.critic.enable or (config.critic.enable is None and config.algorithm.adv_estimator == "gae"):
        _load(found, "critic.model.path", config.critic.model.path, lambda p: AutoConfig.from_pretrained(p, **trust))
    if config.reward_model.enable:
        _load(found, "reward_model.model.path", config.reward_model.model.path, AutoConfig.from_pretrained)


def _load(found: Findings, key: str, path: str, load: Callable[[str], Any]) -> Any:
    """What `load` makes of a local folder; a hub name that is not in the cache is absent here, not wrong."""
    local = Path(path).expanduser()
    is_hub_name = not local.exists() and bool(_HUB_NAME.match(path))
    if not local.exists() and not is_hub_name:
        found.problems.append(wrong(key, f"{key}={path}: no such folder. Name a model folder, or a model of the hub."))
        return None
    try:
        return load(path if is_hub_name else str(local))
    except (OSError, ValueError, KeyError, ImportError) as e:
        reason = str(e).strip().splitlines()[0]
        if is_hub_name:
            found.problems.append(
                absent(key, f"{key}={path} is neither a folder nor in the cache of the hub, which is not asked here.")
            )
        else:
            found.problems.append(wrong(key, f"{key}={path} cannot be loaded: {reason}"))
        return None


def check_plugins(config: DictConfig, found: Findings) -> None:
    """Names that the registries of the workers must know, and the user's reward function."""
    from verl.trainer.ppo.reward import get_custom_reward_fn
    from verl.utils.model import get_model_loader
    from verl.workers.policy import get_policy
    from verl.workers.reward_manager import get_reward_manager_cls
    from verl.workers.rollout.base import get_rollout_class

    model, rollout = config.actor_rollout_ref.model, config.actor_rollout_ref.rollout
    checks: dict[str, Callable[[], Any]] = {
        "actor_rollout_ref.model.loader.name": lambda: get_model_loader(model.loader.name),
        "actor_rollout_ref.model.policy.name": lambda: get_policy(model.policy.name, **model.policy.kwargs),
        "actor_rollout_ref.rollout.name": lambda: get_rollout_class(rollout.name, rollout.mode),
        "custom_reward_function.path": lambda: get_custom_reward_fn(config),
    }
    if config.reward_manager.source == "register":
        checks["reward_manager.name"] = lambda: get_reward_manager_cls(config.reward_manager.name)
    for key, look_up in checks.items():
        try:
            look_up()
        except ImportError as e:
            found.problems.append(absent(key, f"{key}: a package is missing here: {e}"))
        except (ValueError, TypeError, AttributeError, OSError) as e:
            found.problems.append(wrong(key, f"{key}: {e}" if key not in str(e) else str(e)))


def check_data(config: DictConfig, found: Findings) -> None:
    """Files, columns and rows of both data sets, read by the data set class of the run."""
    from verl.utils.dataset.rl_dataset import get_dataset_class, read_rows

    data = config.data
    try:
        dataset_class = get_dataset_class(data)
    except (AttributeError, ImportError, OSError, TypeError, ValueError) as e:
        found.problems.append(wrong("data.custom_cls", f"data.custom_cls: {e}"))
        return
    for split in ("train", "val"):
        key = f"data.{split}_files"
        files = data[key.partition(".")[2]]
        if files is None:
            continue
        files = list(files) if isinstance(files, list | ListConfig) else [files]
        lost = [f for f in files if not Path(f).expanduser().is_file()]
        if lost:
            found.problems.append(wrong(key, f"{key}: no such file: {', '.join(lost)}. Prepare it, or name another."))
            continue
        if found.tokenizer is None:  # rows cannot be tokenised, but can be counted
            try:
                count = sum(len(read_rows(f)) for f in files)
            except ValueError as e:
                found.problems.append(wrong(key, f"{key}: {e}"))
                continue
            setattr(found, f"{split}_prompts", count)
            continue
        limit = data[f"{split}_max_samples"]
        try:
            dataset = dataset_class(files, found.tokenizer, data, max_samples=limit)
        except Exception as e:  # a class of the user's may raise anything; its text is the finding
            found.problems.append(wrong(key, f"{key}: {e}"))
            continue
        setattr(found, f"{split}_prompts", len(dataset))
        found.problems += _row_problems(dataset, key, data)


def _row_problems(dataset: Any, key: str, data: DictConfig) -> list[Problem]:
    found, broken = [], 0
    for i in range(min(len(dataset), ROWS_CHECKED)):
        try:
            row = dataset[i]
        except Exception as e:  # a class of the user's may raise anything; its text is the finding
            broken += 1
            if broken <= ROW_ERRORS_SHOWN:
                found.append(wrong(key, f"{key}: {e}"))
            continue
        lost = [c for c in (data.reward_fn_key, "reward_model") if c not in row]
        if lost:
            columns = ", ".join(sorted(row))
            mend = "Add it when the data is prepared" + (
                ", or set data.reward_fn_key." if data.reward_fn_key in lost else "."
            )
            found.append(wrong(key, f"{key}, row {i}: no column {', '.join(lost)} (columns: {columns}). {mend}"))
            break
    if broken > ROW_ERRORS_SHOWN:
        found.append(wrong(key, f"{key}: {broken - ROW_ERRORS_SHOWN} further rows have errors like these."))
    return found


def check_machine(config: DictConfig, found: Findings) -> None:
    """GPUs, packages and servers that the run needs and this machine lacks."""
    import torch

    trainer = config.trainer
    if trainer.device == "cuda":
        here = torch.cuda.device_count()  # through NVML: makes no context
        if here < trainer.n_gpus_per_node:
            found.problems.append(
                absent(
                    "trainer.n_gpus_per_node",
                    f"trainer.n_gpus_per_node={trainer.n_gpus_per_node} with trainer.device=cuda: this machine has "
                    f"{here} GPUs. On a machine without GPUs: trainer.device=cpu.",
                )
            )
    backends = [trainer.logger] if isinstance(trainer.logger, str) else list(trainer.logger)
    for backend in sorted(LOGGER_PACKAGES.intersection(backends)):
        if importlib.util.find_spec(backend) is None:
            found.problems.append(
                absent("trainer.logger", f"trainer.logger={backend}: not installed here; pip install {backend}")
            )
    if config.actor_rollout_ref.rollout.name == "vllm" and importlib.util.find_spec("vllm") is None:
        key = "actor_rollout_ref.rollout.name"
        found.problems.append(absent(key, f"{key}=vllm: vLLM is not installed here."))
    url = config.reward_model.sandbox_fusion.url
    if url:
        found.problems += check_url("reward_model.sandbox_fusion.url", url)


def check_url(key: str, url: str, timeout: float = 2.0) -> list[Problem]:
    """Absent unless something answers at an HTTP address (any status will do)."""
    from verl.utils.redact import redact_text

    try:
        urllib.request.urlopen(url, timeout=timeout).close()
    except HTTPError:
        return []
    except ValueError:
        return [wrong(key, f"{key}={redact_text(url)} is no address; it reads http://host:port/...")]
    except OSError as e:
        return [absent(key, f"{key}={redact_text(url)} does not answer from here ({e}).")]
    return []
