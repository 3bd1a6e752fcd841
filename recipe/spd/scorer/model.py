"""The scoring model: one logit per drafted token. Its two backbones are subclasses, in own.py and target.py."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, ClassVar

import torch
from loguru import logger
from safetensors.torch import load_file, save_file
from torch import nn
from transformers import PretrainedConfig

from recipe.spd.data.blocks import Block
from recipe.spd.scorer.config import CONFIG_FILE, ScoringModelConfig
from verl.config import aliases
from verl.training.peft_weights import without_adapters
from verl.training.policy.attention import make_packable
from verl.training.policy.packing import OnHost, pack_rows
from verl.utils.weight_files import tensor_shapes

HEAD_FILE = "score_head.safetensors"
CHECKPOINT_ADAPTERS = "lora_adapter"  # the folder next to a checkpoint's merged export

# Settings that must agree for saved weights to keep their meaning -> the key of the training config.
KIND = {
    **{name: f"spd.{name}" for name in ("backbone", "attention", "context_tokens", "head_inputs", "state_layer")},
    **{name: f"actor_rollout_ref.model.{name}" for name in ("lora_rank", "lora_alpha")},
}

Shapes = dict[str, tuple[int, ...]]


class ScoringActor(nn.Module):
    """z [B, gamma] for drafted blocks; trained are the full backbone, its LoRA adapters, or the head alone.

    `recipe.spd.scorer.auto` makes the subclass that config.backbone names.
    """

    #: whether the separators between the parts of a block are in its input
    reads_separator: ClassVar[bool] = False
    #: whether the backbone's weights, or adapters of them, are trained with the head
    trains_backbone: ClassVar[bool] = False

    def __init__(self, config: ScoringModelConfig, backbone: nn.Module) -> None:
        super().__init__()
        self.config = config
        self.backbone = backbone
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(config.seed)
            self.head = self.make_head(config)

    @classmethod
    @abstractmethod
    def make_head(cls, config: ScoringModelConfig) -> nn.Module:
        """The head of the config's head_inputs, with its widths."""

    @classmethod
    @abstractmethod
    def is_complete(cls, config: ScoringModelConfig) -> bool:
        """Whether a saved scorer contains all of its weights, so that its base model is not needed."""

    @classmethod
    def check_target(cls, config: ScoringModelConfig, target: PretrainedConfig) -> None:
        """ValueError where the configuration of the target's text model excludes the settings."""

    @classmethod
    def described_backbone(
        cls, hf_config: PretrainedConfig, config: ScoringModelConfig, trust_remote_code: bool
    ) -> nn.Module | None:
        """The trained backbone on the meta device, adapters included, for `check_trained`; None if it is frozen."""
        return None

    @abstractmethod
    def forward(
        self, input_ids: torch.Tensor, attention_mask: torch.Tensor, position_ids: torch.Tensor,
        spd_layout: torch.Tensor, remove_padding: bool = False, host: OnHost | None = None,
    ) -> torch.Tensor:  # fmt: skip
        """input_ids, attention_mask (1 = text), position_ids [B, P]; spd_layout [B, 5] -> z [B, gamma] float32.

        gamma is the longest draft of the batch; matches and the padding of shorter drafts get mismatch_logit_value.
        `spd` and `hybrid` attention make their own positions, `target` counts context and draft. With `remove_padding`
        the backbone sees one flat row of tokens if its attention is transformers' own. `host`: input_ids,
        attention_mask and spd_layout as they are on the host; without it the host waits for the device.
        """

    def packs(self, remove_padding: bool) -> bool:
        """Whether the backbone can read one flat row of tokens, where that is asked for."""
        return make_packable(without_adapters(self.backbone), wanted=remove_padding)

    def embedded(self, *ids: torch.Tensor) -> list[torch.Tensor]:
        """Embeddings of ids [B, g], without gradient: [B, g, H] each."""
        with torch.no_grad():
            return [self.backbone.get_input_embeddings()(tokens) for tokens in ids]

    def mask_matches(self, z: torch.Tensor, draft_ids: torch.Tensor, target_ids: torch.Tensor) -> torch.Tensor:
        """z [B, g] in float32; mismatch_logit_value, without gradient, where d_i == t_i."""
        return z.float().masked_fill(draft_ids == target_ids, self.config.mismatch_logit_value)

    def mask_padding(self, z: torch.Tensor, draft_len: torch.Tensor) -> torch.Tensor:
        """z [B, g] with mismatch_logit_value after each draft; draft_len [B, 1]."""
        steps = torch.arange(z.shape[1], device=z.device)
        return z.masked_fill(steps >= draft_len, self.config.mismatch_logit_value)

    def states(
        self, ids: torch.Tensor, text: torch.Tensor, position_ids: torch.Tensor, pack: bool,
        mask: torch.Tensor | None = None,
    ) -> torch.Tensor:  # fmt: skip
        """The backbone's states [B, P, H], as `read` gives them; ids, text (1 = no padding), position_ids [B, P] int64;
        mask [B, 1, P, P] additive (masks.py), None: causal. With `pack`, text and mask are on the host.
        """
        if not pack:
            inputs = {"input_ids": ids, "position_ids": position_ids, "attention_mask": text if mask is None else mask}
            return self.read(**inputs, use_cache=False)
        packing = pack_rows(text, None if mask is None else mask[:, 0] == 0, ids.device)
        return packing.spread(self.read(**packing.model_inputs(ids, position_ids)), *ids.shape)

    def read(self, **inputs: Any) -> torch.Tensor:
        """The backbone's last hidden states [B, P, H] on the inputs of its forward."""
        return self.backbone(**inputs).last_hidden_state

    @abstractmethod
    def block_scores(self, **tokens: Any) -> Callable[[Block], torch.Tensor]:
        """A function of a decoded block that gives z [B, g]; `tokens`: sep_token_id, pad_token_id and end_ids."""

    @abstractmethod
    def save_pretrained(self, directory: str | Path, state_dict: dict[str, torch.Tensor] | None = None) -> None:
        """Write the trained part with spd_config.json: the head, and the adapters or the full `own` backbone.

        `state_dict` replaces the module's own where that is sharded (names as in `self.state_dict()`).
        """

    def save_with_adapters(self, directory: str | Path, *, state_dict: dict[str, torch.Tensor]) -> None:
        """Add the head and spd_config.json to a folder of adapters in peft's format, as `adapter_path` needs it.

        `state_dict`: the trained weights other than the adapters, by this module's names.
        """
        save_head(Path(directory), state_dict, self.config)

    @classmethod
    def check_trained(
        cls, directory: Path, config: ScoringModelConfig, backbone: nn.Module | None
    ) -> ScoringModelConfig:
        """The config of the scorer saved in `directory`. Raises OSError or ValueError unless it fits one of `config`.

        Reads the headers of the files, no weights. `backbone`: the base model of an `own` scorer, adapters included; it
        may be on the meta device. With an empty base_fingerprint on either side only shapes are compared.
        """
        saved = ScoringModelConfig.load(directory)
        _check_kind(directory, saved, config)
        if not cls.is_complete(saved):
            cls._check_base(directory, saved, config)
        with torch.device("meta"):
            needed = shapes_of(cls.make_head(config).state_dict())
        stored = tensor_shapes([directory / HEAD_FILE])
        if odd := differing_names(stored, needed):
            raise ValueError(
                f"{directory / HEAD_FILE} has {odd[0]} of shape {stored.get(odd[0])}; with "
                f"hidden_size={config.hidden_size} and spd.head_size={config.head_size} it is {needed.get(odd[0])}. "
                f"Set spd.head_size={saved.head_size}, or train a new head."
            )
        cls.check_backbone(directory, saved, config, backbone)
        return saved

    @classmethod
    def check_backbone(
        cls, directory: Path, saved: ScoringModelConfig, config: ScoringModelConfig, backbone: nn.Module | None
    ) -> None:
        """Raise OSError or ValueError unless the saved backbone or adapters, if there are any, fit `backbone`."""

    @classmethod
    def _check_base(cls, directory: Path, saved: ScoringModelConfig, config: ScoringModelConfig) -> None:
        """Raise ValueError where the two configs have fingerprints of different base models."""
        if not saved.base_fingerprint:
            text = "{} has no fingerprint of its base model: only shapes are compared. Save it again."
            logger.warning(text, directory)
        elif config.base_fingerprint not in ("", saved.base_fingerprint):
            raise ValueError(
                f"the scorer in {directory} belongs to the model {saved.base_model_path!r} (fingerprint "
                f"{saved.base_fingerprint}); the model here, {config.base_model_path!r}, has "
                f"{config.base_fingerprint}. A scorer fits the weights that it was trained on only: name that one."
            )

    def load_trained(self, directory: str | Path) -> None:
        """Load the trained part saved in `directory`; raises ValueError or OSError if it does not fit."""
        self.check_trained(Path(directory), self.config, self.backbone)
        self.head.load_state_dict(load_file(Path(directory) / HEAD_FILE))


def _check_kind(directory: Path, saved: ScoringModelConfig, config: ScoringModelConfig) -> None:
    """Raise ValueError where the two configs differ in a setting of KIND."""
    odd = [name for name in KIND if getattr(saved, name) != getattr(config, name)]
    if "lora_alpha" in odd and not (saved.lora_rank and config.lora_rank):  # one of them has no adapters
        odd.remove("lora_alpha")
    if not odd:
        return
    held, needed = (", ".join(f"{name}={getattr(c, name)!r}" for name in odd) for c in (saved, config))
    fix = "Set " + ", ".join(f"{KIND[name]}={aliases.text(getattr(saved, name))}" for name in odd)
    adapters = directory.parent / CHECKPOINT_ADAPTERS
    if odd == ["lora_rank"] and not saved.lora_rank and (adapters / CONFIG_FILE).is_file():
        fix = f"Name {adapters}, which holds the adapters that are merged in here"
    raise ValueError(f"{directory} holds a scorer with {held}; this one has {needed}. {fix}.")


def shapes_of(tensors: Mapping[str, torch.Tensor]) -> Shapes:
    """The shape of each tensor."""
    return {name: tuple(tensor.shape) for name, tensor in tensors.items()}


def differing_names(stored: Shapes, needed: Shapes) -> list[str]:
    """Names that only one side has, or with another shape."""
    return sorted(name for name in {*stored, *needed} if stored.get(name) != needed.get(name))


def save_head(folder: Path, state: dict[str, torch.Tensor], config: ScoringModelConfig) -> None:
    """Write head and spd_config.json; `state` has the names of the whole scorer."""
    folder.mkdir(parents=True, exist_ok=True)
    save_file(part_of(state, "head."), folder / HEAD_FILE, metadata={"format": "pt"})
    config.save(folder)


def part_of(state: dict[str, torch.Tensor], prefix: str) -> dict[str, torch.Tensor]:
    """The tensors whose names start with `prefix`, on the CPU, under the rest of their names."""
    part = {name.removeprefix(prefix): tensor for name, tensor in state.items() if name.startswith(prefix)}
    return {name: tensor.detach().cpu().contiguous() for name, tensor in part.items()}


def host_columns(host: OnHost | None, **columns: torch.Tensor) -> list[torch.Tensor]:
    """The columns as `host` has them; others are copied from the device, for which the host waits."""
    given: dict[str, Any] = {} if host is None else host.columns
    return [given.get(name, tensor).cpu() for name, tensor in columns.items()]


def drafts_and_targets(
    input_ids: torch.Tensor, spd_layout: torch.Tensor, gamma: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """d_1..d_gamma and t_1..t_gamma [B, gamma] of inputs [B, P]; anything after a shorter draft."""
    steps = torch.arange(gamma, device=input_ids.device)
    last = input_ids.shape[1] - 1
    draft, target = ((start + steps).clamp(max=last) for start in (spd_layout[:, 2:3], spd_layout[:, 4:5]))
    return input_ids.gather(1, draft), input_ids.gather(1, target)


def rows_at(hidden: torch.Tensor, columns: torch.Tensor) -> torch.Tensor:
    """hidden [B, P, H] at columns [B, g] (cut to the last one) -> [B, g, H]."""
    columns = columns.clamp(max=hidden.shape[1] - 1)
    return hidden.gather(1, columns[..., None].expand(-1, -1, hidden.shape[-1]))
