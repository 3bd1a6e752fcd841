"""The trained part of a scorer in a folder: whether it fits a model, and reading it into one."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from loguru import logger
from safetensors.torch import load_file
from torch import nn
from transformers import AutoConfig, AutoModel, PretrainedConfig

from recipe.spd.heads import make_head
from recipe.spd.scoring_config import CONFIG_FILE, ScoringModelConfig
from verl.utils.fingerprint import architecture
from verl.utils.weight_files import WeightFileError, safetensors_of, tensor_shapes

HEAD_FILE = "score_head.safetensors"
ADAPTER_DIR = "adapter"
ADAPTER_FILE = "adapter_model.safetensors"
BACKBONE_DIR = "backbone"
CHECKPOINT_ADAPTERS = "lora_adapter"  # the folder beside a checkpoint's merged export

# What must be alike for saved weights to mean the same -> the key of the training's config.
_KIND = {
    "backbone": "spd.backbone", "attention": "spd.attention", "context_tokens": "spd.context_tokens",
    "head_inputs": "spd.head_inputs", "lora_rank": "actor_rollout_ref.model.lora_rank",
    "lora_alpha": "actor_rollout_ref.model.lora_alpha",
}  # fmt: skip

Shapes = dict[str, tuple[int, ...]]


def check_trained(directory: Path, config: ScoringModelConfig, backbone: nn.Module | None) -> ScoringModelConfig:
    """The config of the scorer saved in `directory`; an OSError or ValueError unless it fits into one of `config`.

    Reads the heads of the files, no weights. `backbone`: the model underneath an `own` scorer, its adapters on it; it
    may be on the meta device. With an empty base_fingerprint on either side only shapes tell a foreign model.
    """
    saved = ScoringModelConfig.load(directory)
    _check_kind(directory, saved, config)
    _check_base(directory, saved, config)
    _check_head(directory, saved, config)
    if saved.backbone == "own" and saved.lora_rank:
        _check_adapters(directory, saved, config, backbone)
    elif saved.backbone == "own":
        _check_whole(directory, config, backbone)
    return saved


def load_trained(directory: Path, config: ScoringModelConfig, head: nn.Module, backbone: nn.Module) -> None:
    """Read what `directory` holds into head and backbone; refuses what `check_trained` refuses."""
    saved = check_trained(directory, config, backbone)
    head.load_state_dict(load_file(directory / HEAD_FILE))
    if saved.backbone == "own" and saved.lora_rank:
        from peft import set_peft_model_state_dict

        set_peft_model_state_dict(backbone, load_file(_adapter_file(directory)))
    elif saved.backbone == "own":
        _load_whole(directory / BACKBONE_DIR, backbone)


def with_adapters(backbone: nn.Module, config: ScoringModelConfig) -> nn.Module:
    """The backbone under fresh LoRA adapters where config.lora_rank asks for them."""
    if not config.lora_rank:
        return backbone
    from peft import LoraConfig, get_peft_model

    modules = config.lora_target_modules
    lora = LoraConfig(r=config.lora_rank, lora_alpha=config.lora_alpha, target_modules=modules, bias="none")
    return get_peft_model(backbone, lora)


def described_backbone(hf_config: PretrainedConfig, config: ScoringModelConfig, trust_remote_code: bool) -> nn.Module:
    """An `own` scorer's backbone without weights, for `check_trained`."""
    with torch.device("meta"):
        return with_adapters(AutoModel.from_config(hf_config, trust_remote_code=trust_remote_code), config)


def _check_kind(directory: Path, saved: ScoringModelConfig, config: ScoringModelConfig) -> None:
    names = [n for n in _KIND if n != "lora_alpha" or (saved.lora_rank and config.lora_rank)]
    odd = [name for name in names if getattr(saved, name) != getattr(config, name)]
    if not odd:
        return
    held, wanted = (", ".join(f"{name}={getattr(c, name)!r}" for name in odd) for c in (saved, config))
    mend = f"Set {', '.join(f'{_KIND[name]}={getattr(saved, name)}' for name in odd)}"
    adapters = directory.parent / CHECKPOINT_ADAPTERS
    if odd == ["lora_rank"] and not saved.lora_rank and (adapters / CONFIG_FILE).is_file():
        mend = f"Name {adapters}, which holds the adapters that are merged in here"
    raise ValueError(f"{directory} holds a scorer with {held}; this one has {wanted}. {mend}.")


def _check_base(directory: Path, saved: ScoringModelConfig, config: ScoringModelConfig) -> None:
    if saved.backbone == "own" and not saved.lora_rank:
        return  # brings all of its weights along
    if not saved.base_fingerprint:
        logger.warning("{} does not say which model it belongs to: only shapes are compared. Save it anew.", directory)
    elif config.base_fingerprint not in ("", saved.base_fingerprint):
        what, base, why = "the head in {} belongs", "target", "A head reads the states of its own target only"
        if saved.backbone == "own":
            what, base, why = "the adapters in {} belong", "model", "Adapters fit the weights they were trained on only"
        raise ValueError(
            f"{what.format(directory)} to the {base} {saved.base_model_path!r} (fingerprint {saved.base_fingerprint}); "
            f"the {base} here, {config.base_model_path!r}, has {config.base_fingerprint}. {why}: name that one."
        )


def _check_head(directory: Path, saved: ScoringModelConfig, config: ScoringModelConfig) -> None:
    with torch.device("meta"):
        needed = _shapes(make_head(config).state_dict())
    found = tensor_shapes([directory / HEAD_FILE])
    if odd := _odd(found, needed):
        raise ValueError(
            f"{directory / HEAD_FILE} has {odd[0]} of shape {found.get(odd[0])}; with hidden_size={config.hidden_size} "
            f"and spd.head_size={config.head_size} it is {needed.get(odd[0])}. Set spd.head_size={saved.head_size}, or "
            "train the head anew."
        )


def _check_adapters(
    directory: Path, saved: ScoringModelConfig, config: ScoringModelConfig, backbone: nn.Module
) -> None:
    from peft import get_peft_model_state_dict

    file, needed = _adapter_file(directory), _shapes(get_peft_model_state_dict(backbone, save_embedding_layers=False))
    found = tensor_shapes([file])
    if odd := _odd(found, needed):
        raise ValueError(
            f"{file} does not fit the model here, {config.base_model_path!r}: {_differences(odd, found, needed)}. Name "
            f"the model that it was trained on, {saved.base_model_path!r}, with "
            f"actor_rollout_ref.model.target_modules={saved.lora_target_modules}."
        )


def _check_whole(directory: Path, config: ScoringModelConfig, backbone: nn.Module) -> None:
    folder = directory / BACKBONE_DIR
    files = safetensors_of(folder) or [folder / "model.safetensors"]
    found, needed = tensor_shapes(files), _shapes(dict(backbone.named_parameters()))
    ours, theirs = (architecture(c) for c in (backbone.config, AutoConfig.from_pretrained(folder)))
    if odd := sorted(key for key in {*ours, *theirs} if ours.get(key) != theirs.get(key)):
        raise ValueError(
            f"{folder} has {odd[0]}={_said(theirs, odd[0])}; the model here, {config.base_model_path!r}, has "
            f"{_said(ours, odd[0])}. Name the model that it was trained from, or another of the same config."
        )
    # A model may hold weights in one piece that its files hold in several: then the numbers add up all the same.
    odd, common = _odd(found, needed), found.keys() & needed.keys()
    if odd and (not common.isdisjoint(odd) or _numbers(found) != _numbers(needed)):
        raise ValueError(f"{folder} is no whole backbone: {_differences(odd, found, needed)}. Save the scorer again.")


def _load_whole(folder: Path, backbone: nn.Module) -> None:
    trained, report = AutoModel.from_pretrained(folder, dtype=torch.float32, output_loading_info=True)
    if odd := sorted([*report["missing_keys"], *report["unexpected_keys"]]):
        raise WeightFileError(f"{folder} is no whole backbone: {odd[0]} is not on both sides. Save the scorer again.")
    backbone.load_state_dict(trained.state_dict())


def _adapter_file(directory: Path) -> Path:
    """In a folder of their own, or (as a checkpoint has them) beside the head."""
    beside = directory / ADAPTER_FILE
    return beside if beside.is_file() else directory / ADAPTER_DIR / ADAPTER_FILE


def _shapes(tensors: dict[str, torch.Tensor]) -> Shapes:
    return {name: tuple(tensor.shape) for name, tensor in tensors.items()}


def _odd(found: Shapes, needed: Shapes) -> list[str]:
    """Names that only one of them has, or with another shape."""
    return sorted(name for name in {*found, *needed} if found.get(name) != needed.get(name))


def _differences(odd: list[str], found: Shapes, needed: Shapes) -> str:
    there, here = (shapes.get(odd[0], "missing") for shapes in (found, needed))
    return f"{len(odd)} weights differ, such as {odd[0]} ({there} there, {here} here)"


def _numbers(shapes: Shapes) -> int:
    return sum(torch.Size(shape).numel() for shape in shapes.values())


def _said(values: dict[str, Any], key: str) -> Any:
    return values.get(key, "its default")
