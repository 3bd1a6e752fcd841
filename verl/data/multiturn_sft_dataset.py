"""Conversations for supervised fine-tuning, in which every assistant turn is learned."""

import json
import os
from collections.abc import Sequence
from typing import Any

import numpy as np
from omegaconf import DictConfig

from verl.data.sft_dataset import Segment, SFTDataset


def convert_nested_value_to_list_recursive(data_item: Any) -> Any:
    """Nested arrays, as parquet readers return them, to plain lists and dicts."""
    if isinstance(data_item, dict):
        return {key: convert_nested_value_to_list_recursive(value) for key, value in data_item.items()}
    if isinstance(data_item, list | tuple | np.ndarray):
        return [convert_nested_value_to_list_recursive(value) for value in data_item]
    return data_item.item() if isinstance(data_item, np.generic) else data_item


class MultiTurnSFTDataset(SFTDataset):
    """SFTDataset whose rows hold messages, tools and enable_thinking (`data.multiturn.*_key`; the last two may be
    missing). loss_mask is 1 on each assistant turn, its end-of-turn token included, 0 on every other token.
    """

    def __init__(
        self, parquet_files: str | Sequence[str], tokenizer: Any, config: DictConfig, processor: Any = None,
        max_samples: int = -1,
    ) -> None:
        super().__init__(parquet_files, tokenizer, config, max_samples)
        self.processor = processor
        self.keys = self.setting("multiturn")

    def segments(self, item: int) -> list[Segment]:
        """Alternately the assistant's input and its answers, cut from the rendered conversation.

        The text up to each turn must be a prefix of the full text. A template that renders a turn differently once
        others follow (some drop earlier thoughts) is refused.
        """
        messages = self.chat(item, self.keys["messages_key"], "data.multiturn.messages_key")
        settings = self._row_settings(item)
        full = self.render(item, messages, **settings)
        pieces: list[Segment] = []
        done = 0
        for number, message in enumerate(messages):
            if message["role"] != "assistant":
                continue
            before = self.render(item, messages[:number], add_generation_prompt=True, **settings) if number else ""
            after = self.render(item, messages[: number + 1], **settings)
            bare = before if after.startswith(before) else self.render(item, messages[:number], **settings)
            if bare != before and after.startswith(bare):
                begun = before[max(len(bare), len(os.path.commonprefix([before, after]))) :]
                raise self.error(
                    item,
                    f"the chat template's generation prompt ends with {begun!r}, which its text of message {number} "
                    "does not have there: what is learned would not be what the model has to generate. Set "
                    "data.chat_template to one without it, or a key of data.apply_chat_template_kwargs that turns it "
                    "off.",
                )
            if not (full.startswith(after) and after.startswith(before) and done <= len(before)):
                raise self.error(
                    item,
                    f"the chat template writes message {number} differently once other messages follow, so that the "
                    "assistant's tokens cannot be identified. Set data.chat_template to one that does not, or split "
                    "the row into one row per answer.",
                )
            pieces += [(full[done : len(before)], False), (full[len(before) : len(after)], True)]
            done = len(after)
        if not pieces:
            raise self.error(item, "no message has the role 'assistant': nothing can be learned from it. Drop the row.")
        return [*pieces, (full[done:], False)] if full[done:] else pieces

    def _row_settings(self, item: int) -> dict[str, Any]:
        """Template settings of the row itself."""
        row, settings = self.rows[item], {}
        if (tools := row.get(self.keys["tools_key"])) is not None:
            settings["tools"] = json.loads(tools) if isinstance(tools, str) else self.plain(item, tools)
        if (thinking := row.get(self.keys["enable_thinking_key"])) is not None:
            settings["enable_thinking"] = thinking
        return settings
