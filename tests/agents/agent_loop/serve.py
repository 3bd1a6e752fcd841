"""Serves a model by vLLM in a process of its own: `python -m tests.agents.agent_loop.serve MODEL`.

Prints {"address", "token"}, and ends when its stdin is closed.
"""

import functools
import json
import os
import subprocess
import sys

from verl.rollout.replica import ServerHandle


class ServerProcess:
    """The process, seen from a test."""

    def __init__(self, model: str) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-m", __spec__.name, model], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )  # fmt: skip

    @functools.cached_property
    def handle(self) -> ServerHandle:
        """Its address, once it serves."""
        for line in self.process.stdout:
            if line.startswith("{"):
                said = json.loads(line)
                return ServerHandle(said["address"], said["token"])
        raise RuntimeError(f"the server ended with {self.process.wait()}")

    def kill(self) -> None:
        """SIGKILL."""
        self.process.kill()
        self.process.wait()


def main(model: str) -> None:
    from tests.helpers.engines import make_engine, serve_weights

    engine = make_engine(model)
    rollout = serve_weights(engine, prompt_length=8, response_length=40)
    handle = rollout.server_handle
    print("\n" + json.dumps({"address": handle.address, "token": handle.token}), flush=True)
    sys.stdin.read()
    os._exit(0)


if __name__ == "__main__":
    main(sys.argv[1])
