"""Renders the chat templates that come with a model and are no more trusted than its weights."""

from __future__ import annotations

import functools
import os
import pickle
import re
import subprocess
import sys
import threading
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from jinja2 import pass_context
from jinja2.runtime import Context

from verl.data import template_process
from verl.data.time_limit import call_interruptibly
from verl.utils.children import ChildDied, ProcessorSeconds, Program
from verl.utils.tokenizer import special_ids, stop_ids
from verl.utils.visible_text import visible

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

LIMIT_S = 5.0  # seconds of processor time of one rendering, which usually takes a tenth of a millisecond
_PROBE = "4217"
_ROLES = {f"{role}_token" for role in ("bos", "eos", "unk", "sep", "pad", "cls", "mask")}
_PADDING = re.compile(r"(?:^|[\W_])pad\W*$", re.IGNORECASE)  # <|image_pad|>, but not <scratchpad>


class ChatTemplateError(ValueError):
    """A chat template is missing, raised an error, or exceeded a limit."""


class _Problem(RuntimeError):
    """What a template did instead of making a text."""


def render_chat(tokenizer: PreTrainedTokenizerBase, messages: list[dict], **settings: Any) -> str:
    """The messages as text, by `tokenizer.apply_chat_template(messages, tokenize=False, **settings)`.

    transformers runs templates in Jinja's sandbox, which blocks attributes but neither endless loops nor large texts.
    So the template is rendered in a subprocess with limits on time, memory and the length of the text. A tokenizer that
    renders by Python code of its own does so here, for at most LIMIT_S seconds of its thread. Raises ChatTemplateError.
    """
    from transformers import PreTrainedTokenizerBase

    try:
        if type(tokenizer).apply_chat_template is PreTrainedTokenizerBase.apply_chat_template:
            settings |= _rendered_by_process(tokenizer, settings)
            return tokenizer.apply_chat_template(messages, tokenize=False, **settings)
        limit = ProcessorSeconds(LIMIT_S)
        return call_interruptibly(tokenizer.apply_chat_template, limit, messages, tokenize=False, **settings)
    except _Problem as error:
        problem = f"the chat template {error}"
    except TimeoutError:
        what = f"did not end within {LIMIT_S:g} s of processor time and was stopped"
        problem = f"the chat template {_refused(what)}"
    except Exception as error:  # a template can raise anything
        problem = f"the chat template raised {type(error).__name__}: {error}"
    raise ChatTemplateError(f"{tokenizer.name_or_path}: {visible(' '.join(problem.split())[:400])}")


def answer_text(tokenizer: PreTrainedTokenizerBase, ids: Iterable[int]) -> str:
    """The text of the ids, without those that begin or end turns, pad, or have another role of the tokenizer's own
    (bos, unk).

    Other special tokens are part of the text: a reward looks for markers such as <think> or <answer>, which some
    tokenizers have as special tokens.
    """
    from transformers import PreTrainedTokenizerBase

    if not isinstance(tokenizer, PreTrainedTokenizerBase):
        return tokenizer.decode(ids, skip_special_tokens=True)
    left_out = _left_out(tokenizer)
    return tokenizer.decode([token for token in ids if token not in left_out])


@functools.lru_cache(maxsize=8)
def _left_out(tokenizer: PreTrainedTokenizerBase) -> frozenset[int]:
    """The ids that `answer_text` leaves out."""
    special = special_ids(tokenizer)
    tokens = [token for role, token in tokenizer.special_tokens_map.items() if role in _ROLES]
    ids = special.intersection([*tokenizer.convert_tokens_to_ids(tokens), *stop_ids(tokenizer)])
    ids |= {token for token in special if _PADDING.search(tokenizer.convert_ids_to_tokens(token))}
    try:  # a base model's eos token is not what ends the turns of its chat template
        turn = render_chat(tokenizer, [{"role": "user", "content": _PROBE}])
    except ChatTemplateError:
        return frozenset(ids)
    return frozenset(ids | special.intersection(tokenizer(turn, add_special_tokens=False)["input_ids"]))


def _refused(what: str) -> str:
    keys = "RL: actor_rollout_ref.model.custom_chat_template, SFT: data.chat_template"
    return f"{what}. Correct it, or set another ({keys})."


class _TemplateProcess:
    """A subprocess shared by all threads, started on first use and restarted after it has ended.

    It ends when this process ends, because its end of the connection is then closed. It is no process of
    multiprocessing: data loader and grading workers render templates too, are daemonic, and cannot fork safely.
    """

    def __init__(self) -> None:
        self._reset()
        os.register_at_fork(after_in_child=self._reset)  # a forked process starts a subprocess of its own

    def _reset(self) -> None:
        self._lock = threading.Lock()
        self._process: Program | None = None

    def render(self, template: str, variables: dict[str, Any]) -> str:
        """The text of a template with these variables. Raises TimeoutError after LIMIT_S, or _Problem."""
        memory, length = template_process.MEMORY_BYTES, template_process.TEXT_LENGTH
        request = pickle.dumps((LIMIT_S, memory, length, template, variables))
        with self._lock:
            if self._process is None or self._process.gone or self._process.process.poll() is not None:
                # -P: modules in its folder must not shadow those of the standard library.
                script = [sys.executable, "-P", template_process.__file__]
                self._process = Program(script, stdout=subprocess.DEVNULL)
            try:
                # Bytes, not `call`: a template that gets at the process must not make a pickle for this one.
                answer = self._process.ask(ProcessorSeconds(LIMIT_S), request)
            except ChildDied as error:
                raise _Problem(_refused(f"ended its process with exit code {error.exit_code}")) from None
        kind, _, text = answer.partition(b" ")
        if kind == template_process.MEMORY:
            raise _Problem(_refused(f"needed more than {memory >> 20} MiB of memory and was stopped"))
        if kind == template_process.LONG:
            raise _Problem(_refused(f"made a text of more than {length} characters, which was not taken"))
        if kind == template_process.ERROR:
            raise _Problem(f"raised {text.decode('utf-8', 'surrogatepass')}")
        return text.decode("utf-8", "surrogatepass")


_process = _TemplateProcess()


def _rendered_by_process(tokenizer: PreTrainedTokenizerBase, settings: dict[str, Any]) -> dict[str, Any]:
    """Arguments of `apply_chat_template` by which transformers prepares the variables and the subprocess renders.

    They replace the template by one that only calls a function, which passes the variables to the subprocess.
    """
    template = tokenizer.get_chat_template(settings.get("chat_template"), settings.get("tools"))

    @pass_context
    def render(context: Context) -> str:
        functions = [render, *context.environment.globals.values()]  # the subprocess has Jinja's functions
        variables = {name: value for name, value in context.parent.items() if not any(value is f for f in functions)}
        return _process.render(template, variables)

    # transformers refuses to continue a message whose field, "content" if none is set, does not occur in the template.
    fields = f"{{# content {settings.get('continue_final_message')} #}}"
    return {"chat_template": "{{ render_by_process() }}" + fields, "render_by_process": render}
