"""Tells models apart by all of their weights and by what of their config shapes a forward."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Iterator, Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from transformers import PretrainedConfig, PreTrainedModel
from transformers.utils import CONFIG_NAME, cached_file

from verl.utils.weight_files import safetensors_of

# Of a config: what changes no hidden state, or follows from how the model was loaded. *_token_id(s) and _* neither.
_WITHOUT_EFFECT = frozenset(
    "architectures chunk_size_feed_forward dtype id2label initializer_range label2id output_attentions "
    "output_hidden_states problem_type return_dict torch_dtype transformers_version use_cache".split()
)


def model_folder(path: str) -> Path | None:
    """The folder of a model named by a path or by a name of the hub that is in its cache; None where there is none."""
    if not path:
        return None
    if (folder := Path(path).expanduser()).is_dir():
        return folder
    try:
        return Path(cached_file(path, CONFIG_NAME, local_files_only=True)).parent
    except OSError:  # neither: whoever loads it says so
        return None


def folder_fingerprint(folder: str | Path, hf_config: PretrainedConfig) -> str | None:
    """Hash of every byte of the weights in a model folder, the language-model head's too, and of `hf_config`.

    The same however they are sharded and in whatever dtype they are loaded. None where the folder holds no weights.
    """
    if safetensors := _safetensors(Path(folder)):
        return _hash(hf_config, _stored(safetensors))
    digest, pickles = _begun(hf_config), sorted(Path(folder).glob("*.bin"))
    for file in pickles:
        with open(file, "rb") as opened:
            digest.update(hashlib.file_digest(opened, "sha256").digest())
    return digest.hexdigest()[:32] if pickles else None


def model_fingerprint(model: PreTrainedModel, just_loaded: bool = False) -> str:
    """`folder_fingerprint` of the folder that a loaded model came from; of its weights where these are others.

    `just_loaded`: they are the folder's and need no comparison.
    """
    folder = model_folder(model.name_or_path)
    if folder is not None and (just_loaded or _holds(folder, model)):
        if found := folder_fingerprint(folder, model.config):
            return found
    return _hash(model.config, sorted(model.named_parameters()))


def architecture(hf_config: PretrainedConfig) -> dict[str, Any]:
    """What of a config shapes a forward over text, and is not its class's default: no names, versions, dtypes."""
    text = hf_config.get_text_config()
    defaults = {} if text.has_no_defaults_at_init else type(text)().to_dict()
    return {"model_type": text.model_type, **_telling(text.to_dict(), defaults)}


def _telling(values: Mapping[str, Any], defaults: Mapping[str, Any]) -> dict[str, Any]:
    told = {}
    for key, value in values.items():
        if key in _WITHOUT_EFFECT or key.startswith("_") or key.endswith(("_token_id", "_token_ids")):
            continue
        default = defaults.get(key)
        if isinstance(value, dict):
            value, default = _telling(value, default if isinstance(default, dict) else {}), {}
        if value != default:
            told[key] = value
    return told


def _begun(hf_config: PretrainedConfig) -> Any:
    return hashlib.sha256(json.dumps(architecture(hf_config), sort_keys=True, default=str).encode())


def _hash(hf_config: PretrainedConfig, weights: Iterable[tuple[str, torch.Tensor]]) -> str:
    digest = _begun(hf_config)
    for name, weight in weights:
        digest.update(f"{name} {weight.dtype} {tuple(weight.shape)}".encode())
        digest.update(weight.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy())
    return digest.hexdigest()[:32]


def _safetensors(folder: Path) -> list[Path]:
    """The model's own: something else, such as a scorer's head, may lie beside them."""
    whole = folder / "model.safetensors"
    return [whole] if whole.is_file() else safetensors_of(folder)


def _stored(files: Iterable[Path]) -> Iterator[tuple[str, torch.Tensor]]:
    """Name and weight in the order of the names, mapped from the files: one at a time is read."""
    with ExitStack() as stack:
        held = {}
        for file in files:
            opened = stack.enter_context(safe_open(file, "pt"))
            held.update(dict.fromkeys(opened.keys(), opened))
        for name in sorted(held):
            yield name, held[name].get_tensor(name)


def _holds(folder: Path, model: PreTrainedModel) -> bool:
    """Whether a loaded model has the folder's weights, in its own dtype; those that it renamed are not compared."""
    prefix = f"{model.base_model_prefix}."
    loaded = {name.removeprefix(prefix): p.detach() for name, p in model.named_parameters()}
    for name, stored in _stored(_safetensors(folder)):
        mine = loaded.get(name.removeprefix(prefix))
        if mine is None:
            continue
        if mine.shape != stored.shape or not torch.equal(stored.to(mine.device, mine.dtype), mine):
            return False
    return True
