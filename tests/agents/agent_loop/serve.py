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
    from tests.helpers.engines import make_engine
    from verl.rollout import get_rollout_class
    from verl.workers.config import RolloutConfig

    engine = make_engine(model)
    settings = {"name": "vllm", "mode": "async", "prompt_length": 8, "response_length": 40, "dtype": "float32",
                "max_num_seqs": 32, "max_num_batched_tokens": 400, "calculate_log_probs": True}  # fmt: skip
    rollout = get_rollout_class("vllm", "async")(RolloutConfig(**settings), engine.model_config, engine.mesh)
    rollout.resume(["weights"])
    rollout.update_weights(engine.get_per_tensor_param())
    rollout.resume(["kv_cache"])
    handle = rollout.server_handle
    print("\n" + json.dumps({"address": handle.address, "token": handle.token}), flush=True)
    sys.stdin.read()
    os._exit(0)


if __name__ == "__main__":
    main(sys.argv[1])
