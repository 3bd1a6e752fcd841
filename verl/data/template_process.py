"""The subprocess of `verl.data.chat_template`, which renders templates with limits on memory, time and length.

It runs this file as a script. To start quickly, it imports neither transformers nor other modules of this package.
"""

import contextlib
import json
import resource
import signal
import sys
from datetime import datetime
from functools import lru_cache
from multiprocessing.connection import Connection
from typing import Any

from jinja2 import Template, TemplateError, nodes
from jinja2.ext import Extension
from jinja2.sandbox import ImmutableSandboxedEnvironment

MEMORY_BYTES = 1 << 30  # limit for a rendering, in addition to the memory of the idle subprocess
TEXT_LENGTH = 1 << 26  # limit of the rendered text, in characters
TEXT, ERROR, MEMORY, LONG = b"text", b"error", b"memory", b"long"


def main(descriptor: int) -> None:
    """Run the subprocess: serve requests until the parent closes the connection."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the caller handles Ctrl-C
    signal.signal(signal.SIGPROF, signal.SIG_DFL)  # kills the process, also within C code
    connection = Connection(descriptor)
    with contextlib.suppress(EOFError, OSError):
        while True:
            seconds, memory, length, template, variables = connection.recv()
            previous_limits = _limit_memory(memory)
            signal.setitimer(signal.ITIMER_PROF, seconds)
            try:
                text = _compiled(template).render(variables)
                answer = LONG if len(text) > length else TEXT + b" " + text.encode("utf-8", "surrogatepass")
            except MemoryError:
                answer = MEMORY
            except Exception as error:  # a template can raise anything
                message = f"{type(error).__name__}: {str(error)[:1000]}"
                answer = ERROR + b" " + message.encode("utf-8", "surrogatepass")
            signal.setitimer(signal.ITIMER_PROF, 0)
            text = None  # frees its memory before the next request
            resource.setrlimit(resource.RLIMIT_AS, previous_limits)
            connection.send_bytes(answer)


class _Generation(Extension):
    """The block `generation`, which marks what the model writes: its content is rendered as it is."""

    tags = {"generation"}

    def parse(self, parser: Any) -> nodes.Node:
        line = next(parser.stream).lineno
        return nodes.Scope(parser.parse_statements(("name:endgeneration",), drop_needle=True)).set_lineno(line)


@lru_cache(maxsize=64)
def _compiled(template: str) -> Template:
    """The template in an environment with the settings, filters and functions that transformers provides."""
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, "jinja2.ext.loopcontrols"]
    )
    environment.filters["tojson"] = _to_json
    environment.globals |= {"raise_exception": _raise_exception, "strftime_now": lambda f: datetime.now().strftime(f)}
    return environment.from_string(template)


def _to_json(
    value: Any, ensure_ascii: bool = False, indent: Any = None, separators: Any = None, sort_keys: bool = False
) -> str:
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _raise_exception(message: str) -> None:
    raise TemplateError(message)


def _limit_memory(additional: int) -> tuple[int, int]:
    """Limit the address space to its current size plus `additional` bytes; returns the previous (soft, hard) limits."""
    with open("/proc/self/statm") as file:
        limit = int(file.read().split()[0]) * resource.getpagesize() + additional
    soft, hard = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (limit if hard == resource.RLIM_INFINITY else min(limit, hard), hard))
    return soft, hard


if __name__ == "__main__":
    main(int(sys.argv[1]))
