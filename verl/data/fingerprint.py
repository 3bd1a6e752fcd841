"""Hashes that identify models and data files: at a resume, in caches, and where saved parts are combined."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Any

from verl.utils.weight_files import WeightFileError, safetensors_of

if TYPE_CHECKING:
    import torch
    from transformers import PretrainedConfig, PreTrainedModel

DATA_SAMPLE_BYTES = 1 << 20
WEIGHT_SAMPLES, WEIGHT_SAMPLE_BYTES = 32, 1 << 18
# Config keys without effect on hidden states, or set by how the model was loaded; *_token_id(s) and _* are ignored too.
_IGNORED_KEYS = frozenset(
    "architectures chunk_size_feed_forward dtype id2label initializer_range label2id output_attentions "
    "output_hidden_states problem_type return_dict torch_dtype transformers_version use_cache".split()
)


def data_fingerprint(files: str | Sequence[str], rows: int) -> dict[str, Any]:
    """Size and hash of the first and last MiB of each local file, and the number of rows of the data set."""
    prints = []
    for name in [files] if isinstance(files, str) else files:
        path, size, sha256 = os.path.expanduser(name), None, None
        if os.path.isfile(path):
            size = os.path.getsize(path)
            with open(path, "rb") as f:
                digest = hashlib.sha256(f.read(DATA_SAMPLE_BYTES))
                f.seek(max(0, size - DATA_SAMPLE_BYTES))
                digest.update(f.read())
            sha256 = digest.hexdigest()
        prints.append({"name": os.path.basename(name), "bytes": size, "sha256": sha256})
    return {"files": prints, "rows": rows}


def model_dir_fingerprint(directory: str | Path) -> str:
    """Fast hash of a model directory: its configs, and size with samples of each weight file (8 MiB a file).

    Distinguishes trained versions of a model, but not every edit of single weights: see `folder_fingerprint`. Raises
    WeightFileError where the directory has no weight files.
    """
    directory = Path(directory).expanduser()
    weights, configs = (".safetensors", ".bin"), ("config.json", "generation_config.json")
    files = sorted(f for f in directory.glob("*") if f.suffix in weights or f.name in configs)
    if not any(f.suffix in weights for f in files):
        raise WeightFileError(
            f"{directory} holds no weight file (*.safetensors, *.bin): name a Hugging Face model directory."
        )
    digest = hashlib.sha256()
    for file in files:
        size = file.stat().st_size
        digest.update(f"{file.name}:{size};".encode())
        with open(file, "rb") as f:
            if size <= WEIGHT_SAMPLES * WEIGHT_SAMPLE_BYTES:
                digest.update(f.read())
                continue
            for i in range(WEIGHT_SAMPLES):
                f.seek((size - WEIGHT_SAMPLE_BYTES) * i // (WEIGHT_SAMPLES - 1))
                digest.update(f.read(WEIGHT_SAMPLE_BYTES))
    return digest.hexdigest()[:32]


def model_folder(path: str) -> Path | None:
    """The folder of a model given by a path or by a hub name in the local cache; None where there is none."""
    from transformers.utils import CONFIG_NAME, cached_file

    if not path:
        return None
    if (folder := Path(path).expanduser()).is_dir():
        return folder
    try:
        return Path(cached_file(path, CONFIG_NAME, local_files_only=True)).parent
    except OSError:  # whoever loads the model reports the error
        return None


def folder_fingerprint(folder: str | Path, hf_config: PretrainedConfig) -> str | None:
    """Hash of every byte of the weights in a model folder, the language-model head's too, and of `hf_config`.

    Independent of sharding and of the dtype the model is loaded in. None where the folder holds no weights.
    """
    if files := _model_files(Path(folder)):
        return _hash(hf_config, _stored_weights(files))
    digest, pickles = _config_digest(hf_config), sorted(Path(folder).glob("*.bin"))
    for file in pickles:
        with open(file, "rb") as opened:
            digest.update(hashlib.file_digest(opened, "sha256").digest())
    return digest.hexdigest()[:32] if pickles else None


def cached_folder_fingerprint(folder: str | Path) -> str | None:
    """`folder_fingerprint` with the folder's own config; it stays in the user's cache while the files stay the same.

    Files count as the same while their names, sizes and times of change do: for checks at each start of a server.
    """
    from transformers import AutoConfig

    folder = Path(folder).expanduser().resolve()
    files = sorted([*folder.glob("*.safetensors"), *folder.glob("*.bin"), folder / "config.json"])
    state = [(file.name, (known := file.stat()).st_size, known.st_mtime_ns, known.st_ctime_ns) for file in files]
    key = hashlib.sha256(json.dumps([str(folder), state]).encode()).hexdigest()
    cache = Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "verl" / "fingerprints" / key
    if cache.is_file():
        return cache.read_text()
    if fingerprint := folder_fingerprint(folder, AutoConfig.from_pretrained(folder)):
        cache.parent.mkdir(parents=True, exist_ok=True)
        unfinished = cache.with_suffix(f".{os.getpid()}")
        unfinished.write_text(fingerprint)
        unfinished.replace(cache)
    return fingerprint


def model_fingerprint(model: PreTrainedModel, just_loaded: bool = False) -> str:
    """`folder_fingerprint` of the folder a model was loaded from; of its own weights where these differ from it.

    `just_loaded`: the weights are the folder's, no comparison is needed.
    """
    folder = model_folder(model.name_or_path)
    same = folder is not None and (just_loaded or _has_weights_of(folder, model))
    if same and (fingerprint := folder_fingerprint(folder, model.config)):
        return fingerprint
    return _hash(model.config, sorted(model.named_parameters()))


def architecture(hf_config: PretrainedConfig) -> dict[str, Any]:
    """The config entries that affect a forward over text and differ from their class's defaults."""
    text = hf_config.get_text_config()
    defaults = {} if text.has_no_defaults_at_init else type(text)().to_dict()
    return {"model_type": text.model_type, **_effective(text.to_dict(), defaults)}


def _effective(values: Mapping[str, Any], defaults: Mapping[str, Any]) -> dict[str, Any]:
    kept = {}
    for key, value in values.items():
        if key in _IGNORED_KEYS or key.startswith("_") or key.endswith(("_token_id", "_token_ids")):
            continue
        default = defaults.get(key)
        if isinstance(value, dict):
            value, default = _effective(value, default if isinstance(default, dict) else {}), {}
        if value != default:
            kept[key] = value
    return kept


def _config_digest(hf_config: PretrainedConfig) -> Any:
    return hashlib.sha256(json.dumps(architecture(hf_config), sort_keys=True, default=str).encode())


def _hash(hf_config: PretrainedConfig, weights: Iterable[tuple[str, torch.Tensor]]) -> str:
    import torch

    digest = _config_digest(hf_config)
    for name, weight in weights:
        digest.update(f"{name} {weight.dtype} {tuple(weight.shape)}".encode())
        digest.update(weight.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy())
    return digest.hexdigest()[:32]


def _model_files(folder: Path) -> list[Path]:
    """The model's own safetensors files: others, such as a scorer's head, may be in the same folder."""
    single = folder / "model.safetensors"
    return [single] if single.is_file() else safetensors_of(folder)


def _stored_weights(files: Iterable[Path]) -> Iterator[tuple[str, torch.Tensor]]:
    """(name, weight) sorted by name; memory-mapped, one weight is read at a time."""
    from safetensors import safe_open

    with ExitStack() as stack:
        holders = {}
        for file in files:
            opened = stack.enter_context(safe_open(file, "pt"))
            holders.update(dict.fromkeys(opened.keys(), opened))
        for name in sorted(holders):
            yield name, holders[name].get_tensor(name)


def _has_weights_of(folder: Path, model: PreTrainedModel) -> bool:
    """Whether a loaded model has the folder's weights, in its own dtype; weights it renamed are not compared."""
    import torch

    files = _model_files(folder)
    prefix = f"{model.base_model_prefix}."
    loaded = {name.removeprefix(prefix): p.detach() for name, p in model.named_parameters()}
    for name, stored in _stored_weights(files):
        tensor = loaded.get(name.removeprefix(prefix))
        if tensor is not None and not torch.equal(stored.to(tensor.device, tensor.dtype), tensor):
            return False
    return bool(files)  # without any, the weights are in another format than safetensors
