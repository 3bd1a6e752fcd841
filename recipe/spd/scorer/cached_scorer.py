"""Scores of an `own` backbone in each round of speculative decoding, without reading a context twice."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from recipe.spd.data.blocks import build_spd_input, left_padded_layout
from recipe.spd.scorer.masks import MASKS, create_position_ids, refuse_other_attention
from recipe.spd.scorer.model import ScoringActor, drafts_and_targets
from verl.models.kv_cache import RowCache, drop_rows

SPARE_SLOTS = 256  # tokens by which contexts may grow before they are read again


class CachedScorer:
    """Keys and values of the contexts stay between calls; a call feeds what the contexts gained, and the block.

    In every attention mask the context sees nothing but itself, so that its states never change while it grows. For
    backbones with full attention that read the whole context (`context_tokens` 0).
    """

    def __init__(self, model: ScoringActor, *, sep_token_id: int, pad_token_id: int) -> None:
        self.model = model
        self.sep, self.pad = sep_token_id, pad_token_id
        self._cache: RowCache | None = None
        self._rows: list[int] = []  # the question of each row of the cache
        self._contexts: list[list[int]] = []  # the tokens whose keys and values each row holds

    @torch.no_grad()
    def __call__(
        self, rows: Sequence[int], contexts: Sequence[list[int]], drafts: Sequence[list[int]],
        targets: Sequence[list[int]], device: torch.device,
    ) -> torch.Tensor:  # fmt: skip
        """z [B, longest draft] float32 of B blocks, as ScoringActor.forward; `rows` name the questions.

        Raises ValueError for a backbone whose sliding window is shorter than a block with its context.
        """
        config, backbone = self.model.config, self.model.backbone
        built = [build_spd_input(c, d, t, self.sep) for c, d, t in zip(contexts, drafts, targets, strict=True)]
        held = self._held_tokens(rows, contexts, max(len(ids) for ids, _ in built))
        # Row b feeds the columns held[b] .. held[b] + width - 1: its text, then padding that no token sees.
        width = max(len(ids) - count for (ids, _), count in zip(built, held, strict=True))
        total = max(held) + width
        ids = torch.tensor([ids + [self.pad] * (total - len(ids)) for ids, _ in built], device=device)
        text = torch.tensor([[1] * len(ids) + [0] * (total - len(ids)) for ids, _ in built], device=device)
        layout = torch.tensor([left_padded_layout(offsets, 0) for _, offsets in built], device=device)
        if config.attention == "causal":  # the other masks replace the model's own
            refuse_other_attention(backbone, total)
        columns = torch.tensor(held, device=device)[:, None] + torch.arange(width, device=device)
        dtype = next(backbone.parameters()).dtype
        mask = self._cache.announce(columns, dtype)
        if config.attention != "causal":
            whole = MASKS[config.attention](text, layout, dtype)  # [B, 1, total, total]
            mask = whole.gather(2, columns[:, None, :, None].expand(-1, 1, -1, total))[..., : mask.shape[-1]]
        fed = ids.gather(1, columns)
        states = backbone(
            input_ids=fed, attention_mask=mask, past_key_values=self._cache, use_cache=True,
            position_ids=create_position_ids(text, layout, config.attention).gather(1, columns),
        ).last_hidden_state  # fmt: skip
        self._contexts = [list(context) for context in contexts]
        layout[:, [0, 2, 4]] -= columns[:, :1]  # columns of what was fed
        return self.model.score_states(states, layout, *drafts_and_targets(fed, layout, max(map(len, drafts))))

    def _held_tokens(self, rows: Sequence[int], contexts: Sequence[list[int]], longest: int) -> list[int]:
        """How many tokens of each context the cache holds, after it was brought in line with `rows`.

        It starts anew, and holds none, unless `rows` are some of its own, whose contexts have grown within its slots.
        """
        left = set(rows)
        if self._cache is not None and left <= set(self._rows):
            order = drop_rows([row not in left for row in self._rows], [self._cache])
            self._rows, held = [self._rows[k] for k in order], [self._contexts[k] for k in order]
            fits = longest + max(map(len, held)) <= self._cache.writes.slots
            grown = all(context[: len(old)] == old for context, old in zip(contexts, held, strict=True))
            if self._rows == list(rows) and grown and fits:
                return [len(old) for old in held]
        layers = self.model.backbone.config.get_text_config().num_hidden_layers
        self._rows, self._cache = list(rows), RowCache(len(rows), longest + SPARE_SLOTS, layers)
        return [0] * len(rows)
