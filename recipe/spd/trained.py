"""The trained part of a scorer in a folder: checked against a base model, and loaded onto it."""

from collections.abc import Mapping
from pathlib import Path

import torch
from loguru import logger
from safetensors.torch import load_file
from torch import nn
from transformers import AutoConfig, AutoModel, PretrainedConfig

from recipe.spd.scoring_config import CONFIG_FILE, ScoringModelConfig, make_head
from verl.utils.fingerprint import architecture
from verl.utils.weight_files import WeightFileError, safetensors_of, tensor_shapes

HEAD_FILE = "score_head.safetensors"
ADAPTER_DIR = "adapter"
ADAPTER_FILE = "adapter_model.safetensors"
BACKBONE_DIR = "backbone"
CHECKPOINT_ADAPTERS = "lora_adapter"  # the folder next to a checkpoint's merged export

# Settings that must agree for saved weights to keep their meaning -> the key of the training config.
_KIND = {
    "backbone": "spd.backbone", "attention": "spd.attention", "context_tokens": "spd.context_tokens",
    "head_inputs": "spd.head_inputs", "lora_rank": "actor_rollout_ref.model.lora_rank",
    "lora_alpha": "actor_rollout_ref.model.lora_alpha",
}  # fmt: skip

Shapes = dict[str, tuple[int, ...]]


def check_trained(directory: Path, config: ScoringModelConfig, backbone: nn.Module | None) -> ScoringModelConfig:
    """The config of the scorer saved in `directory`. Raises OSError or ValueError unless it fits one of `config`.

    Reads the headers of the files, no weights. `backbone`: the base model of an `own` scorer, adapters included; it may
    be on the meta device. With an empty base_fingerprint on either side only shapes are compared.
    """
    saved = ScoringModelConfig.load(directory)
    names = [n for n in _KIND if n != "lora_alpha" or (saved.lora_rank and config.lora_rank)]
    if odd := [name for name in names if getattr(saved, name) != getattr(config, name)]:
        held, needed = (", ".join(f"{name}={getattr(c, name)!r}" for name in odd) for c in (saved, config))
        fix = f"Set {', '.join(f'{_KIND[name]}={getattr(saved, name)}' for name in odd)}"
        adapters = directory.parent / CHECKPOINT_ADAPTERS
        if odd == ["lora_rank"] and not saved.lora_rank and (adapters / CONFIG_FILE).is_file():
            fix = f"Name {adapters}, which holds the adapters that are merged in here"
        raise ValueError(f"{directory} holds a scorer with {held}; this one has {needed}. {fix}.")
    is_full = saved.backbone == "own" and not saved.lora_rank  # contains all of its weights
    if not is_full and not saved.base_fingerprint:
        logger.warning("{} has no fingerprint of its base model: only shapes are compared. Save it again.", directory)
    elif not is_full and config.base_fingerprint not in ("", saved.base_fingerprint):
        what, base, why = "the head in {} belongs", "target", "A head reads the states of its own target only"
        if saved.backbone == "own":
            what, base, why = "the adapters in {} belong", "model", "Adapters fit the weights they were trained on only"
        raise ValueError(
            f"{what.format(directory)} to the {base} {saved.base_model_path!r} (fingerprint {saved.base_fingerprint}); "
            f"the {base} here, {config.base_model_path!r}, has {config.base_fingerprint}. {why}: name that one."
        )
    with torch.device("meta"):
        needed = _shapes(make_head(config).state_dict())
    stored = tensor_shapes([directory / HEAD_FILE])
    if odd := _different(stored, needed):
        raise ValueError(
            f"{directory / HEAD_FILE} has {odd[0]} of shape {stored.get(odd[0])}; with "
            f"hidden_size={config.hidden_size} and spd.head_size={config.head_size} it is {needed.get(odd[0])}. Set "
            f"spd.head_size={saved.head_size}, or train a new head."
        )
    if is_full:
        _check_backbone(directory / BACKBONE_DIR, config, backbone)
    elif saved.backbone == "own":
        from peft import get_peft_model_state_dict

        needed = _shapes(get_peft_model_state_dict(backbone, save_embedding_layers=False))
        file = _adapter_file(directory)
        stored = tensor_shapes([file])
        if odd := _different(stored, needed):
            raise ValueError(
                f"{file} does not fit the model here, {config.base_model_path!r}: {_first_of(odd, stored, needed)}. "
                f"Name the model that it was trained on, {saved.base_model_path!r}, with "
                f"actor_rollout_ref.model.target_modules={saved.lora_target_modules}."
            )
    return saved


def load_trained(directory: Path, config: ScoringModelConfig, head: nn.Module, backbone: nn.Module) -> None:
    """Load the contents of `directory` into head and backbone; raises what `check_trained` raises."""
    saved = check_trained(directory, config, backbone)
    head.load_state_dict(load_file(directory / HEAD_FILE))
    if saved.backbone == "own" and saved.lora_rank:
        from peft import set_peft_model_state_dict

        set_peft_model_state_dict(backbone, load_file(_adapter_file(directory)))
    elif saved.backbone == "own":
        folder = directory / BACKBONE_DIR
        trained, report = AutoModel.from_pretrained(folder, dtype=torch.float32, output_loading_info=True)
        if odd := sorted([*report["missing_keys"], *report["unexpected_keys"]]):
            raise WeightFileError(
                f"{folder} is not a complete backbone: {odd[0]} is missing or unexpected. Save the scorer again."
            )
        backbone.load_state_dict(trained.state_dict())


def with_adapters(backbone: nn.Module, config: ScoringModelConfig) -> nn.Module:
    """The backbone with new LoRA adapters if config.lora_rank is set."""
    if not config.lora_rank:
        return backbone
    from peft import LoraConfig, get_peft_model

    modules = config.lora_target_modules
    lora = LoraConfig(r=config.lora_rank, lora_alpha=config.lora_alpha, target_modules=modules, bias="none")
    return get_peft_model(backbone, lora)


def described_backbone(hf_config: PretrainedConfig, config: ScoringModelConfig, trust_remote_code: bool) -> nn.Module:
    """An `own` scorer's backbone on the meta device, for `check_trained`."""
    with torch.device("meta"):
        return with_adapters(AutoModel.from_config(hf_config, trust_remote_code=trust_remote_code), config)


def _check_backbone(folder: Path, config: ScoringModelConfig, backbone: nn.Module) -> None:
    stored = tensor_shapes(safetensors_of(folder) or [folder / "model.safetensors"])
    needed = _shapes(dict(backbone.named_parameters()))
    ours, theirs = (architecture(c) for c in (backbone.config, AutoConfig.from_pretrained(folder)))
    if odd := sorted(key for key in {*ours, *theirs} if ours.get(key) != theirs.get(key)):
        there, here = (values.get(odd[0], "its default") for values in (theirs, ours))
        raise ValueError(
            f"{folder} has {odd[0]}={there}; the model here, {config.base_model_path!r}, has {here}. Name the model "
            "that it was trained from, or another of the same config."
        )
    # A model may hold weights fused that its files hold separately: then the numbers of elements agree.
    odd, common = _different(stored, needed), stored.keys() & needed.keys()
    counts = (sum(torch.Size(shape).numel() for shape in shapes.values()) for shapes in (stored, needed))
    if odd and (not common.isdisjoint(odd) or len(set(counts)) > 1):
        raise ValueError(
            f"{folder} is not a complete backbone: {_first_of(odd, stored, needed)}. Save the scorer again."
        )


def _adapter_file(directory: Path) -> Path:
    """In a folder of their own, or (in a checkpoint) next to the head."""
    file = directory / ADAPTER_FILE
    return file if file.is_file() else directory / ADAPTER_DIR / ADAPTER_FILE


def _shapes(tensors: Mapping[str, torch.Tensor]) -> Shapes:
    return {name: tuple(tensor.shape) for name, tensor in tensors.items()}


def _different(stored: Shapes, needed: Shapes) -> list[str]:
    """Names that only one side has, or with another shape."""
    return sorted(name for name in {*stored, *needed} if stored.get(name) != needed.get(name))


def _first_of(odd: list[str], stored: Shapes, needed: Shapes) -> str:
    there, here = (shapes.get(odd[0], "missing") for shapes in (stored, needed))
    return f"{len(odd)} weights differ, such as {odd[0]} ({there} there, {here} here)"
