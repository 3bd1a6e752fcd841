"""Renders the chat templates that come with a model and are no more trusted than its weights."""

from __future__ import annotations

import functools
import threading
from typing import TYPE_CHECKING, Any

from jinja2 import pass_context
from jinja2.runtime import Context

from verl.data.template_process import LimitExceeded, RenderError, TemplateProcess
from verl.utils.time_limit import ProcessorSeconds, call_interruptibly, call_with_alarm
from verl.utils.visible_text import visible

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

LIMIT_S = 5.0  # seconds of processor time of one rendering, which usually takes a tenth of a millisecond
_process = TemplateProcess()


class ChatTemplateError(ValueError):
    """A chat template is missing, raised an error, or exceeded a limit."""


def render_chat(tokenizer: PreTrainedTokenizerBase, messages: list[dict], **settings: Any) -> str:
    """The messages as text, by `tokenizer.apply_chat_template(messages, tokenize=False, **settings)`.

    transformers runs templates in Jinja's sandbox, which blocks attributes but neither endless loops nor large texts.
    So the template is rendered in a subprocess with limits on time, memory and the length of the text. A tokenizer that
    renders by Python code of its own does so here, for at most LIMIT_S seconds of its thread. Raises ChatTemplateError.
    """
    try:
        if not _has_own_rendering(type(tokenizer)):
            settings |= _rendered_by_process(tokenizer, settings)
            return tokenizer.apply_chat_template(messages, tokenize=False, **settings)
        in_main = threading.current_thread() is threading.main_thread()
        call = call_with_alarm if in_main else call_interruptibly
        limit = ProcessorSeconds(LIMIT_S)
        return call(tokenizer.apply_chat_template, limit, messages, tokenize=False, **settings)
    except LimitExceeded as error:
        problem = _refused(str(error))
    except TimeoutError:
        problem = _refused(f"did not end within {LIMIT_S:g} s of processor time and was stopped")
    except RenderError as error:
        problem = f"the chat template raised {error}"
    except Exception as error:  # a template can raise anything
        problem = f"the chat template raised {type(error).__name__}: {error}"
    raise ChatTemplateError(f"{tokenizer.name_or_path}: {visible(' '.join(problem.split())[:400])}")


def _refused(what: str) -> str:
    keys = "RL: actor_rollout_ref.model.custom_chat_template, SFT: data.chat_template"
    return f"the chat template {what}. Correct it, or set another ({keys})."


def _rendered_by_process(tokenizer: PreTrainedTokenizerBase, settings: dict[str, Any]) -> dict[str, Any]:
    """Arguments of `apply_chat_template` by which transformers prepares the variables and the subprocess renders.

    They replace the template by one that only calls a function, which passes the variables to the subprocess.
    """
    template = tokenizer.get_chat_template(settings.get("chat_template"), settings.get("tools"))

    @pass_context
    def render(context: Context) -> str:
        functions = [render, *context.environment.globals.values()]  # the subprocess has Jinja's functions
        variables = {name: value for name, value in context.parent.items() if not any(value is f for f in functions)}
        return _process.render(LIMIT_S, template, variables)

    # transformers refuses to continue a message whose field, "content" if none is set, does not occur in the template.
    fields = f"{{# content {settings.get('continue_final_message')} #}}"
    return {"chat_template": "{{ render_by_process() }}" + fields, "render_by_process": render}


@functools.cache
def _has_own_rendering(kind: type) -> bool:
    from transformers import PreTrainedTokenizerBase

    return kind.apply_chat_template is not PreTrainedTokenizerBase.apply_chat_template

