"""The scoring model: one logit per drafted token, from a separate backbone or from the target's hidden states."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from safetensors.torch import save_file
from torch import nn
from transformers import AutoConfig, AutoModel, PreTrainedModel

from recipe.spd.features import FeatureStore
from recipe.spd.masks import MASKS, create_position_ids
from recipe.spd.scoring_config import ScoringModelConfig, make_head
from recipe.spd.trained import ADAPTER_DIR, BACKBONE_DIR, HEAD_FILE, load_trained, with_adapters
from verl.trainer.run.ranks import any_rank
from verl.utils.fingerprint import model_fingerprint
from verl.utils.peft_weights import without_adapters
from verl.workers.policy.attention import make_packable
from verl.workers.policy.packing import OnHost, pack_rows


class ScoringActor(nn.Module):
    """z [B, gamma] for drafted blocks; trained are the full backbone, its LoRA adapters, or the head alone."""

    def __init__(self, config: ScoringModelConfig, backbone: nn.Module) -> None:
        super().__init__()
        self.config = config
        self.backbone = backbone
        self.features: FeatureStore | None = None  # set by the training's loader, for the `target` backbone
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(config.seed)
            self.head = make_head(config)
        if config.backbone == "target":
            self.backbone.requires_grad_(False)

    def train(self, mode: bool = True) -> ScoringActor:
        """As usual, but a frozen target never leaves evaluation mode."""
        super().train(mode)
        if self.config.backbone == "target":
            self.backbone.eval()
        return self

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
        pack = make_packable(without_adapters(self.backbone), wanted=remove_padding)
        given = {} if host is None else host.columns
        text, layout = given.get("attention_mask", attention_mask).cpu(), given.get("spd_layout", spd_layout).cpu()
        if self.config.context_tokens:
            first, text, layout = cut_context(text, layout, self.config.context_tokens)
            input_ids = input_ids[:, first : first + text.shape[1]]
            attention_mask, spd_layout = (x.to(input_ids.device, non_blocking=True) for x in (text, layout))
            position_ids = (attention_mask.cumsum(-1) - 1).clamp(min=0)
        draft_start, draft_len, target_start = spd_layout[:, 2:3], spd_layout[:, 3:4], spd_layout[:, 4:5]
        steps = torch.arange(int(layout[:, 3].max()), device=input_ids.device)
        last = input_ids.shape[1] - 1
        draft_ids = input_ids.gather(1, (draft_start + steps).clamp(max=last))  # [B, gamma]
        target_ids = input_ids.gather(1, (target_start + steps).clamp(max=last))
        if self.config.backbone == "target":
            hidden = self._target_hidden(input_ids, given.get("input_ids", input_ids), layout, len(steps), pack)
            z = self.score_features(hidden, draft_ids, target_ids)
        else:
            mask = None
            if self.config.attention != "causal":
                # A packing is laid out on the host.
                described = (text, layout) if pack else (attention_mask, spd_layout)
                mask = MASKS[self.config.attention](*described, next(self.backbone.parameters()).dtype)
                position_ids = create_position_ids(attention_mask, spd_layout, self.config.attention)
            states = self.states(input_ids, text if pack else attention_mask, position_ids, pack, mask)  # [B, P, H]
            return self.score_states(states, spd_layout, draft_ids, target_ids)
        return z.masked_fill(steps >= draft_len, self.config.mismatch_logit_value)

    def score_states(
        self, states: torch.Tensor, spd_layout: torch.Tensor, draft_ids: torch.Tensor, target_ids: torch.Tensor
    ) -> torch.Tensor:
        """z [B, g] of an `own` backbone from its states [B, P, H] and ids [B, g]; spd_layout: columns of the states."""
        draft_start, draft_len, target_start = spd_layout[:, 2:3], spd_layout[:, 3:4], spd_layout[:, 4:5]
        steps = torch.arange(draft_ids.shape[1], device=states.device)
        at_target = _rows_at(states, target_start + steps)
        if self.config.head_inputs == "state":
            z = self.head(at_target)
        else:
            before_draft = _rows_at(states, draft_start + steps - 1)  # d_1 follows the first separator
            z = self.head(before_draft, *self._embedded(draft_ids, target_ids), at_target)
        z = self._mask_matches(z, draft_ids, target_ids)
        return z.masked_fill(steps >= draft_len, self.config.mismatch_logit_value)

    def score_features(self, hidden: torch.Tensor, draft_ids: torch.Tensor, target_ids: torch.Tensor) -> torch.Tensor:
        """hidden [B, g + 1, H]: the target's states (after its final norm) over the token before d_1 and over d_1 to
        d_g, of which the i-th predicted t_i; ids [B, g] -> z [B, g].
        """
        if self.config.backbone != "target":
            raise TypeError("score_features needs a scorer with spd.backbone=target; this one has 'own'.")
        z = self.head(hidden[:, :-1], *self._embedded(draft_ids, target_ids), hidden[:, 1:])
        return self._mask_matches(z, draft_ids, target_ids)

    def _embedded(self, *ids: torch.Tensor) -> list[torch.Tensor]:
        """Embeddings of ids [B, g], without gradient: [B, g, H] each."""
        with torch.no_grad():
            return [self.backbone.get_input_embeddings()(tokens) for tokens in ids]

    def _mask_matches(self, z: torch.Tensor, draft_ids: torch.Tensor, target_ids: torch.Tensor) -> torch.Tensor:
        """z [B, g] in float32; mismatch_logit_value, without gradient, where d_i == t_i."""
        return z.float().masked_fill(draft_ids == target_ids, self.config.mismatch_logit_value)

    def states(
        self, ids: torch.Tensor, text: torch.Tensor, position_ids: torch.Tensor, pack: bool,
        mask: torch.Tensor | None = None,
    ) -> torch.Tensor:  # fmt: skip
        """The backbone's last hidden states [B, P, H]; ids, text (1 = no padding), position_ids [B, P] int64; mask
        [B, 1, P, P] additive (masks.py), None: causal. With `pack`, text and mask are on the host.
        """
        if not pack:
            inputs = {"input_ids": ids, "position_ids": position_ids, "attention_mask": text if mask is None else mask}
            return self.backbone(**inputs, use_cache=False).last_hidden_state
        packing = pack_rows(text, None if mask is None else mask[:, 0] == 0, ids.device)
        states = self.backbone(**packing.model_inputs(ids, position_ids)).last_hidden_state
        return packing.spread(states, *ids.shape)

    def _target_hidden(
        self, input_ids: torch.Tensor, texts: torch.Tensor, layout: torch.Tensor, gamma: int, pack: bool
    ) -> torch.Tensor:
        """[B, gamma + 1, H]: the frozen target's last hidden states where it predicted t_1..t_{gamma+1}.

        texts: input_ids, wherever it is cheap to read. With a feature store only blocks that were never seen are
        forwarded.
        """
        if self.features is None:
            return self._forward_target(input_ids, layout, gamma, pack)
        blocks = [
            (*text[start : start + context].tolist(), -context, *text[draft : draft + length].tolist())
            for text, (start, context, draft, length, _) in zip(texts.cpu().numpy(), layout.tolist(), strict=True)
        ]
        states = self.features.get_many(blocks)
        missing = list({block: i for i, block in enumerate(blocks) if states[i] is None}.values())
        if any_rank(bool(missing), input_ids.device):
            # A sharded target is gathered by all ranks together: a rank that misses nothing forwards one row too.
            rows = missing or [0]
            hidden = self._forward_target(input_ids[rows], layout[rows], gamma, pack)
            fresh = [hidden[k, : int(layout[i, 3]) + 1] for k, i in enumerate(rows)]
            self.features.put_many([blocks[i] for i in rows], fresh)
            states = self.features.get_many(blocks)
        hidden = torch.nn.utils.rnn.pad_sequence(states, batch_first=True)  # [B, <= gamma + 1, H]
        return F.pad(hidden, (0, 0, 0, gamma + 1 - hidden.shape[1])).to(input_ids.device)

    def _forward_target(
        self, input_ids: torch.Tensor, layout: torch.Tensor, gamma: int, pack: bool
    ) -> torch.Tensor:
        """The same by a forward over context and draft, right-aligned; layout [B, 5] is on the host."""
        device = input_ids.device
        start, context_len, draft_start, draft_len = (layout[:, i : i + 1] for i in range(4))  # [B, 1]
        length = context_len + draft_len
        width = int(length.max())
        first = width - length
        position = torch.arange(width)[None, :] - first  # [B, W], below 0 in the padding
        column = torch.where(position < context_len, start + position, draft_start + position - context_len)
        text = (position >= 0).long()
        # The state over the token before d_i predicted t_i.
        predicting = first + context_len - 1 + torch.arange(gamma + 1)
        column, positions, predicting = (
            x.to(device, non_blocking=True) for x in (column * text, position.clamp(min=0), predicting)
        )
        with torch.no_grad():
            ids = input_ids.gather(1, column)
            output = self.states(ids, text if pack else text.to(device), positions, pack)
        return _rows_at(output, predicting)

    def save_pretrained(self, directory: str | Path, state_dict: dict[str, torch.Tensor] | None = None) -> None:
        """Write the trained part with spd_config.json: the head, and the adapters or the full `own` backbone.

        `state_dict` replaces the module's own where that is sharded (names as in `self.state_dict()`).
        """
        state = self.state_dict() if state_dict is None else state_dict
        config, folder = self.config, Path(directory)
        if config.backbone == "own":
            backbone = _part_of(state, "backbone.")
            if config.lora_rank and any(".lora_" in name for name in backbone):
                adapters = str(folder / ADAPTER_DIR)
                self.backbone.save_pretrained(adapters, state_dict=backbone, save_embedding_layers=False)
            else:  # a full backbone, also where `state` has the adapters merged in
                plain = self.backbone.get_base_model() if config.lora_rank else self.backbone
                plain.save_pretrained(str(folder / BACKBONE_DIR), state_dict=backbone)
                config = replace(config, lora_rank=0)
        _save_head(folder, state, config)

    def save_with_adapters(self, directory: str | Path, *, state_dict: dict[str, torch.Tensor]) -> None:
        """Add the head and spd_config.json to a folder of adapters in peft's format, as `adapter_path` needs it.

        `state_dict`: the trained weights other than the adapters, by this module's names.
        """
        _save_head(Path(directory), state_dict, self.config)

    def load_trained(self, directory: str | Path) -> None:
        """Load the trained part saved in `directory`; raises ValueError or OSError if it does not fit."""
        load_trained(Path(directory), self.config, self.head, self.backbone)


def _save_head(folder: Path, state: dict[str, torch.Tensor], config: ScoringModelConfig) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    save_file(_part_of(state, "head."), folder / HEAD_FILE, metadata={"format": "pt"})
    config.save(folder)


def _part_of(state: dict[str, torch.Tensor], prefix: str) -> dict[str, torch.Tensor]:
    """The tensors whose names start with `prefix`, on the CPU, under the rest of their names."""
    part = {name.removeprefix(prefix): tensor for name, tensor in state.items() if name.startswith(prefix)}
    return {name: tensor.detach().cpu().contiguous() for name, tensor in part.items()}


def cut_context(
    attention_mask: torch.Tensor, spd_layout: torch.Tensor, keep: int
) -> tuple[int, torch.Tensor, torch.Tensor]:
    """The same blocks with the last `keep` tokens of each context: first column, mask [B, W], spd_layout [B, 5]."""
    layout = spd_layout.clone()
    layout[:, 0] += (spd_layout[:, 1] - keep).clamp(min=0)
    layout[:, 1] = spd_layout[:, 1].clamp(max=keep)
    first = int(layout[:, 0].min())
    layout[:, [0, 2, 4]] -= first
    mask = attention_mask[:, first:]
    return first, mask * (torch.arange(mask.shape[1]) >= layout[:, :1]), layout


def _rows_at(hidden: torch.Tensor, columns: torch.Tensor) -> torch.Tensor:
    """hidden [B, P, H] at columns [B, g] (cut to the last one) -> [B, g, H]."""
    columns = columns.clamp(max=hidden.shape[1] - 1)
    return hidden.gather(1, columns[..., None].expand(-1, -1, hidden.shape[-1]))


class AutoModelForSPDScoring:
    """Builds scorers from a config or from a saved directory."""

    @staticmethod
    def from_config(
        config: ScoringModelConfig, torch_dtype: torch.dtype = torch.float32, base_model: PreTrainedModel | None = None,
        without_weights: bool = False, **backbone_kwargs: Any,
    ) -> ScoringActor:  # fmt: skip
        """A scorer with a new head on config.base_model_path, or on the loaded `base_model`, which is shared.

        `without_weights`: the backbone is on the meta device, for an engine that fills it from another rank, and
        config.base_fingerprint stays empty.
        """
        if without_weights:
            hf_config = AutoConfig.from_pretrained(config.base_model_path, **backbone_kwargs)
            with torch.device("meta"):
                backbone = AutoModel.from_config(hf_config, dtype=torch_dtype)
        elif base_model is None:
            backbone = AutoModel.from_pretrained(config.base_model_path, dtype=torch_dtype, **backbone_kwargs)
        else:
            backbone = base_model.base_model
        width = backbone.config.get_text_config().hidden_size
        if config.hidden_size not in (0, width):
            raise ValueError(
                f"hidden_size={config.hidden_size}, but the model in {config.base_model_path!r} has {width}. "
                "Leave hidden_size at 0, or name the right model."
            )
        config.hidden_size = width
        if (config.backbone == "target" or config.lora_rank) and not without_weights:
            given = base_model is not None
            config.base_fingerprint = model_fingerprint(base_model if given else backbone, just_loaded=not given)
        if config.lora_rank:
            torch.manual_seed(config.seed)
        return ScoringActor(config, with_adapters(backbone, config))

    @staticmethod
    def from_pretrained(
        directory: str | Path, base_model_path: str | None = None, base_model: PreTrainedModel | None = None,
        torch_dtype: torch.dtype = torch.float32,
    ) -> ScoringActor:  # fmt: skip
        """The scorer saved in `directory`, on the model in its config, on `base_model_path`, or on `base_model`."""
        directory = Path(directory)
        config = ScoringModelConfig.load(directory)
        config.base_model_path = base_model_path or config.base_model_path
        if config.backbone == "own" and not config.lora_rank and base_model_path is None and base_model is None:
            # A full fine-tune contains its backbone; the model it started from is not needed.
            backbone = AutoModel.from_config(AutoConfig.from_pretrained(directory / BACKBONE_DIR), dtype=torch_dtype)
            model = ScoringActor(config, backbone)
        else:
            model = AutoModelForSPDScoring.from_config(config, torch_dtype, base_model)
        model.load_trained(directory)
        return model.eval()
