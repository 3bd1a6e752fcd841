"""The vLLM server of an SPD run: completions of the target, on 127.0.0.1 unless the config names servers."""

import os
from collections.abc import Iterator
from contextlib import contextmanager

from omegaconf import DictConfig, OmegaConf

from recipe.spd.settings import SPDSettings
from verl.rollout.vllm_rollout.openai_server import LocalVllmServer

LOCAL_VARIABLE = "SPD_LOCAL_SERVER"  # handle of the server that the run's entry started, for its other processes


def server_of(settings: SPDSettings, prompt_length: int, response_length: int) -> LocalVllmServer:
    """Start the server of a run, for context, rounds of blocks and completion unless max_model_len is set."""
    rollout = settings.rollout
    length = rollout.max_model_len or prompt_length + rollout.rounds * (response_length + 1) + rollout.max_tokens
    # Without the sampling defaults of the model's generation_config.json; its end tokens stay.
    arguments = ["--generation-config", "vllm", *rollout.server_args]
    return LocalVllmServer(settings.target_path, rollout.server_log, length, arguments)


@contextmanager
def local_server(config: DictConfig) -> Iterator[None]:
    """Run a server during a training; it loads while Ray and the ranks start, which find it by LOCAL_VARIABLE.

    Not where the config names servers, on a running cluster, or on several nodes.
    """
    if os.environ.get("RAY_ADDRESS") or config.trainer.nnodes > 1 or config.spd.rollout.servers:
        yield
        return
    settings = SPDSettings.from_custom(OmegaConf.to_container(config.spd, resolve=True))
    server = server_of(settings, config.data.max_prompt_length, config.data.max_response_length)
    os.environ[LOCAL_VARIABLE] = server.handle()
    try:
        yield
    finally:
        del os.environ[LOCAL_VARIABLE]
        server.stop()
