"""The scorer that reads the hidden states which the target computed when it verified the draft."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from transformers import PretrainedConfig

from recipe.spd.data.blocks import Block
from recipe.spd.scorer.config import ScoringModelConfig
from recipe.spd.scorer.features import FeatureStore
from recipe.spd.scorer.heads import LOGIT_FEATURES, LayerHead, PairHead, logit_features
from recipe.spd.scorer.masks import sees_everything
from recipe.spd.scorer.model import ScoringActor, drafts_and_targets, host_columns, rows_at, save_head
from recipe.spd.scorer.token_tree import TREE_TOKENS, TokenTree
from verl.trainer.run.ranks import any_rank
from verl.training.parallel.sharding import full_tensor
from verl.training.policy.packing import OnHost

LOGIT_ROWS = 512  # positions whose logits are in memory at once
WORTH_A_TREE = 4  # a tree with its quadratic mask is used if it has at most this part of the tokens


class TargetHeadScorer(ScoringActor):
    """A small head over the frozen target's hidden states and the embeddings of d_i and t_i; trains the head.

    A subclass may override `make_head` alone. Its head is called as head(hidden, draft, target, next_hidden, values=x)
    and returns z [B, g]: `hidden` [B, g, H] are the states that predicted t_1..t_g, `draft` and `target` the embeddings
    of d_i and t_i, `next_hidden` the states over d_i, `values` [B, g, 2] with spd.head_inputs=logits, else None. With
    spd.state_layer the states after that layer follow `next_hidden`, over the token before d_i and over d_i.

    In this class "states" [.., S] are the last hidden states [.., H], and with spd.state_layer [.., 2 H] those followed
    by the ones after that layer.
    """

    def __init__(self, config: ScoringModelConfig, backbone: nn.Module) -> None:
        super().__init__(config, backbone)
        self.features: FeatureStore | None = None  # set by the training's loader
        self.backbone.requires_grad_(False)

    @classmethod
    def make_head(cls, config: ScoringModelConfig) -> nn.Module:
        values = LOGIT_FEATURES if config.head_inputs == "logits" else 0
        if config.state_layer:
            return LayerHead(config.hidden_size, config.head_size, values)
        return PairHead(config.hidden_size, config.head_size, more=int(config.head_inputs != "state"), values=values)

    @classmethod
    def is_complete(cls, config: ScoringModelConfig) -> bool:
        return False

    @classmethod
    def check_target(cls, config: ScoringModelConfig, target: PretrainedConfig) -> None:
        # In training the backbone has no output layer: its logits come from the embedding.
        is_plain = target.tie_word_embeddings and not getattr(target, "final_logit_softcapping", None)
        if config.head_inputs == "logits" and not is_plain:
            raise ValueError(
                f"spd.head_inputs=logits needs a target with tied embeddings and plain logits, unlike "
                f"{config.base_model_path}. Use spd.head_inputs=pair."
            )
        if config.state_layer and config.state_layer >= target.num_hidden_layers:
            raise ValueError(
                f"spd.state_layer={config.state_layer} must be an inner layer of {config.base_model_path}, which has "
                f"{target.num_hidden_layers}. Use a number below that, or null."
            )

    def train(self, mode: bool = True) -> TargetHeadScorer:
        """As usual, but a frozen target never leaves evaluation mode."""
        super().train(mode)
        self.backbone.eval()
        return self

    def forward(
        self, input_ids: torch.Tensor, attention_mask: torch.Tensor, position_ids: torch.Tensor,
        spd_layout: torch.Tensor, remove_padding: bool = False, host: OnHost | None = None,
    ) -> torch.Tensor:  # fmt: skip
        pack = self.packs(remove_padding)
        texts = input_ids if host is None else host.columns.get("input_ids", input_ids)
        (layout,) = host_columns(host, spd_layout=spd_layout)
        gamma = int(layout[:, 3].max())
        draft_ids, target_ids = drafts_and_targets(input_ids, spd_layout, gamma)
        states = self._target_states(input_ids, texts, layout, gamma, pack)
        return self.mask_padding(self.score_features(states, draft_ids, target_ids), spd_layout[:, 3:4])

    def read(self, **inputs: Any) -> torch.Tensor:
        """The states [B, P, S] on the inputs of the target's forward."""
        output = self.backbone(**inputs, output_hidden_states=self.config.state_layer is not None)
        return joined(output.last_hidden_state, output.hidden_states, self.config.state_layer)

    def score_features(
        self, states: torch.Tensor, draft_ids: torch.Tensor, target_ids: torch.Tensor,
        logits: torch.Tensor | None = None,
    ) -> torch.Tensor:  # fmt: skip
        """states [B, g + 1, S]: the target's (the last ones after its final norm) over the token before d_1 and over
        d_1 to d_g, of which the i-th predicted t_i; ids [B, g]; the target's logits [B, g, V] -> z [B, g].

        A head that reads logits computes them from the states where they are not given.
        """
        hidden, *layer = states.split(self.config.hidden_size, dim=-1)
        reads_logits = self.config.head_inputs == "logits"
        mismatch = draft_ids != target_ids
        values = self._logit_values(hidden[:, :-1], draft_ids, mismatch, logits) if reads_logits else None
        more = [hidden[:, 1:]]
        for inner in layer:  # none without spd.state_layer
            more += [inner[:, :-1], inner[:, 1:]]
        z = self.head(hidden[:, :-1], *self.embedded(draft_ids, target_ids), *more, values=values)
        return self.mask_matches(z, draft_ids, target_ids)

    def block_scores(self, **tokens: Any) -> Callable[[Block], torch.Tensor]:
        """See ScoringActor; reads the hidden states of the verification."""

        def z_of(block: Block) -> torch.Tensor:
            states = joined(block.target_hidden, block.target_layers, self.config.state_layer)
            return self.score_features(states, block.draft_ids, block.target_ids[:, :-1], block.target_logits[:, :-1])

        return z_of

    @torch.no_grad()
    def _logit_values(
        self, hidden: torch.Tensor, draft_ids: torch.Tensor, mismatch: torch.Tensor, logits: torch.Tensor | None
    ) -> torch.Tensor:  # fmt: skip
        """logit_features [B, g, 2] at the mismatches, 0 elsewhere, in parts: a vocabulary's logits are large."""
        given = (hidden if logits is None else logits)[mismatch].split(LOGIT_ROWS)
        parts = [logit_features(self._logits(part) if logits is None else part, ids)
                 for part, ids in zip(given, draft_ids[mismatch].split(LOGIT_ROWS), strict=True)]  # fmt: skip
        values = torch.zeros(*draft_ids.shape, LOGIT_FEATURES, device=hidden.device)
        values[mismatch] = torch.cat(parts)
        return values

    def _logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """[N, H] -> [N, V] by the target's output matrix, which its embedding is."""
        self.check_target(self.config, self.backbone.config.get_text_config())
        return F.linear(hidden, full_tensor(self.backbone.get_input_embeddings().weight).to(hidden.dtype))

    def _target_states(
        self, input_ids: torch.Tensor, texts: torch.Tensor, layout: torch.Tensor, gamma: int, pack: bool
    ) -> torch.Tensor:
        """[B, gamma + 1, S]: the frozen target's states where it predicted t_1..t_{gamma+1}.

        texts: input_ids, wherever it is cheap to read. With a feature store only blocks that were never seen are
        forwarded.
        """
        if self.features is None:
            return self._forward_target(input_ids, layout, gamma, pack)
        # Context and draft, with the context's negated length between them: no other block has the same numbers.
        blocks = [
            (*text[start : start + context].tolist(), -context, *text[draft : draft + length].tolist())
            for text, (start, context, draft, length, _) in zip(texts.cpu().numpy(), layout.tolist(), strict=True)
        ]
        states = self.features.get_many(blocks)
        missing = list({block: i for i, block in enumerate(blocks) if states[i] is None}.values())
        if any_rank(bool(missing), input_ids.device):
            # A sharded target is gathered by all ranks together: a rank that misses nothing forwards one row too.
            rows = missing or [0]
            drafts = layout[rows, 3].tolist()
            fresh = self._forward_tree([blocks[i] for i in rows], drafts, input_ids.device)
            if fresh is None:
                read = self._forward_target(input_ids[rows], layout[rows], gamma, pack)
                fresh = [row[: draft + 1] for row, draft in zip(read, drafts, strict=True)]
            self.features.put_many([blocks[i] for i in rows], fresh)
            states = self.features.get_many(blocks)
        padded = torch.nn.utils.rnn.pad_sequence(states, batch_first=True)  # [B, <= gamma + 1, S]
        return F.pad(padded, (0, 0, 0, gamma + 1 - padded.shape[1])).to(input_ids.device)

    @torch.no_grad()
    def _forward_tree(
        self, blocks: Sequence[tuple[int, ...]], drafts: Sequence[int], device: torch.device
    ) -> list[torch.Tensor] | None:
        """States [g + 1, S] of each block (as keys of the feature store) with a draft of g tokens, as in `drafts`.

        One forward reads common beginnings once; None where the target's attention excludes that, or blocks have little
        in common.
        """
        longest = max(map(len, blocks)) - 1
        if not sees_everything(self.backbone, longest):
            return None
        tree = TokenTree([[token for token in block if token >= 0] for block in blocks])
        if len(tree.ids) > min(TREE_TOKENS, len(blocks) * longest // WORTH_A_TREE):
            return None
        states = self.read(
            input_ids=tree.ids[None].to(device), position_ids=tree.positions[None].to(device), use_cache=False,
            attention_mask=tree.mask(self.backbone.dtype).to(device),
        )[0]  # fmt: skip
        return [states[path[-g - 1 :].to(device)] for path, g in zip(tree.paths, drafts, strict=True)]

    def _forward_target(self, input_ids: torch.Tensor, layout: torch.Tensor, gamma: int, pack: bool) -> torch.Tensor:
        """`_target_states` by a forward over context and draft, right-aligned; layout [B, 5] is on the host."""
        device = input_ids.device
        start, context_len, draft_start, draft_len = (layout[:, i : i + 1] for i in range(4))  # [B, 1]
        length = context_len + draft_len
        width = int(length.max())
        padding = width - length
        position = torch.arange(width)[None, :] - padding  # [B, W], below 0 in the padding
        is_token = (position >= 0).long()
        # The column of input_ids that has the token of each position.
        source = torch.where(position < context_len, start + position, draft_start + position - context_len) * is_token
        # The state over the token before d_i predicted t_i.
        predicting = padding + context_len - 1 + torch.arange(gamma + 1)
        source, positions, predicting = (
            x.to(device, non_blocking=True) for x in (source, position.clamp(min=0), predicting)
        )
        with torch.no_grad():
            ids = input_ids.gather(1, source)
            output = self.states(ids, is_token if pack else is_token.to(device), positions, pack)
        return rows_at(output, predicting)

    def save_pretrained(self, directory: str | Path, state_dict: dict[str, torch.Tensor] | None = None) -> None:
        save_head(Path(directory), self.state_dict() if state_dict is None else state_dict, self.config)


def joined(last: torch.Tensor, layers: Sequence[torch.Tensor] | None, layer: int | None) -> torch.Tensor:
    """The last hidden states [.., H], followed by layers[layer] where a layer is given: [.., S]."""
    return last if layer is None else torch.cat([last, layers[layer]], dim=-1)
