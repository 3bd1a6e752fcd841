"""Renders the chat templates that come with a model and are no more trusted than its weights."""

from __future__ import annotations

import bisect
import functools
import math
import threading
from typing import TYPE_CHECKING, Any

from verl.data.template_growth import growth
from verl.data.template_process import TEXT_LENGTH, LimitExceeded, RenderError, TemplateProcess
from verl.data.template_sizes import NUMBER_LENGTH
from verl.utils.time_limit import call_interruptibly, call_with_alarm
from verl.utils.visible_text import visible

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

LIMIT_S = 5.0  # seconds of one rendering, which usually takes a tenth of a millisecond
_FUNCTION_LENGTH = 4096  # of the description of a tool that is a Python function
_process = TemplateProcess()


class ChatTemplateError(ValueError):
    """A chat template is missing, raised an error, or exceeded a limit."""


def render_chat(tokenizer: PreTrainedTokenizerBase, messages: list[dict], **settings: Any) -> str:
    """The messages as text, by `tokenizer.apply_chat_template(messages, tokenize=False, **settings)`.

    transformers runs templates in Jinja's sandbox, which blocks attributes but neither endless loops nor large texts.
    A rendering is stopped after LIMIT_S seconds; where the template's syntax does not show that its texts stay below
    TEXT_LENGTH characters, it runs in a process with a limit on memory. Raises ChatTemplateError.
    """
    try:
        if (template := _growing(tokenizer, messages, settings)) is not None:
            return _process.render(LIMIT_S, template, tokenizer.special_tokens_map, messages, settings)
        in_main = threading.current_thread() is threading.main_thread()
        call = call_with_alarm if in_main else call_interruptibly
        return call(tokenizer.apply_chat_template, LIMIT_S, messages, tokenize=False, **settings)
    except LimitExceeded as error:
        problem = _refused(str(error))
    except TimeoutError:
        problem = _refused(f"did not end within {LIMIT_S:g} s and was stopped")
    except RenderError as error:
        problem = f"the chat template raised {error}"
    except Exception as error:  # a template can raise anything
        problem = f"the chat template raised {type(error).__name__}: {error}"
    raise ChatTemplateError(f"{tokenizer.name_or_path}: {visible(' '.join(problem.split())[:400])}")


def _refused(what: str) -> str:
    keys = "RL: actor_rollout_ref.model.custom_chat_template, SFT: data.chat_template"
    return f"the chat template {what}. Correct it, or set another ({keys})."


def _growing(tokenizer: PreTrainedTokenizerBase, messages: list[dict], settings: dict[str, Any]) -> str | None:
    """The template, if it may make more than TEXT_LENGTH characters of these messages; None for one that cannot.

    Also None for a tokenizer that renders by Python code of its own.
    """
    if _has_own_rendering(type(tokenizer)):
        return None
    template = tokenizer.get_chat_template(settings.get("chat_template"), settings.get("tools"))
    size = _size(messages, settings, tokenizer.special_tokens_map)
    return template if size > _largest_input(template) else None


@functools.lru_cache(maxsize=64)
def _largest_input(template: str) -> int:
    """The size of input up to which a rendering makes at most TEXT_LENGTH characters; -1 without a bound."""
    if (bound := growth(template)) is None:
        return -1

    def exceeds(size: int) -> bool:
        return not sum(factor * size**n for n, factor in enumerate(bound)) <= TEXT_LENGTH

    return bisect.bisect_left(range(TEXT_LENGTH), True, key=exceeds) - 1


@functools.cache
def _has_own_rendering(kind: type) -> bool:
    from transformers import PreTrainedTokenizerBase

    return kind.apply_chat_template is not PreTrainedTokenizerBase.apply_chat_template


def _size(*values: Any) -> float:
    """Characters of texts, entries of collections; infinite for what has no known size."""
    size, found = 0.0, list(values)
    for value in found:  # grows meanwhile
        if isinstance(value, str):
            size += len(value)
        elif isinstance(value, dict):
            size += len(value)
            found += value
            found += value.values()
        elif isinstance(value, list | tuple):
            size += len(value)
            found += value
        elif isinstance(value, int):
            size += max(NUMBER_LENGTH, value.bit_length())
        elif value is None or isinstance(value, float):
            size += NUMBER_LENGTH
        else:
            size += _FUNCTION_LENGTH if callable(value) else math.inf
    return size
