"""One vLLM server for all SPD trainings of a test process."""

from collections.abc import Iterator

import pytest

from tests.helpers.models import save_answering_llama
from verl.rollout.vllm_rollout.openai_server import LocalVllmServer


@pytest.fixture(scope="session")
def served_model(tmp_path_factory) -> Iterator[tuple[str, str]]:
    """(model folder, URL) of a real server. Tests must leave it running: those of failing servers start their own."""
    folder = tmp_path_factory.mktemp("served")
    model = save_answering_llama(folder / "target")
    server = LocalVllmServer(model, folder / "server.log", 128)
    try:
        yield model, server.wait_ready(300)
    finally:
        server.stop()
