"""The process that renders chat templates: a JSON request a line in, {"text"} or {"error"} out."""

import json
import resource
import signal
import sys

MEMORY_BYTES = 256 << 20  # what a rendering may take on top of the process as it starts


def main() -> None:
    """Answers until its input ends."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the trainer's; this ends when its input does
    from transformers.utils.chat_template_utils import render_jinja_template

    with open("/proc/self/statm") as f:
        used = int(f.read().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (used + MEMORY_BYTES,) * 2)
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, 0))
    _say({"text": "ready"})
    for line in sys.stdin:
        try:
            _say({"text": render_jinja_template(**json.loads(line))[0][0]})
        except Exception as error:  # whatever a template raises is told to the one who asked
            _say({"error": " ".join(f"{type(error).__name__}: {error}".split())[:300]})


def _say(answer: dict[str, str]) -> None:
    sys.stdout.write(json.dumps(answer) + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    main()
