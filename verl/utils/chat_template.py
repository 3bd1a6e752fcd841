"""Renders chat templates, which come with a model like its weights and are trusted as little."""

from __future__ import annotations

import atexit
import json
import os
import select
import subprocess
import sys
import threading
import time
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

LIMIT_S = 2.0  # seconds of one rendering
START_S = 60.0  # seconds until the process is there: a busy machine reads transformers slowly
RENDERER = Path(__file__).with_name("chat_template_renderer.py")


class ChatTemplateError(ValueError):
    """A chat template failed, ran too long or is no template; the text says which."""


def render_chat(tokenizer: PreTrainedTokenizerBase, messages: list[dict], **settings: Any) -> str:
    """The text that the tokenizer's chat template makes of the messages.

    `settings` are those of `apply_chat_template` (add_generation_prompt, tools, a template's own). The template runs in
    a process of its own, which may use LIMIT_S seconds and is killed then. ChatTemplateError says what went wrong.
    """
    from transformers import PreTrainedTokenizerBase

    if type(tokenizer).apply_chat_template is not PreTrainedTokenizerBase.apply_chat_template:
        return tokenizer.apply_chat_template(messages, tokenize=False, **settings)  # the tokenizer's own code, no template
    try:
        template = tokenizer.get_chat_template(settings.pop("chat_template", None), settings.get("tools"))
    except ValueError as error:
        raise ChatTemplateError(f"{tokenizer.name_or_path} has no chat template to use: {error}") from error
    request = {"conversations": [messages], "chat_template": template, **tokenizer.special_tokens_map, **settings}
    try:
        line = json.dumps(request)
    except TypeError as error:
        raise ChatTemplateError(f"messages and settings of a chat must be plain values: {error}") from error
    return _renderer().render(line)


class _Renderer:
    """The process that renders, started when it is first needed, and again after it was killed."""

    def __init__(self) -> None:
        self.pid = os.getpid()
        self.lock = threading.Lock()
        self.process: subprocess.Popen | None = None
        atexit.register(self.stop)

    def render(self, request: str) -> str:
        with self.lock:
            if self.process is None or self.process.poll() is not None:
                self._start()
            try:
                self.process.stdin.write(request.encode() + b"\n")
                self.process.stdin.flush()
            except BrokenPipeError:  # it died between the calls; the answer below is empty then
                pass
            answer = self._answer(LIMIT_S)
        if answer is None:
            raise ChatTemplateError(
                f"the chat template did not end within {LIMIT_S:g} s or {'256'} MiB and was stopped; look at it, or set "
                "actor_rollout_ref.model.custom_chat_template."
            )
        if "error" in answer:
            raise ChatTemplateError(answer["error"])
        return answer["text"]

    def _start(self) -> None:
        # Nothing of our environment: a template has no business with it.
        kept = {key: os.environ[key] for key in ("PATH", "HOME", "TMPDIR", "LANG") if key in os.environ}
        self.process = subprocess.Popen(
            [sys.executable, "-I", str(RENDERER)], stdin=subprocess.PIPE, stdout=subprocess.PIPE,
            env={**kept, "HF_HUB_OFFLINE": "1", "USE_TORCH": "0"}, start_new_session=True,
        )  # fmt: skip
        if self._answer(START_S) is None:
            raise RuntimeError(f"{RENDERER} did not start within {START_S:g} s.")

    def _answer(self, seconds: float) -> dict[str, str] | None:
        """One line of JSON; None, and the process is gone, where none came in time."""
        end, got = time.monotonic() + seconds, b""
        while not got.endswith(b"\n"):
            left = end - time.monotonic()
            ready = left > 0 and select.select([self.process.stdout], [], [], left)[0]
            piece = os.read(self.process.stdout.fileno(), 1 << 20) if ready else b""
            if not piece:
                self.stop()
                return None
            got += piece
        return json.loads(got)

    def stop(self) -> None:
        """End the process; a forked child leaves its parent's alone."""
        process, self.process = self.process, None
        if process is not None and self.pid == os.getpid():
            process.kill()
            process.wait()
            for pipe in (process.stdin, process.stdout):
                with suppress(BrokenPipeError):
                    pipe.close()


_of_this_process: list[_Renderer] = []


def _renderer() -> _Renderer:
    """This process's renderer: a forked worker of a data loader must not write into its parent's pipe."""
    if not _of_this_process or _of_this_process[0].pid != os.getpid():
        _of_this_process[:] = [_Renderer()]
    return _of_this_process[0]
