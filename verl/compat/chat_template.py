"""Compatibility with verl: the token ids that a chat template puts in front of a conversation and of an answer."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

from verl.data.chat_template import render_chat

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


def initialize_system_prompt(tokenizer: PreTrainedTokenizerBase, **apply_chat_template_kwargs: Any) -> list[int]:
    """The ids that the template puts in front of a conversation without a system message; [] for none.

    It is the text before the first question without the header of a user's turn. That header is what follows an answer
    when another question comes, but not at the end of the text.
    """
    asked, answered = "question-7f3a", "answer-7f3a"
    pair = [{"role": "user", "content": asked}, {"role": "assistant", "content": answered}]
    one, two = (render_chat(tokenizer, pair * n, **apply_chat_template_kwargs) for n in (1, 2))
    texts = one.partition(asked)[0], two.split(answered)[1].partition(asked)[0], one.rpartition(answered)[2]
    before, between, end = (tokenizer(text, add_special_tokens=False)["input_ids"] for text in texts)
    head = between[len(os.path.commonprefix([between, end])) :]
    return before[: len(before) - len(os.path.commonprefix([before[::-1], head[::-1]]))]


def extract_system_prompt_and_generation(
    tokenizer: PreTrainedTokenizerBase, **apply_chat_template_kwargs: Any
) -> tuple[list[int], list[int]]:
    """The ids of `initialize_system_prompt`, and those that `add_generation_prompt` adds to a user's turn."""
    user = [{"role": "user", "content": ""}]
    without = _template_ids(tokenizer, user, **apply_chat_template_kwargs)
    prompted = _template_ids(tokenizer, user, add_generation_prompt=True, **apply_chat_template_kwargs)
    return initialize_system_prompt(tokenizer, **apply_chat_template_kwargs), prompted[len(without) :]


def _template_ids(tokenizer: PreTrainedTokenizerBase, messages: list[dict], **settings: Any) -> list[int]:
    return tokenizer(render_chat(tokenizer, messages, **settings), add_special_tokens=False)["input_ids"]
