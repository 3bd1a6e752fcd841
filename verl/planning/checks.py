"""Checks of what a run needs beyond its config: data, tokenizer, model, packages, this machine."""

import importlib.util
import json
import os
import re
import shutil
import urllib.request
from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass, field
from http.client import HTTPException, InvalidURL
from pathlib import Path
from typing import Any
from urllib.error import HTTPError

from verl.config.base import BaseConfig
from verl.config.common import RunConfig
from verl.config.compose import select
from verl.config.data import DataConfig
from verl.config.offline import GenerationTrainerConfig
from verl.config.sft import SFTDataConfig
from verl.utils.fs import check_writable, copy_to_local, is_non_local
from verl.utils.problems import ABSENT, SHARE_NAMED, UNUSED, WRONG, ConfigError, Problem, absent, one_line, wrong
from verl.utils.redact import redact_text
from verl.utils.weight_files import safetensors_of, tensor_shapes, untie_by_weights

ROWS_CHECKED = 20_000
ROWS_AT_START = 200  # of each data set: a run reads the others soon enough
ROW_ERRORS_SHOWN = FILES_SHOWN = 5
LOGGER_PACKAGES = {name: name for name in ("tensorboard", "trackio", "mlflow", "swanlab", "clearml")}
LOGGER_PACKAGES["vemlp_wandb"] = "volcengine_ml_platform"
_HUB_NAME = re.compile(r"^[A-Za-z0-9][\w.\-]*(/[\w.\-]+)?$")


@dataclass
class Findings:
    """What the checks learned for the plan (None where unknown), and the problems."""

    to_start: bool = False  # a run, not a plan: the hub may be asked, and weights must exist
    tokenizer: Any = None
    processor: Any = None
    hf_config: Any = None
    datasets: dict[str, Any] = field(default_factory=dict)  # data.train_files, data.val_files -> its data set
    tools: dict[str, str] = field(default_factory=dict)  # name -> the answer to its example call
    agent_loops: set[str] = field(default_factory=set)  # names of those that the rows have
    train_prompts: int | None = None
    val_prompts: int | None = None
    problems: list[Problem] = field(default_factory=list)


def check_models(
    model: Any, findings: Findings, key: str = "actor_rollout_ref.model",
    path_key: str = "actor_rollout_ref.model.path", trust_tokenizer: bool | None = None,
    template_key: str | None = None,
) -> None:  # fmt: skip
    """Load tokenizer, processor and config.json of the model, and check that the weight files are complete.

    `model` has HFModelConfig's settings, under `key`; `path_key` and `template_key` (None: under `key`) are the keys of
    its path and its custom_chat_template. `trust_tokenizer` replaces its trust_remote_code for the tokenizer.
    """
    from transformers import AutoConfig

    from verl.utils.tokenizer import hf_processor, hf_tokenizer, use_chat_template

    trust = {"trust_remote_code": model.trust_remote_code, "local_files_only": not findings.to_start}
    tokenizer_key = f"{key}.tokenizer_path" if model.tokenizer_path else path_key

    def load_config(path: str) -> Any:
        files = safetensors_of(path)
        tensor_shapes(files)
        if findings.to_start and Path(path).is_dir() and not files and not any(Path(path).glob("*.bin")):
            raise FileNotFoundError("the folder holds no weights (*.safetensors, *.bin)")
        config = AutoConfig.from_pretrained(path, **trust, **(model.override_config or {}))
        untie_by_weights(config, path)
        return config

    def load_tokenizer(path: str) -> tuple[Any, Any]:
        trusted = trust if trust_tokenizer is None else trust | {"trust_remote_code": trust_tokenizer}
        return hf_tokenizer(path, **trusted), hf_processor(path, **trusted)

    def load_adapter(path: str) -> None:
        if (folder := Path(path)).is_dir():  # else a name of the hub
            json.loads((folder / "adapter_config.json").read_text(encoding="utf-8"))
            tensor_shapes(safetensors_of(folder) or [folder / "adapter_model.safetensors"])

    findings.hf_config = _load(findings, path_key, model.path, load_config)
    if findings.hf_config is not None or model.tokenizer_path:
        loaded = _load(findings, tokenizer_key, model.tokenizer_path or model.path, load_tokenizer)
        findings.tokenizer, findings.processor = loaded or (None, None)
    if findings.tokenizer is not None:
        try:
            use_chat_template(findings.tokenizer, model.custom_chat_template)
        except OSError as e:
            where = template_key or f"{key}.custom_chat_template"
            text = f"{where}={model.custom_chat_template} cannot be read: {e.strerror}. Name another file."
            findings.problems.append(wrong(where, text))
            findings.tokenizer = findings.processor = None  # rows cannot be checked with another template
    if model.lora_adapter_path:
        _load(findings, f"{key}.lora_adapter_path", model.lora_adapter_path, load_adapter)


def check_length(rollout: Any, findings: Findings, key: str) -> Iterator[Problem]:
    """A limit of tokens above the positions that the model has learned to read, or too low for prompt and answer.

    `rollout` has RolloutConfig's settings, under `key`.
    """
    model = findings.hf_config and findings.hf_config.get_text_config()
    positions = getattr(model, "max_position_embeddings", None)
    scaled = (getattr(model, "rope_parameters", None) or {}).get("factor", 1) != 1  # RoPE is scaled to more positions
    most = float("inf") if positions is None or scaled else positions
    lengths = f"{key}.prompt_length + {key}.response_length"
    if key == "actor_rollout_ref.rollout":  # these follow data
        lengths = "data.max_prompt_length + data.max_response_length"
    wanted = rollout.prompt_length + rollout.response_length
    tokens = rollout.max_model_len or wanted
    if rollout.name in ("vllm", "sglang") and tokens > most:
        what = f"{key}.max_model_len" if rollout.max_model_len else lengths
        text = f"{what} is {tokens} tokens, but the model has {most} positions. Lower {what} to {most} or less."
        yield wrong(f"{key}.max_model_len", text)
    if rollout.name in ("vllm", "sglang") and tokens < wanted:
        least = max(0, tokens - rollout.response_length)
        rule = f"{key}.max_model_len={tokens} is less than {lengths} = {wanted}"
        how = "Raise it" if wanted <= most else f"Lower {lengths}"
        text = f"{rule}: answers to prompts of more than {least} tokens are cut before response_length. {how}."
        yield Problem(UNUSED, f"{key}.max_model_len", text)


def check_tensor_parallel(settings: BaseConfig, findings: Findings, key: str) -> Iterator[Problem]:
    """Whether as many ranks as `key` sets can split the layers of the model."""
    from verl.training.parallel.tensor_parallel import refusal

    size = select(settings, key)
    if size > 1 and findings.hf_config is not None and (reason := refusal(findings.hf_config, size)):
        yield wrong(key, f"{key}={size}: {reason}")


def check_liger(settings: BaseConfig, key: str, *size_keys: str) -> Iterator[Problem]:
    """What use_liger of the model under `key` needs: GPUs, the package, and whole layers (`size_keys`: its ranks)."""
    key = f"{key}.use_liger"
    if not select(settings, key):
        return
    if settings.trainer.device == "cpu":
        yield wrong(key, f"{key}=true needs GPUs for its kernels, and trainer.device=cpu. Set it to false.")
    elif split := next((name for name in size_keys if select(settings, name) > 1), None):
        size = select(settings, split)
        yield wrong(key, f"{key}=true does not work with {split}={size}: its kernels take whole layers. Disable it.")
    elif importlib.util.find_spec("liger_kernel") is None:
        yield absent(key, f"{key}=true: the package liger-kernel is not installed here; pip install -e .[liger]")


def _load(findings: Findings, key: str, path: str, load: Callable[[str], Any]) -> Any:
    """The result of `load` for a model folder or hub name; None if it fails, which is added to the problems."""
    try:
        return load_model_part(key, path, load)
    except ModelError as e:
        findings.problems.append(e.problem)
        return None


class ModelError(ValueError):
    """Something cannot be loaded from a model folder (wrong) or by a name of the hub (absent here)."""

    def __init__(self, problem: Problem) -> None:
        super().__init__(problem.message)
        self.problem = problem


def load_model_part(key: str, path: str, load: Callable[[str], Any]) -> Any:
    """The result of `load` for a model folder or a name of the hub; raises ModelError, which names `key`."""
    local, named = Path(path).expanduser(), f"{key}={path}"
    is_hub_name = not local.exists() and bool(_HUB_NAME.match(path))
    if not local.exists() and not is_hub_name:
        raise ModelError(wrong(key, f"{named}: the folder does not exist. Name a model folder, or a model of the hub."))
    try:
        return load(path if is_hub_name else str(local))
    except Exception as e:  # the readers of a model's files raise almost anything; its text is the problem
        if not is_hub_name:
            raise ModelError(wrong(key, f"{named} cannot be loaded: {one_line(e)}")) from e
        here = f"{named} is neither a folder nor in the cache of the hub"
        raise ModelError(absent(key, f"{here} ({one_line(str(e).strip().partition(chr(10))[0])}).")) from e


def check_fills_a_batch(findings: Findings, what: str, sizes: Mapping[str, Any]) -> None:
    """Add a problem if the training data does not fill a batch of `what`; `sizes` by key, that of the batch first."""
    key, count = next(iter(sizes)), findings.train_prompts
    batch = sizes[key]
    if count is not None and isinstance(batch, int) and count < batch:
        rule = f"data.train_files has {count} {what}, which do not fill one batch of {batch}."
        lower = [f"{name}={count}" for name, size in sizes.items() if isinstance(size, int) and size > count]
        fix = f"Set {' and '.join(lower)} or less" if count else "Add some, or set data.train_max_samples=-1 if it is 0"
        findings.problems.append(wrong(key, f"{rule} {fix}."))


def check_splits(
    data: DataConfig | SFTDataConfig, findings: Findings, rows: int, find_class: Callable[[], Any],
    make: Callable[[list[str], str], Any], lacks: Callable[[Mapping[str, Any]], str | None],
    learns: Callable[[Mapping[str, Any]], bool] | None = None,
) -> None:  # fmt: skip
    """Add to `findings` the data sets of data.train_files and data.val_files, their sizes, and what is wrong with them.

    The first `rows` rows of each are read; none if `find_class` raises, since there is no usable class.
    `make(files, split)` returns the data set; `lacks` and `learns` as for row_problems.
    """
    from verl.data.rl_dataset import read_rows

    try:
        find_class()
    except ConfigError as e:
        findings.problems += e.problems
        return
    except (AttributeError, ImportError, OSError, RuntimeError, TypeError, ValueError) as e:
        findings.problems.append(wrong("data.custom_cls", f"data.custom_cls: {e}"))
        return
    from_environment = isinstance(data, DataConfig) and data.environment.name is not None
    for split in ("train", "val"):
        key = f"data.{split}_files"
        files = data[f"{split}_files"]
        if not isinstance(files, list):
            files = [] if files is None else [files]
        missing = [f for f in files if not (from_environment or is_non_local(f) or Path(f).expanduser().is_file())]
        if missing:
            rule = f"{key}: the file does not exist: {', '.join(missing)}."
            findings.problems.append(wrong(key, f"{rule} Prepare it, or name another."))
        if missing or not (files or from_environment):
            continue
        try:
            if findings.tokenizer is None:  # rows cannot be tokenized, but counted
                if from_environment:
                    continue
                count = sum(len(read_rows(copy_to_local(f))) for f in files)
                unchecked = f"{key}: columns and rows are not checked until the tokenizer loads."
                findings.problems.append(absent(key, unchecked))
            else:
                dataset = make(files, split)
                findings.datasets[key] = dataset
                count = len(dataset)
                findings.problems += row_problems(dataset, key, rows, lacks, learns)
        except Exception as e:  # a user's class may raise anything; its text is the problem
            text = f": {one_line(e)}"
            if not any(problem.message.endswith(text) for problem in findings.problems):  # of both splits alike
                findings.problems.append(wrong(key, f"{key}{text}"))
            continue
        setattr(findings, f"{split}_prompts", count)


def row_problems(
    dataset: Any, key: str, rows: int, lacks: Callable[[Mapping[str, Any]], str | None],
    learns: Callable[[Mapping[str, Any]], bool] | None = None,
) -> Iterator[Problem]:  # fmt: skip
    """Problems of the first `rows` samples of the data set of `key`, and of the first sample of each file.

    `lacks(sample)` is a message about what a sample lacks, or None; `learns(sample)` whether it has a learned token. A
    data set without one is wrong, and read to its end to know that; samples without one are warnings, as are those that
    were cut or filtered.
    """
    from verl.data.rl_dataset import MissingColumn

    origins = getattr(dataset, "origins", None)  # (file, row) of each sample; a user's class may have none
    firsts: dict[str, int] = {}
    for i, (file, _) in enumerate(origins or ()):
        firsts.setdefault(file, i)
    checked = dict.fromkeys([*range(min(len(dataset), rows)), *firsts.values()])
    broken, empty = 0, []  # how many samples raise, and which have no learned token
    for i in checked:
        try:
            row = dataset[i]
        except Exception as e:  # a user's class may raise anything; its text is the problem
            broken += 1
            if broken <= ROW_ERRORS_SHOWN:
                yield wrong(key, f"{key}: {one_line(e)}")
            if isinstance(e, MissingColumn):
                return
            continue
        if message := lacks(row):
            place = f"{key}, row {i}" if origins is None else "{}: {}, row {}".format(key, *origins[i])
            yield wrong(key, f"{place}: {message}")
            return
        if learns is not None and not learns(row):
            empty.append(i)
    if broken > ROW_ERRORS_SHOWN:
        yield wrong(key, f"{key}: {broken - ROW_ERRORS_SHOWN} further rows have errors like these.")
    if broken:
        return
    unread = (i for i in range(len(dataset)) if i not in checked)
    if empty and len(empty) == len(checked) and not any(learns(dataset[i]) for i in unread):
        rule = f"{key}: none of its {len(dataset)} rows has a learned token within data.max_length"
        other = "" if getattr(dataset, "truncation", None) == "left" else ", or set data.truncation=left"
        yield wrong(key, f"{rule}: nothing can be learned. Raise data.max_length{other}.")
        return
    yield from _lost_rows(dataset, key, checked, empty)


def _lost_rows(dataset: Any, key: str, checked: Collection[int], empty: list[int]) -> Iterator[Problem]:
    """Warnings of the `checked` rows that train nothing (`empty`) or are cut, and of those that were filtered out."""
    if empty:
        what = f"have no learned token within data.max_length and train nothing: {_places(dataset, checked, empty)}"
        yield Problem(UNUSED, key, f"{key}: rows {what}. Raise data.max_length, or drop these rows.")
    if cut := sorted(set(getattr(dataset, "cut_rows", ())).intersection(checked) - set(empty)):
        how, limit = f"cut by data.truncation={dataset.truncation}", getattr(dataset, "length_key", "data.max_length")
        yield Problem(UNUSED, key, f"{key}: rows are {how}: {_places(dataset, checked, cut)}. Raise {limit}.")
    dropped = getattr(dataset, "dropped_overlong", 0)
    if dropped > SHARE_NAMED * (dropped + len(dataset)):
        what = f"{dropped} of {dropped + len(dataset)} rows are left out (data.filter_overlong_prompts)"
        yield Problem(UNUSED, key, f"{key}: {what}: they are longer than data.max_prompt_length.")


def _places(dataset: Any, checked: Collection[int], found: list[int]) -> str:
    """How many of the checked rows were found in each file, and the first of them."""
    origins = getattr(dataset, "origins", None) or [("the data set", i) for i in range(len(dataset))]
    per_file = Counter(origins[i][0] for i in checked)
    rows: dict[str, list[int]] = defaultdict(list)
    for i in found:
        rows[origins[i][0]].append(origins[i][1])
    part = "" if len(checked) == len(dataset) else " checked ones"
    texts = [f"{file}: {len(own)} of {per_file[file]}{part}, the first is row {own[0]}" for file, own in rows.items()]
    more = f"; and in {len(texts) - FILES_SHOWN} further files" if len(texts) > FILES_SHOWN else ""
    return "; ".join(texts[:FILES_SHOWN]) + more


def check_machine(trainer: RunConfig) -> Iterator[Problem]:
    """What the run needs and this machine lacks: GPUs, packages, folders to write to, further nodes."""
    yield from check_gpus(trainer)
    yield from check_outputs(trainer)
    if trainer.nnodes > 1 and trainer.device == "cuda" and not os.environ.get("RAY_ADDRESS"):
        text = f"trainer.nnodes={trainer.nnodes}: this command alone starts one node. Start the others too"
        yield absent("trainer.nnodes", f"{text} (ray start and RAY_ADDRESS for RL, torchrun --nnodes for SFT).")


def check_outputs(trainer: RunConfig) -> Iterator[Problem]:
    """Folders and trackers that cannot be written to, unknown trackers, and packages and commands that are missing."""
    from verl.utils.tracking import BACKENDS, written_by

    yield from check_written("trainer.default_local_dir", trainer.default_local_dir)
    yield from check_written("trainer.default_hdfs_dir", trainer.default_hdfs_dir)
    key, remote = "trainer.default_hdfs_dir", trainer.default_hdfs_dir
    if remote is not None and is_non_local(remote) and shutil.which("hdfs") is None:
        yield absent(key, f"{key}={remote}: the `hdfs` command is not on PATH. Install it, or name a mounted folder.")
    for backend in [trainer.logger] if isinstance(trainer.logger, str) else trainer.logger:
        try:
            BACKENDS.find(backend)
        except ValueError as e:
            yield wrong("trainer.logger", str(e))
            continue
        package = LOGGER_PACKAGES.get(backend)  # none for wandb: the console replaces it
        if package is not None and importlib.util.find_spec(package) is None:
            yield absent("trainer.logger", f"trainer.logger={backend}: not installed here; pip install {package}")
        if written := written_by(backend, trainer.project_name, trainer.experiment_name):
            variable = {"file": "VERL_FILE_LOGGER_PATH", "tensorboard": "TENSORBOARD_DIR"}[backend]
            yield from check_written(f"trainer.logger={backend} (${variable})", *written)


def check_written(key: str, path: str | os.PathLike | None, is_folder: bool = True) -> Iterator[Problem]:
    """A local folder or file that cannot be written: wrong where something of another kind has the name, else absent.

    None and paths of other storage are not checked. `key` names the path, as a key or as key=value.
    """
    if path is None or is_non_local(path):
        return
    try:
        check_writable(path, is_folder)
    except OSError as e:
        kind = WRONG if isinstance(e, IsADirectoryError | NotADirectoryError) else ABSENT
        text = f"{key}: {path} cannot be written: {e}. Name another {'folder' if is_folder else 'file'}."
        yield Problem(kind, key.partition("=")[0], text)


def check_gpus(trainer: RunConfig | GenerationTrainerConfig) -> Iterator[Problem]:
    """Ranks of trainer.device=cuda for which this machine has no GPU."""
    import torch

    wanted = trainer.n_gpus_per_node
    if trainer.device == "cuda" and (here := torch.cuda.device_count()) < wanted:  # through NVML: makes no context
        key = "trainer.n_gpus_per_node"
        need = f"{key}={wanted} with trainer.device=cuda: this machine has {here} GPUs"
        yield absent(key, f"{need}. On a machine without GPUs: trainer.device=cpu.")


def check_url(key: str, url: str, timeout: float = 2.0) -> list[Problem]:
    """The problem that nothing answers at an HTTP address (any status will do), or that it is not an address."""
    shown = redact_text(url)
    try:
        urllib.request.urlopen(url, timeout=timeout).close()
    except HTTPError:
        return []
    except (ValueError, InvalidURL):
        return [wrong(key, f"{key}={shown} is not an address; expected http://host:port/...")]
    except (OSError, HTTPException) as e:
        return [absent(key, f"{key}={shown} does not answer from here ({e}).")]
    return []
