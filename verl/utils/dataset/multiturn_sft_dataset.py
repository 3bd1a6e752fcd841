"""Conversations for supervised fine-tuning: every assistant turn is learned."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import numpy as np
from omegaconf import DictConfig

from verl.utils.dataset.sft_dataset import Segment, SFTDataset


def convert_nested_value_to_list_recursive(data_item: Any) -> Any:
    """Plain lists and dicts of what parquet readers give (arrays within arrays)."""
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
        """Alternately what the assistant is told and what it says: prefixes of the conversation, through the template.

        A template that writes a turn differently once others follow (some drop earlier thoughts) has no such
        prefixes: the row is refused.
        """
        told = self.chat(item, self.keys["messages_key"], "data.multiturn.messages_key")
        messages = [_without_nulls(message) for message in told]
        settings = self._row_settings(item)
        whole = self.render(item, messages, **settings)
        pieces: list[Segment] = []
        done = 0
        for number, message in enumerate(messages):
            if message["role"] != "assistant":
                continue
            before = self.render(item, messages[:number], add_generation_prompt=True, **settings) if number else ""
            after = self.render(item, messages[: number + 1], **settings)
            if not (whole.startswith(after) and after.startswith(before) and done <= len(before)):
                raise self.error(item, _not_a_prefix(number))
            pieces += [(whole[done : len(before)], False), (whole[len(before) : len(after)], True)]
            done = len(after)
        if not pieces:
            raise self.error(item, "no message has the role 'assistant': nothing can be learned from it. Drop the row.")
        return [*pieces, (whole[done:], False)] if whole[done:] else pieces

    def _row_settings(self, item: int) -> dict[str, Any]:
        """What the row itself tells the template."""
        row, found = self.rows[item], {}
        if (tools := row.get(self.keys["tools_key"])) is not None:
            found["tools"] = json.loads(tools) if isinstance(tools, str) else tools
        if (thinking := row.get(self.keys["enable_thinking_key"])) is not None:
            found["enable_thinking"] = thinking
        return found


def _without_nulls(message: dict[str, Any]) -> dict[str, Any]:
    """A message without the keys that only other rows' messages have, which parquet fills with nulls."""
    plain = convert_nested_value_to_list_recursive(message)
    return {key: value for key, value in plain.items() if value is not None or key == "content"}


def _not_a_prefix(number: int) -> str:
    return (
        f"the chat template writes message {number} differently once other messages follow, so that the assistant's "
        "tokens cannot be told. Set data.chat_template to one that does not, or cut the row into one per answer."
    )
