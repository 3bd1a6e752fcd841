"""Renders the chat templates that come with a model and are no more trusted than its weights."""

from __future__ import annotations

import functools
import os
import threading
from typing import TYPE_CHECKING, Any

from verl.utils.time_limit import call_interruptibly, timeout_limit
from verl.utils.visible_text import visible

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

LIMIT_S = 5.0  # seconds of one rendering, which usually takes a tenth of a millisecond


class ChatTemplateError(ValueError):
    """A chat template is missing, raised an error, ran too long or uses an operator that is refused."""


def render_chat(tokenizer: PreTrainedTokenizerBase, messages: list[dict], **settings: Any) -> str:
    """The messages as text, by `tokenizer.apply_chat_template(messages, tokenize=False, **settings)`.

    transformers runs templates in Jinja's sandbox, which blocks attributes but neither endless loops nor large texts: a
    rendering is stopped after LIMIT_S seconds. Raises ChatTemplateError.
    """
    from transformers import PreTrainedTokenizerBase

    try:
        if type(tokenizer).apply_chat_template is PreTrainedTokenizerBase.apply_chat_template:
            _refuse_powers(tokenizer.get_chat_template(settings.get("chat_template"), settings.get("tools")))
        render = tokenizer.apply_chat_template
        if threading.current_thread() is threading.main_thread():
            return timeout_limit(LIMIT_S, use_signals=True)(render)(messages, tokenize=False, **settings)
        return call_interruptibly(render, LIMIT_S, messages, tokenize=False, **settings)
    except TimeoutError:
        problem = (
            f"the chat template did not end within {LIMIT_S:g} s and was stopped. Correct it, or set "
            "another (RL: actor_rollout_ref.model.custom_chat_template, SFT: data.chat_template)."
        )
    except Exception as error:  # a template can raise anything
        problem = visible(" ".join(f"the chat template raised {type(error).__name__}: {error}".split())[:300])
    raise ChatTemplateError(f"{tokenizer.name_or_path}: {problem}")


@functools.lru_cache(maxsize=16)
def _refuse_powers(template: str) -> None:
    """Raise ValueError for the operator `**`: 10 ** 10 ** 9 is one instruction that no signal interrupts."""
    from jinja2 import Environment

    if any(kind == "operator" and value == "**" for _, kind, value in Environment().lex(template)):
        raise ValueError("the operator ** is not allowed in a chat template; write the number out.")


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
