"""The adapters of OpenEnv and skyrl-gym: their settings, and a few steps of GRPO (make test-environments)."""

import json
import subprocess
import sys
import time
import urllib.request
from pathlib import Path

import pytest

from examples.environments.openenv_adapter import OpenEnv
from tests.agents.environments.conftest import SKYRL_GYM
from tests.agents.environments.test_training import train
from verl.agents.environments.base import adapter_class, load_environment
from verl.config.environment import EnvironmentConfig
from verl.utils.ports import free_port

HERE = Path(__file__).parent
OPENENV = "examples.environments.openenv_adapter.OpenEnv"


def test_an_adapter_is_named_by_its_class_path():
    assert adapter_class(OPENENV) is OpenEnv
    assert adapter_class(SKYRL_GYM).LIBRARY.package == "skyrl-gym"
    with pytest.raises(TypeError, match="no subclass of verl.agents.environments.base.Environment"):
        adapter_class("examples.environments.openenv_adapter.json")
    with pytest.raises(ImportError, match=r"openenv==0.10.0 is not installed here"):
        load_environment({"name": OPENENV})
    with pytest.raises(ValueError, match="needs data.environment.url"):
        OpenEnv(EnvironmentConfig(name=OPENENV), None)


@pytest.fixture
def guess_server(tmp_path):
    port = free_port()
    with open(tmp_path / "server.log", "w") as log:
        server = subprocess.Popen([sys.executable, HERE / "guess_server.py", str(port)], stdout=log, stderr=log)
    url = f"http://127.0.0.1:{port}"
    for _ in range(600):
        try:
            urllib.request.urlopen(f"{url}/schema", timeout=1).close()
            break
        except OSError:
            assert server.poll() is None, (tmp_path / "server.log").read_text()
            time.sleep(0.2)
    yield url
    server.kill()
    server.wait()


@pytest.mark.environments
@pytest.mark.process
def test_openenv_trains_over_several_turns(tmp_path, tiny_llama, guess_server):
    rows = train(tmp_path, tiny_llama, OPENENV, agent=True, url=guess_server, params="{observation: text}",
                 max_turns=3)  # fmt: skip
    steps = [row for row in rows if "critic/score/mean" in row]
    assert all(row["num_turns/max"] > 2 for row in steps)
    assert all(1 <= row["reward/steps/mean"] <= 3 for row in steps)


@pytest.mark.environments
@pytest.mark.process
def test_skyrl_gym_trains_over_several_turns(tmp_path, tiny_llama):
    rows = [
        {"data_source": "sums", "env_class": "gsm8k_multi_turn", "prompt": [{"role": "user", "content": f"{i} + 1 ="}],
         "reward_spec": {"method": "rule", "ground_truth": str(i + 1)}} for i in range(16)
    ]  # fmt: skip
    file = tmp_path / "sums.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    rows = train(tmp_path / "run", tiny_llama, SKYRL_GYM, agent=True, files=file, max_turns=2)
    assert all(1 <= row["reward/steps/mean"] <= 2 for row in rows if "critic/score/mean" in row)
