"""The scorer with a backbone of its own, which reads the whole block."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import torch
from safetensors.torch import load_file
from torch import nn
from transformers import AutoConfig, AutoModel, PretrainedConfig

from recipe.spd.data.blocks import Block, SPDInputData, cut_at_end
from recipe.spd.scorer.cached_scorer import CachedScorer
from recipe.spd.scorer.config import ScoringModelConfig
from recipe.spd.scorer.heads import PairHead, ScoreHead
from recipe.spd.scorer.masks import MASKS, create_position_ids
from recipe.spd.scorer.model import (
    ScoringActor,
    Shapes,
    differing_names,
    drafts_and_targets,
    host_columns,
    part_of,
    rows_at,
    save_head,
    shapes_of,
)
from verl.data.fingerprint import architecture
from verl.training.policy.packing import OnHost
from verl.utils.weight_files import WeightFileError, safetensors_of, tensor_shapes

ADAPTER_DIR, ADAPTER_FILE = "adapter", "adapter_model.safetensors"
BACKBONE_DIR = "backbone"


class OwnBackboneScorer(ScoringActor):
    """Reads [Context] SEP [Draft] SEP [Target] SEP; trains the full backbone or its LoRA adapters, with the head."""

    reads_separator = True
    trains_backbone = True

    @classmethod
    def make_head(cls, config: ScoringModelConfig) -> nn.Module:
        if config.head_inputs == "state":
            return ScoreHead(config.hidden_size)
        return PairHead(config.hidden_size, config.head_size, more=1)

    @classmethod
    def is_complete(cls, config: ScoringModelConfig) -> bool:
        return not config.lora_rank

    @classmethod
    def described_backbone(
        cls, hf_config: PretrainedConfig, config: ScoringModelConfig, trust_remote_code: bool
    ) -> nn.Module:
        with torch.device("meta"):
            return with_adapters(AutoModel.from_config(hf_config, trust_remote_code=trust_remote_code), config)

    def forward(
        self, input_ids: torch.Tensor, attention_mask: torch.Tensor, position_ids: torch.Tensor,
        spd_layout: torch.Tensor, remove_padding: bool = False, host: OnHost | None = None,
    ) -> torch.Tensor:  # fmt: skip
        pack = self.packs(remove_padding)
        # Both also on the host: widths are read there, and packings are laid out there.
        text, layout = host_columns(host, attention_mask=attention_mask, spd_layout=spd_layout)
        if self.config.context_tokens:
            first, text, layout = cut_context(text, layout, self.config.context_tokens)
            input_ids = input_ids[:, first : first + text.shape[1]]
            attention_mask, spd_layout = (x.to(input_ids.device, non_blocking=True) for x in (text, layout))
            position_ids = (attention_mask.cumsum(-1) - 1).clamp(min=0)
        gamma = int(layout[:, 3].max())  # the longest draft
        draft_ids, target_ids = drafts_and_targets(input_ids, spd_layout, gamma)
        mask = None
        if self.config.attention in MASKS:
            columns = (text, layout) if pack else (attention_mask, spd_layout)
            mask = MASKS[self.config.attention](*columns, next(self.backbone.parameters()).dtype)
            position_ids = create_position_ids(attention_mask, spd_layout, self.config.attention)
        states = self.states(input_ids, text if pack else attention_mask, position_ids, pack, mask)  # [B, P, H]
        return self.score_states(states, spd_layout, draft_ids, target_ids)

    def score_states(
        self, states: torch.Tensor, spd_layout: torch.Tensor, draft_ids: torch.Tensor, target_ids: torch.Tensor
    ) -> torch.Tensor:
        """z [B, g] from the backbone's states [B, P, H] and ids [B, g]; spd_layout has columns of the states."""
        _, _, draft_start, draft_len, target_start = spd_layout.split(1, dim=1)  # [B, 1] each
        steps = torch.arange(draft_ids.shape[1], device=states.device)
        at_target = rows_at(states, target_start + steps)
        if isinstance(self.head, ScoreHead):
            z = self.head(at_target)
        else:
            before_draft = rows_at(states, draft_start + steps - 1)  # d_1 follows the first separator
            z = self.head(before_draft, *self.embedded(draft_ids, target_ids), at_target)
        return self.mask_padding(self.mask_matches(z, draft_ids, target_ids), draft_len)

    def block_scores(
        self, *, sep_token_id: int, pad_token_id: int, end_ids: frozenset[int]
    ) -> Callable[[Block], torch.Tensor]:  # fmt: skip
        """See ScoringActor; z is -inf after a draft's end token. Each call is one more forward, over what is new in the
        text (CachedScorer), or over all of it where the scorer reads the end of the context only.
        """
        ids = {"sep_token_id": sep_token_id, "pad_token_id": pad_token_id}
        cached = None if self.config.context_tokens else CachedScorer(self, **ids)

        def z_of(block: Block) -> torch.Tensor:
            pairs = zip(block.draft_ids.tolist(), block.target_ids.tolist(), strict=True)
            # A draft is shown up to its first end token, as in the training data: nobody reads what follows.
            drafts, targets = zip(*(cut_at_end(draft, target, end_ids) for draft, target in pairs), strict=True)
            contexts, device = block.context_ids, block.draft_ids.device
            if cached is not None:
                z = cached(block.rows.tolist(), contexts, drafts, targets, device)  # [B, longest draft]
            else:
                z = self(**SPDInputData.from_blocks(contexts, drafts, targets, device=device, **ids).as_kwargs())
            return torch.nn.functional.pad(z, (0, block.draft_ids.shape[1] - z.shape[1]), value=-math.inf)

        return z_of

    def save_pretrained(self, directory: str | Path, state_dict: dict[str, torch.Tensor] | None = None) -> None:
        state = self.state_dict() if state_dict is None else state_dict
        config, folder = self.config, Path(directory)
        backbone = part_of(state, "backbone.")
        if config.lora_rank and any(".lora_" in name for name in backbone):
            self.backbone.save_pretrained(str(folder / ADAPTER_DIR), state_dict=backbone, save_embedding_layers=False)
        else:  # a full backbone, also where `state` has the adapters merged in
            plain = self.backbone.get_base_model() if config.lora_rank else self.backbone
            plain.save_pretrained(str(folder / BACKBONE_DIR), state_dict=backbone)
            config = replace(config, lora_rank=0)
        save_head(folder, state, config)

    @classmethod
    def check_backbone(
        cls, directory: Path, saved: ScoringModelConfig, config: ScoringModelConfig, backbone: nn.Module | None
    ) -> None:
        if cls.is_complete(saved):
            return _check_full(directory / BACKBONE_DIR, config, backbone)
        from peft import get_peft_model_state_dict

        needed = shapes_of(get_peft_model_state_dict(backbone, save_embedding_layers=False))
        file = adapter_file(directory)
        stored = tensor_shapes([file])
        if odd := differing_names(stored, needed):
            raise ValueError(
                f"{file} does not fit the model here, {config.base_model_path!r}: "
                f"{first_difference(odd, stored, needed)}. Name the model that it was trained on, "
                f"{saved.base_model_path!r}, with actor_rollout_ref.model.target_modules={saved.lora_target_modules}."
            )

    def load_trained(self, directory: str | Path) -> None:
        super().load_trained(directory)
        if self.config.lora_rank:
            from peft import set_peft_model_state_dict

            set_peft_model_state_dict(self.backbone, load_file(adapter_file(Path(directory))))
            return
        folder = Path(directory) / BACKBONE_DIR
        trained, report = AutoModel.from_pretrained(folder, dtype=torch.float32, output_loading_info=True)
        if odd := sorted([*report["missing_keys"], *report["unexpected_keys"]]):
            raise WeightFileError(
                f"{folder} is not a complete backbone: {odd[0]} is missing or unexpected. Save the scorer again."
            )
        self.backbone.load_state_dict(trained.state_dict())


def adapter_file(directory: Path) -> Path:
    """In a folder of their own, or (in a checkpoint) next to the head."""
    file = directory / ADAPTER_FILE
    return file if file.is_file() else directory / ADAPTER_DIR / ADAPTER_FILE


def first_difference(odd: list[str], stored: Shapes, needed: Shapes) -> str:
    """The first of the names that differ, in words."""
    there, here = (shapes.get(odd[0], "missing") for shapes in (stored, needed))
    return f"{len(odd)} weights differ, such as {odd[0]} ({there} there, {here} here)"


def with_adapters(backbone: nn.Module, config: ScoringModelConfig) -> nn.Module:
    """The backbone with new LoRA adapters if config.lora_rank is set."""
    if not config.lora_rank:
        return backbone
    from peft import LoraConfig, get_peft_model

    modules = config.lora_target_modules
    lora = LoraConfig(r=config.lora_rank, lora_alpha=config.lora_alpha, target_modules=modules, bias="none")
    return get_peft_model(backbone, lora)


def cut_context(
    attention_mask: torch.Tensor, spd_layout: torch.Tensor, keep: int
) -> tuple[int, torch.Tensor, torch.Tensor]:
    """The same blocks with the last `keep` tokens of each context: the first column that a row needs, then the mask
    [B, P - first] int64 and spd_layout [B, 5] int64 of the columns from there. All are on the host, as are
    attention_mask [B, P] int64 and spd_layout [B, 5] int64.
    """
    layout = spd_layout.clone()
    context_start, context_len = layout[:, 0], layout[:, 1]  # views
    context_start += (context_len - keep).clamp(min=0)
    context_len.clamp_(max=keep)
    first = int(context_start.min())
    layout[:, [0, 2, 4]] -= first  # the three starts
    mask = attention_mask[:, first:]
    return first, mask * (torch.arange(mask.shape[1]) >= layout[:, :1]), layout


def _check_full(folder: Path, config: ScoringModelConfig, backbone: nn.Module) -> None:
    """Raise OSError or ValueError unless the full backbone saved in `folder` has the architecture of `backbone`."""
    stored = tensor_shapes(safetensors_of(folder) or [folder / "model.safetensors"])
    needed = shapes_of(dict(backbone.named_parameters()))
    ours, theirs = (architecture(c) for c in (backbone.config, AutoConfig.from_pretrained(folder)))
    if keys := sorted(key for key in {*ours, *theirs} if ours.get(key) != theirs.get(key)):
        there, here = (values.get(keys[0], "its default") for values in (theirs, ours))
        raise ValueError(
            f"{folder} has {keys[0]}={there}; the model here, {config.base_model_path!r}, has {here}. Name the model "
            "that it was trained from, or another of the same config."
        )
    # A model may hold weights fused that its files hold separately, by other names: the elements in all agree then.
    odd, common = differing_names(stored, needed), stored.keys() & needed.keys()
    elements = [sum(torch.Size(shape).numel() for shape in shapes.values()) for shapes in (stored, needed)]
    if odd and (not common.isdisjoint(odd) or elements[0] != elements[1]):
        raise ValueError(
            f"{folder} is not a complete backbone: {first_difference(odd, stored, needed)}. Save the scorer again."
        )
