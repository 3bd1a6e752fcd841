"""Renders chat templates, which come with a model like its weights and are trusted as little.

Run as a script, this file is the process that renders: requests come on stdin, answers go to stdout.
"""

from __future__ import annotations

import json
import os
import resource
import select
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

LIMIT_S = 1.0  # CPU seconds of one rendering, which usually takes a tenth of a millisecond
PATIENCE_S = 60.0  # seconds in which a process that is not at its limit must answer, on a busy machine
MEMORY_BYTES = 256 << 20  # what a rendering may take on top of the process as it starts


class ChatTemplateError(ValueError):
    """A chat template failed, ran too long or is no template; the text says which."""


def render_chat(tokenizer: PreTrainedTokenizerBase, messages: list[dict], **settings: Any) -> str:
    """The text that the tokenizer's chat template makes of the messages.

    `settings` are those of `apply_chat_template` (add_generation_prompt, tools, a template's own). A template runs in a
    process of its own, which the kernel ends after LIMIT_S seconds of work. ChatTemplateError says what went wrong.
    """
    (found,) = render_chats(tokenizer, [messages], **settings)
    if isinstance(found, ChatTemplateError):
        raise found
    return found


def render_chats(
    tokenizer: PreTrainedTokenizerBase, conversations: Sequence[list[dict]], **settings: Any
) -> Iterator[str | ChatTemplateError]:
    """As render_chat, of many conversations in one exchange; what went wrong with one stands in its place."""
    from transformers import PreTrainedTokenizerBase

    if type(tokenizer).apply_chat_template is not PreTrainedTokenizerBase.apply_chat_template:  # code, no template
        yield from (tokenizer.apply_chat_template(messages, tokenize=False, **settings) for messages in conversations)
        return
    try:
        template = tokenizer.get_chat_template(settings.pop("chat_template", None), settings.get("tools"))
    except ValueError as error:
        yield from [_told(tokenizer, error)] * len(conversations)
        return
    common = {"chat_template": template, **tokenizer.special_tokens_map, **settings}
    found = _together(tokenizer, conversations, common)
    for one, messages in zip(found, conversations, strict=True):
        # One that failed has all the work and memory to itself before it is called wrong, when it is asked for.
        settled = isinstance(one, str) or len(conversations) == 1
        yield one if settled else _together(tokenizer, [messages], common)[0]


def _together(
    tokenizer: PreTrainedTokenizerBase, conversations: Sequence[list[dict]], common: dict[str, Any]
) -> list[str | ChatTemplateError]:
    try:
        return _renderer().render(conversations, common)
    except (ValueError, TypeError) as error:  # values that are not plain
        return [_told(tokenizer, error)] * len(conversations)


def _told(tokenizer: PreTrainedTokenizerBase, error: Exception) -> ChatTemplateError:
    return ChatTemplateError(f"{tokenizer.name_or_path}: {' '.join(str(error).split())}")


class _Renderer:
    """The process that renders; started when it is first needed, and again when it was killed.

    No fork: a lock that another thread of this process holds would stay locked in it.
    """

    def __init__(self) -> None:
        self.owner = os.getpid()
        self.lock = threading.Lock()
        self.process: subprocess.Popen | None = None

    def render(self, conversations: Sequence[list[dict]], common: dict[str, Any]) -> list[str | ChatTemplateError]:
        request = json.dumps({"conversations": list(conversations), **common})
        with self.lock:
            if self.process is None:
                self._start()
            answer = self._asked(request)
        if not answer:
            stopped = ChatTemplateError(
                f"the chat template did not end within {LIMIT_S:g} s of work and was stopped; mend it, or set "
                "actor_rollout_ref.model.custom_chat_template."
            )
            return [stopped] * len(conversations)
        found = json.loads(answer)
        return [one["text"] if "text" in one else ChatTemplateError(one["error"]) for one in found]

    def _asked(self, request: str) -> bytes:
        """The answer; nothing where the process has ended."""
        try:
            _write(self.process.stdin.fileno(), request.encode())
            answer = _read(self.process.stdout.fileno(), time.monotonic() + PATIENCE_S)
        except BrokenPipeError:
            answer = b""
        if not answer:
            self._stop()
        return answer

    def _start(self) -> None:
        kept = ("PATH", "HOME", "LANG", "LD_LIBRARY_PATH")  # no secrets
        environment = {name: os.environ[name] for name in kept if name in os.environ}
        environment["PYTHONPATH"] = os.pathsep.join(filter(None, sys.path))
        self.process = subprocess.Popen(
            [sys.executable, "-P", __file__], stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL,
            env=environment, start_new_session=True,
        )  # fmt: skip
        if not _read(self.process.stdout.fileno(), time.monotonic() + PATIENCE_S):
            self._stop()
            raise RuntimeError("the process that renders chat templates could not be started.")

    def _stop(self) -> None:
        self.process.kill()
        self.process.stdin.close()
        self.process.stdout.close()
        self.process.wait()
        self.process = None


def _serve(asks: int, answers: int) -> None:
    """The process: reads requests, writes answers, leaves when its parent does."""
    from transformers.utils import chat_template_utils  # noqa: F401 (loaded before the limits)

    try:
        parent = os.getppid()
        signal.signal(signal.SIGPROF, signal.SIG_DFL)  # ends the process, also inside of one long instruction
        with open("/proc/self/statm") as f:
            used = int(f.read().split()[0]) * resource.getpagesize()
        resource.setrlimit(resource.RLIMIT_AS, (used + MEMORY_BYTES,) * 2)
        resource.setrlimit(resource.RLIMIT_FSIZE, (0, 0))
        _write(answers, b"ready")
        while True:
            while not select.select([asks], [], [], 2.0)[0]:
                if os.getppid() != parent:  # killed; another fork of it may hold the pipe open
                    return
            if not (request := _read(asks, None)):
                return
            _write(answers, _rendered(request))
    finally:
        os._exit(0)


def _rendered(request: bytes) -> bytes:
    """The text of each conversation, or what its template raised; each has LIMIT_S seconds."""
    from transformers.utils.chat_template_utils import render_jinja_template

    signal.setitimer(signal.ITIMER_PROF, LIMIT_S)
    common = json.loads(request)
    found = []
    for messages in common.pop("conversations"):
        signal.setitimer(signal.ITIMER_PROF, LIMIT_S)
        try:
            found.append({"text": render_jinja_template(conversations=[messages], **common)[0][0]})
        except Exception as error:  # whatever a template raises is told to the one who asked
            told = " ".join(f"the chat template raised {type(error).__name__}: {error}".split())[:300]
            found.append({"error": told})
    answer = json.dumps(found).encode()
    signal.setitimer(signal.ITIMER_PROF, 0)
    return answer


def _write(pipe: int, text: bytes) -> None:
    text = len(text).to_bytes(8, "little") + text
    while text:
        text = text[os.write(pipe, text) :]


def _read(pipe: int, end: float | None) -> bytes:
    """One message; nothing when `end` (monotonic seconds) comes first or the other side is gone."""
    got, size = b"", 8
    while len(got) < size:
        if end is not None and not select.select([pipe], [], [], max(0.0, end - time.monotonic()))[0]:
            return b""
        piece = os.read(pipe, 1 << 20)
        if not piece:
            return b""
        got += piece
        size = 8 + int.from_bytes(got[:8], "little") if len(got) >= 8 else 8
    return got[8:]


_of_this_process: list[_Renderer] = []


def _renderer() -> _Renderer:
    """This process's renderer: a forked worker of a data loader must not write into its parent's pipes."""
    if not _of_this_process or _of_this_process[0].owner != os.getpid():
        _of_this_process[:] = [_Renderer()]
    return _of_this_process[0]


if __name__ == "__main__":
    _serve(0, 1)
